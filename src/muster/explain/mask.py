"""Log text as it may be shown: without the secrets of environments and command lines.

Hidden is what the name of a secret stands before, and what its own form shows to be one.
"""

import re

MASK = "***"
_PASSWORDS = r"(?i:passw(?:or)?d|passphrase|secret|(?<=_)pwd)|(?<=[A-Z]_)PASS"
_TOKENS = (
    r"(?i:(?:api|access|account)[_-]?key|token|credentials?|x-amz-signature|(?<=[?&])sig)"
    r"|(?<=[A-Z0-9])_(?:KEY|PAT|AUTH)"
)
_IS = r"[\"']?\s{0,3}[=:]\s{0,3}[\"']?"
# --password x; of an argv that was printed as a list, '--password', 'x'
_THEN = r"[\"']?,?\s{1,3}[\"']?(?!-)"
_ANY = r"(?:(?<=\")[^\"]+|(?<=')[^']+|[^\s\"'&]+)"
# a token is long and no number: those of a language model have names such as these, too
_LONG = r"(?![<\[({]|\d{1,30}(?![\w-]))(?:(?<=[\"'])[^\"']{8,}|[^\s\"',;)}&]{8,})"
_FORMS = (
    r"hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|glpat-[\w-]{16,}|xox[abeprs]-[\w-]{10,}|nvapi-[\w-]{16,}|(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|AIza[\w-]{30,}|dckr_pat_[\w-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-AgE[\w-]{20,}"
)
# what the group "name" holds is shown
_SECRETS = tuple(
    map(
        re.compile,
        (
            r"(?P<name>-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----)[^-]+",
            # a URL's user and password
            r"(?P<name>://)[^/\s:@]{0,100}:[^/\s]{1,200}(?=@)",
            r"(?P<name>\b(?i:bearer) )[\w.~+/=-]{8,}",
            rf"(?P<name>(?i:authorization){_IS}(?i:(?:basic|digest|token) )?)[^\s\"',]{{8,}}",
            rf"(?P<name>(?:{_PASSWORDS}){_IS}){_ANY}",
            rf"(?P<name>(?:{_TOKENS}){_IS}){_LONG}",
            rf"(?P<name>(?<![\w-])--[\w-]{{0,40}}(?:{_PASSWORDS}){_THEN}){_ANY}",
            rf"(?P<name>(?<![\w-])--[\w-]{{0,40}}(?:{_TOKENS}){_THEN}){_LONG}",
            rf"(?P<name>)(?<![A-Za-z0-9])(?:{_FORMS})",
            r"(?P<name>)(?<![\w.-])eyJ[\w-]{10,}(?:\.[\w-]{4,}){0,4}",
        ),
    )
)


def masked(text: str) -> str:
    """`text` with *** in the place of every secret."""
    for secret in _SECRETS:
        text = secret.sub(lambda match: match["name"] + MASK, text)
    return text
