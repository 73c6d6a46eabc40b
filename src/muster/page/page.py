"""The page itself: one file that loads nothing, runs nothing and prints well."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from muster import size
from muster.dossier import Dossier
from muster.page import plot, words
from muster.page.sheet import sheet


def page(dossier: Dossier) -> bytes:
    """The report of `dossier` as HTML in UTF-8. Text of the run is escaped and stays text."""
    return _template().render(sheet=sheet(dossier), plot=plot).encode()


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        loader=PackageLoader("muster.page", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "line": words.line,
        "block": words.block,
        "tail": words.tail,
        "bytes": size.binary,
    }
    return environment.get_template("report.html")
