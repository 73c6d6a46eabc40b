"""Log text as it may be shown: without the secrets of environments and command lines."""

import re

MASK = "***"
# a name that says so and its value; a URL's user and password; tokens that are known by their form
_SECRET = re.compile(
    r"(?P<name>(?:api_?key|access_?key|token|passwo?r?d|secret|credentials?)[\"']?"
    r"\s{0,3}[=:]\s{0,3}[\"']?(?:bearer )?)[^\s\"',;)}&]{4,}"
    r"|(?P<scheme>://)[^/\s:@]{1,100}:[^/\s@]{1,100}(?=@)"
    r"|(?P<bearer>\bbearer )[\w.~+/=-]{8,}"
    r"|\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abp]-|nvapi-|AKIA)[\w-]{10,}"
    r"|\beyJ[\w-]{10,2000}\.[\w-]{4,2000}\.[\w-]{4,}",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """`text` with *** in the place of every secret."""
    return _SECRET.sub(_hidden, text)


def _hidden(match: re.Match[str]) -> str:
    kept = match["name"] or match["scheme"] or match["bearer"] or ""
    return kept + MASK
