"""Write tables into the Markdown files from the JSON reports of the benchmarks.

A Markdown file marks each generated table with its name:

    <!-- generated: decoding -->
    | ... |
    <!-- end -->

Example:
    python -m benchmarks.result_tables
    python -m benchmarks.result_tables --check
"""

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import quality_tables, speed_tables
from benchmarks.comparison import tables as comparison_tables
from hf_attn_variants.files import atomic_write

__all__ = ["TABLES", "fill_tables", "find_table_names", "iterate_differences", "list_documents"]

ROOT = Path(__file__).resolve().parents[1]
TABLES = speed_tables.TABLES | quality_tables.TABLES | comparison_tables.TABLES
# A block holds only empty lines and lines of a table, so that a lost end marker cannot remove text.
BLOCK = re.compile(r"<!-- generated: (\w+) -->\n(?:(?:\|.*)?\n)*<!-- end -->")


def list_documents() -> list[Path]:
    """Return the Markdown files that can contain generated tables."""
    return sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*/*.md")])


def find_table_names(text: str) -> list[str]:
    """Return the names of the generated tables in a text."""
    return [block[1] for block in BLOCK.finditer(text)]


def fill_tables(text: str) -> str:
    """Return a text with its tables filled from the reports.

    Raises:
        KeyError: if a text names a table that does not exist.
    """

    def block(match: re.Match) -> str:
        table = TABLES[match[1]]
        rows = speed_tables.format_markdown_table(table.columns, table.made())
        # Older reports use another name for these latents.
        rows = re.sub(r"cross latent \d+ \(exact\)", "cached encoder outputs", rows)
        return f"<!-- generated: {match[1]} -->\n\n{rows}\n\n<!-- end -->"

    return BLOCK.sub(block, text)


def iterate_differences() -> Iterator[str]:
    """Yield a message for each file whose tables differ from the reports, and for each table without a file."""
    found_names: set[str] = set()
    for path in list_documents():
        text = path.read_text(encoding="utf-8")
        found_names |= {*find_table_names(text)}
        if fill_tables(text) != text:
            yield f"{path.relative_to(ROOT)} differs from the reports; run `python -m benchmarks.result_tables`"
    yield from (f"No file has the table {name!r}." for name in TABLES if name not in found_names)


def main(arguments: list[str] | None = None) -> int:
    """Write or check the tables, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with status 1 if a file would change"
    )
    args = parser.parse_args(arguments)
    if not args.check:
        for path in list_documents():
            text = path.read_text(encoding="utf-8")
            if fill_tables(text) != text:
                atomic_write(path, fill_tables(text))
                print(f"wrote {path.relative_to(ROOT)}")
    messages = [*iterate_differences()]
    print("\n".join(messages), end="\n" * bool(messages))
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main())
