"""Tables on the terminal: rich's where it can, plain text where not."""

import sys
from collections.abc import Sequence

__all__ = ["print_table"]


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title, a header and rows of cells; the first column is a name, the others are numbers."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(title=escape(title), title_justify="left")
            for index, name in enumerate(header):
                table.add_column(name, justify="right" if index else "left", overflow="fold")
            for row in rows:
                table.add_row(*map(escape, row))
            Console().print(table)
            return
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(title)
    print("  ".join(name.ljust(width) for name, width in zip(header, widths, strict=True)).rstrip())
    print("  ".join("-" * width for width in widths))
    for row in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]))
