"""Single-line faults for `line_faults.py`, and functions that find their lines in changed code."""

import ast
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "hf_attn_variants"
FOLDERS = ("modeling", "conversion", "training", "shared_memory", "quantization", "export")
LEAST = 10  # the minimum number of faults per folder
Fault = dict[str, Any]
Spot = tuple[int, int, int, str, str]
EMPTY = ("None", "False")  # replacing them by None rarely has an effect
Functions = ast.FunctionDef | ast.AsyncFunctionDef
OPERATORS: dict[type[ast.AST], tuple[str, ...]] = {
    **{ast.Lt: ("<", "<=", ">="), ast.LtE: ("<=", "<", ">"), ast.Gt: (">", ">=", "<="), ast.GtE: (">=", ">", "<")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")},
    **{ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*")},
}
MESSAGE = re.compile(r"\b(logger|logging|warnings|print|warn\w*|error)\b")


def iterate_functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Functions]]:
    """Yield each function with its qualified name, outer functions first."""
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}{child.name}" if isinstance(child, Functions | ast.ClassDef) else prefix.rstrip(".")
        if isinstance(child, Functions):
            yield name, child
        yield from iterate_functions(child, f"{name}." if name else "")


def is_text(node: ast.expr) -> bool:
    """Return whether an expression is a string or bytes, for which operators have another meaning."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def is_left_out(node: ast.AST) -> bool:
    """Return whether a node gets no faults: errors, messages, imports for type checkers and GPU kernels."""
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Call):
        return bool(MESSAGE.search(ast.unparse(node.func)))
    if isinstance(node, Functions):
        return any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
    if isinstance(node, ast.keyword):
        return node.arg == "strict"  # it only has an effect if other code is wrong
    return isinstance(node, ast.Raise | ast.JoinedStr)


def iterate_mutations(node: ast.AST, lines: list[bytes]) -> Iterator[Spot]:
    """Yield the faults of a node and its descendants as line, first byte, last byte, new text and kind."""

    def text(part: ast.expr) -> str:
        return lines[part.lineno - 1][part.col_offset : part.end_col_offset].decode()

    def spot(part: ast.expr | ast.stmt, new: str, kind: str) -> Iterator[Spot]:
        if part.lineno == part.end_lineno:
            yield part.lineno, part.col_offset, part.end_col_offset or 0, new, kind

    def between(left: ast.expr, operator: ast.AST, right: ast.expr) -> Iterator[Spot]:
        is_same_line = left.end_lineno == right.lineno and type(operator) in OPERATORS
        if is_same_line and not (isinstance(operator, ast.operator) and (is_text(left) or is_text(right))):
            old, *others = OPERATORS[type(operator)]
            begin, end = left.end_col_offset or 0, right.col_offset
            middle = lines[right.lineno - 1][begin:end].decode()
            for new in others:
                yield right.lineno, begin, end, middle.replace(old, new, 1), f"{old} to {new}"

    if is_left_out(node):
        return
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from between(node.left, node.ops[0], node.comparators[0])
    elif isinstance(node, ast.BinOp):
        yield from between(node.left, node.op, node.right)
    elif isinstance(node, ast.BoolOp):
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from between(left, node.op, right)
    elif isinstance(node, ast.If):
        yield from spot(node.test, f"not ({text(node.test)})", "negated condition")
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield from spot(node, str(not node.value), "other boolean")
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from spot(node, str(node.value + 1), "integer + 1")
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) not in EMPTY:
        yield from spot(node, "return None", "return None")
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not is_left_out(node.value):
        yield from spot(node, "pass", "dropped call")
    elif isinstance(node, ast.Call):
        for first, second in zip(node.args, node.args[1:], strict=False):
            if first.lineno == second.end_lineno and ast.unparse(node.func) not in ("min", "max"):
                middle = lines[first.lineno - 1][first.end_col_offset : second.col_offset].decode()
                swapped = text(second) + middle + text(first)
                yield first.lineno, first.col_offset, second.end_col_offset or 0, swapped, "swapped arguments"
        for keyword in node.keywords:
            if keyword.arg and not is_left_out(keyword) and ast.unparse(keyword.value) not in EMPTY:
                yield from spot(keyword.value, "None", f"{keyword.arg} is None")
    # Decorators, default values and annotations run at import, or never.
    at_import = ("decorator_list", "args", "returns") if isinstance(node, Functions) else ("annotation",)
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in at_import:
                yield from iterate_mutations(child, lines)


def make_line_index(root: Path) -> dict[tuple[str, str], list[tuple[str, int, int]]]:
    """Return the places of each line of each function: file, line number, and first line of its statement."""
    index = defaultdict(list)
    for path in sorted((root / PACKAGE).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree, lines = ast.parse(source), source.splitlines()
        owner: dict[int, str] = {}
        first: dict[int, int] = {}
        for name, node in iterate_functions(tree):
            owner |= dict.fromkeys(range(node.body[0].lineno, (node.end_lineno or 0) + 1), name)
        for statement in ast.walk(tree):  # parents come first, so that the innermost statement remains
            if isinstance(statement, ast.stmt):
                number = statement.lineno
                first |= dict.fromkeys(range(number, (statement.end_lineno or number) + 1), number)
        for number, name in owner.items():
            key = (name, lines[number - 1].strip())
            index[key].append((path.relative_to(root).as_posix(), number, first.get(number, number)))
    return index


def choose_faults(root: Path, count: int, seed: int) -> list[Fault]:
    """Return random faults of lines that are unique among functions of the same name, at least `LEAST` per folder."""
    index = make_line_index(root)
    candidates: dict[str, dict[tuple[str, str], list[Fault]]] = {folder: defaultdict(list) for folder in FOLDERS}
    for folder in FOLDERS:
        for path in sorted((root / PACKAGE / folder).rglob("*.py")):
            source = path.read_bytes()
            lines, file = source.splitlines(), path.relative_to(root).as_posix()
            for name, node in iterate_functions(ast.parse(source)):
                for number, begin, end, new, kind in iterate_mutations(node, lines):
                    old = lines[number - 1]
                    fault = (old[:begin] + new.encode() + old[end:]).decode().strip()
                    key = (name, old.decode().strip())
                    row = {"file": file, "function": name, "line": key[1], "fault": fault, "kind": kind}
                    if [place[:2] for place in index[key]] == [(file, number)] and row not in candidates[folder][key]:
                        candidates[folder][key].append(row)
    draw = random.Random(seed)
    rest = draw.choices(FOLDERS, [len(candidates[folder]) for folder in FOLDERS], k=count - LEAST * len(FOLDERS))
    chosen = []
    for folder, number in (Counter(rest) + Counter(dict.fromkeys(FOLDERS, LEAST))).items():
        for key in draw.sample(sorted(candidates[folder]), number):
            chosen.append(draw.choice(candidates[folder][key]))
    return sorted(chosen, key=lambda row: (FOLDERS.index(row["file"].split("/")[1]), row["file"], row["line"]))
