"""Tables for a terminal: columns under bold headings, without a line drawn."""

from rich.table import Table


def bare(*headings: str, wraps: int = 1) -> Table:
    """A table whose last `wraps` columns may wrap."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, heading in enumerate(headings):
        table.add_column(heading, no_wrap=at < len(headings) - wraps)
    return table
