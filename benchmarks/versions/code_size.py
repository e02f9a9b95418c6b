"""Count the lines of code of the package and of its tests, and compare them with an earlier count.

Blank lines, comments and docstrings are not counted. The complexity of a function is one more than the number of its
branches: conditions, loops, exception handlers, `and` and `or`, `match` cases, and the conditions of comprehensions.

Example:
    python -m benchmarks.versions.code_size --output build/size.json
    python -m benchmarks.versions.code_size --compare benchmarks/versions/results/code_size_before.json
    python -m benchmarks.versions.code_size --remote_code
"""

import argparse
import ast
import io
import json
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("hf_attn_variants", "tests", "benchmarks", "scripts")
LONG = 60
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: the one with this file)")
    parser.add_argument("--output", type=Path, help="a JSON file for the counts")
    parser.add_argument("--compare", type=Path, help="an earlier JSON file for a comparison")
    parser.add_argument(
        "--remote_code", action="store_true", help="only print the size of the remote code for each mechanism"
    )
    return parser.parse_args()


def find_docstring_lines(tree: ast.Module) -> set[int]:
    """Return the line numbers of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            lines.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return lines


def list_own_nodes(function: ast.AST) -> list[ast.AST]:
    """Return the nodes of a function, except those of nested functions."""
    nodes = []
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, FUNCTIONS):
            nodes += [child, *list_own_nodes(child)]
    return nodes


def compute_complexity(function: ast.AST) -> int:
    """Return one more than the number of branches of a function, without those of nested functions."""
    count = 1
    for node in list_own_nodes(function):
        count += isinstance(node, BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return count


def count_text(text: str) -> Counter[str]:
    """Return the totals of a source file: lines of code, characters, functions and their complexity."""
    tree = ast.parse(text)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= find_docstring_lines(tree)
    filled = [line for line in text.splitlines() if line.strip()]
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    return Counter(
        files=1,
        code_lines=len(code),
        filled_lines=len(filled),
        characters=sum(map(len, filled)),
        functions=len(functions),
        long_functions=sum((node.end_lineno or 0) - node.lineno + 1 > LONG for node in functions),
        complexity=sum(map(compute_complexity, functions)),
    )


def count(root: Path) -> dict[str, dict[str, float]]:
    """Return a row for each part of the repository, and for each folder of the package and the tests."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for part in PARTS:
        for path in sorted((root / part).rglob("*.py")):
            sums, folders = count_text(path.read_text(encoding="utf-8")), path.relative_to(root).parts
            totals[part].update(sums)
            if part in PARTS[:2]:
                totals["/".join(folders[:2]) if len(folders) > 2 else f"{part}/*.py"].update(sums)
    rows = {}
    for name, total in sorted(totals.items()):
        row: dict[str, float] = {key: total[key] for key in ("files", "code_lines", "functions")}
        row["long_function_percent"] = round(100 * total["long_functions"] / max(total["functions"], 1), 2)
        row["mean_line_length"] = round(total["characters"] / max(total["filled_lines"], 1), 1)
        row["mean_complexity"] = round(total["complexity"] / max(total["functions"], 1), 2)
        rows[name] = row
    return rows


def count_remote_code() -> dict[str, dict[str, tuple[int, int, int]]]:
    """Return the numbers of files, code lines and lines of the remote code, for each architecture and mechanism."""
    from hf_attn_variants.modeling.fields.composition import MECHANISMS
    from hf_attn_variants.modeling.remote_code import get_code_files
    from hf_attn_variants.registration import ARCHITECTURES

    counts: dict[str, dict[str, tuple[int, int, int]]] = {}
    for config_class in ARCHITECTURES:
        row = counts.setdefault(config_class.model_type, {})
        for name in ("grouped_heads", *MECHANISMS.values()):
            mechanisms = () if name == "grouped_heads" else (name,)
            texts = get_code_files(config_class, config_class.modeling_file, mechanisms).values()
            lines = sum(len(text.splitlines()) for text in texts)
            row[name] = len(texts), sum(count_text(text)["code_lines"] for text in texts), lines
    return counts


def main(args: argparse.Namespace) -> None:
    """Print the counts, together with those of an earlier JSON file if there is one."""
    if args.remote_code:
        for architecture, counts in count_remote_code().items():
            for mechanism, (files, code_lines, lines) in counts.items():
                print(f"{architecture:<26}{mechanism:<22}{files:>3} files{code_lines:>7} of code{lines:>7} lines")
        return
    rows = count(args.root)
    earlier = json.loads(args.compare.read_text(encoding="utf-8")) if args.compare else {}
    print(f"{'':<32}{'files':>7}{'code lines':>12}{'long %':>9}{'line length':>13}{'complexity':>12}")
    for name in sorted({*rows, *earlier}):
        for row in (earlier.get(name), rows.get(name)) if args.compare else (rows[name],):
            files, lines, _, share, length, mean = (row or dict.fromkeys(rows["tests"], 0)).values()
            print(f"{name:<32}{files:>7}{lines:>12}{share:>9}{length:>13}{mean:>12}")
            name = "  → now" if args.compare else name
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(parse_args())
