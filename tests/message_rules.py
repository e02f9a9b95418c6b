"""Rules for the messages of errors and warnings, and the number of violations that each file may have.

python tests/message_rules.py           # list the violations
python tests/message_rules.py --write   # update tests/docs/message_baseline.json
"""

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator

from prose_rules import COMPILED, PACKAGE, ROOT

BASELINE = ROOT / "tests/docs/message_baseline.json"
WARNINGS = {"warn", "warning", "warning_once"}
# A placeholder of an f-string becomes this text.
VALUE = "{}"
# Terms of STYLE.md, in addition to the rules of prose_rules.py.
FORBIDDEN = (
    r"\b(?:hosts?|rooms?|travel\w*|twins?|upstream(?:'s)?|numbers a token|latent of the input|exact form|"
    r"matching layers|layers that compare|not kept|heads that talk|memory kept|in words|today's code)\b"
)
PATTERNS = COMPILED | {"forbidden term": re.compile(FORBIDDEN, re.I)}
# A message begins with a sentence, a value, code in backticks, a flag, or a name with an underscore, a dot or a digit.
START = re.compile(r"\W*(?:[A-Z0-9]|\{\}|`|--\w|\w+[\d_./(=\[]|(?:torch|attn-variants)\b)")
# A message ends with a sentence, a value or an indented line of code.
END = re.compile(r"(?:[.?!:][\"')`]*|\{\}|\n {2,}[^\n]*|```)\s*$")
# A message that only joins values contains no rule or advice of its own.
ONLY_VALUES = re.compile(r"(?:\{\}|[\W_]|line|column|attn-variants)*")
RULE_OR_ADVICE = re.compile(
    r"\b(?:must|needs?|requires?|required|only|cannot|supports?|supported|expected|at least|at most|instead|"
    r"does not take|give|provide|use|set|pass|choose|remove|add|install|load|save|convert|call|rename|check|run|"
    r"download|train|split|leave|repeat|replace|write|update|move|delete|shorten|select|make|try|omit|put|quote|"
    r"restore|start|correct|generate|resume|fill|inspect|end)\b",
    re.I,
)


def get_text(node: ast.expr) -> str | None:
    """Return the text of a literal, an f-string or a sum of these, with `VALUE` for each placeholder."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(get_text(part) or VALUE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [get_text(part) for part in (node.left, node.right)]
        return None if parts == [None, None] else "".join(part or VALUE for part in parts)
    return None


def iterate_messages(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the type ("ValueError", ..., "warning") and the text of each message of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, kind = node.exc, ast.unparse(node.exc.func).rpartition(".")[2]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WARNINGS:
            call, kind = node, "warning"
        else:
            continue
        text = get_text(call.args[0]) if call.args else None
        if text and " " in text:
            yield call.lineno, kind, text


def iterate_violations(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the rule and the text of each violation of a module."""
    tree = ast.parse(source)
    names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for line, kind, text in iterate_messages(tree):
        text = re.sub(r"%[srd]", VALUE, text)
        # Attribute errors have the format of Python.
        if kind != "AttributeError" and not START.match(text) and re.match(r"\w*", text)[0] not in names:
            yield line, "start", text
        if not END.search(text):
            yield line, "end", text
        yield from ((line, name, text) for name, pattern in PATTERNS.items() if pattern.search(text))
        if kind == "ValueError" and not RULE_OR_ADVICE.search(text) and not ONLY_VALUES.fullmatch(text):
            yield line, "no rule or advice", text


def count_violations() -> dict[str, dict[str, int]]:
    """Return the number of violations of each file of the package, {path: {rule: number}}."""
    result = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        rules = Counter(rule for _, rule, _ in iterate_violations(path.read_text(encoding="utf-8")))
        result[path.relative_to(ROOT).as_posix()] = dict(sorted(rules.items()))
    return {path: rules for path, rules in result.items() if rules}


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        BASELINE.write_text(json.dumps(count_violations(), indent=1) + "\n", encoding="utf-8")
    for path in sorted((ROOT / PACKAGE).rglob("*.py")) if sys.argv[1:] != ["--write"] else []:
        for line, rule, text in iterate_violations(path.read_text(encoding="utf-8")):
            print(f"{path.relative_to(ROOT)}:{line}: {rule}: {text!r}")
