"""Rules for the text of the repository, and the number of violations that each file may have.

python tests/prose_rules.py README.md docs    # list the violations in some files or folders
python tests/prose_rules.py --write           # update tests/docs/prose_baseline.json
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "tests/docs/prose_baseline.json"
PACKAGE = "hf_attn_variants"
MARKDOWN = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "model_cards")
PYTHON = (PACKAGE, "scripts", "tests")
LONGEST_SENTENCE = 25
UNCLEAR_NAMES = {"each", "found", "told", "asked", "look", "behind"}
# Names that each module may define.
COMMON_NAMES = {"logger", "main", "parse_args", "make_parser", "DESCRIPTION", "EPILOG", "EXAMPLE", "FLAGS"}

BE = r"\b(?:is|are|was|were|be|been|being|gets?)\s+(?:\w+ly\s+|not\s+|always\s+|never\s+)?"
UNIT = r"(?:tokens?|layers?|heads?|rows?|steps?|seconds?|batch|sentences?|texts?|files?|process|position)\b"
TEXT_RULES = {
    "passive without an actor": rf"{BE}(?:told|said|asked)\b(?! to)",
    "refuse": r"\brefus(?:e|es|ed|ing|als?)\b",
    "is no": r"\b(?<!there )(?:is|are|was|were) (?-i:no|none)\b(?! (?:longer|more|larger|smaller|better))",
    "alone": r"(?<!stand-)(?<!let )\balone\b",
    "in the place of": r"\bin (?:its|their|the|a \w+'s) place\b",
    "because, not for": r"[,;] for (?:it|they|there|what|this|these|those)\s",
    "as usual": r"\bas ever\b|\bas (?:it|they) (?:is|was|are|were)\b",
    "per": rf"\b(?:numbers|bytes|values|tokens|weights|examples|labels?|rows?|lines?|seconds|times) an? {UNIT}",
    "old word": r"\b(?:anew|beside|mend(?:s|ed)?|twins?|travels?|wholly|but for|save for|at the hand of|lest)\b",
    "stand or lie": r"\b(?:lies|lie|stands?) (?:in|beside|there|at|before|behind|above|below|first|for)\b(?!-)",
    "glossary term": r"(?<![\w-])(?:hosts?|rooms?|the house)(?![\w-])|\btoday's\b|\bheads? (?:that )?talk\b",
    "Transformers' own": r"\b(?:upstream|transformers|torch)(?:'s|')? own\b",
    "first word": r"^(?:What|Where|Which|Whether|Of|By(?! default))\b[^?]*\.$",
}
COMPILED = {name: re.compile(rule, re.I if name != "first word" else 0) for name, rule in TEXT_RULES.items()}
TEST_NAME = re.compile(r"^test_(?:an?|the|what|who|where|which|whether|of|by|it|its|so)_")


def iterate_python_texts(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of a module and, except for tests, its comments and its strings of several words."""
    tree, in_tests = ast.parse(source), path.parts[0] == "tests"
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            text = node.body[0].value
            docstrings.add(text)
            # Yield each line separately, because blank lines and list items end a sentence.
            yield from ((text.lineno + number, line) for number, line in enumerate(text.value.split("\n")))
    if in_tests:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            if node.value.count(" ") > 2:
                yield node.lineno, node.value


def iterate_markdown_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page outside of code blocks, metadata and generated tables."""
    is_code = False
    start = source.find("\n---\n", 3) if source.startswith("---\n") else 0
    for number, line in enumerate(source.split("\n"), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and number > source.count("\n", 0, start) and not line.startswith(("    ", "<!--", "```")):
            yield number, line


def split_sentences(line: str) -> list[str]:
    """Return the sentences of a line of Markdown; a cell of a table is a sentence."""
    line = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", line)).replace("*", "")
    return [text for cell in line.split("|") for text in re.split(r"(?<=[.!?])\s+", cell.strip(" #->")) if text]


def iterate_violations(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the rule and the text of each violation in a file; `path` is relative to the repository."""
    source = (ROOT / path).read_text(encoding="utf-8")
    is_markdown = path.suffix == ".md"
    for number, line in iterate_markdown_texts(source) if is_markdown else iterate_python_texts(path, source):
        for text in split_sentences(line):
            yield from ((number, rule, match[0]) for rule, p in COMPILED.items() for match in p.finditer(text))
            if is_markdown and len(text.split()) > LONGEST_SENTENCE:
                yield number, "long sentence", f"{len(text.split())} words: {text[:60]}"
    if is_markdown:
        return
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None)
        is_new = not isinstance(node, ast.keyword) and not (
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        )
        if path.parts[0] == PACKAGE and is_new and name in UNCLEAR_NAMES:
            yield node.lineno, "unclear name", name
        if isinstance(node, ast.FunctionDef) and TEST_NAME.match(node.name):
            yield node.lineno, "test name", node.name


def find_repeated_names() -> dict[str, list[str]]:
    """Return the public names that several files of the package define, outside of the formulas of papers."""
    places: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / PACKAGE).rglob("*.py"):
        if "reference" in path.relative_to(ROOT).parts:
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
            is_type = isinstance(node, ast.Assign) and "TypeVar" in ast.unparse(node.value)
            for name in (getattr(target, "id", None) or getattr(target, "name", None) for target in targets):
                if name and not name.startswith("_") and name not in COMMON_NAMES and not is_type:
                    places[name].add(str(path.relative_to(ROOT / PACKAGE)))
    return {name: sorted(files) for name, files in sorted(places.items()) if len(files) > 1}


def count_violations() -> dict[str, dict[str, int]]:
    """Return the number of violations of each file, {path: {rule: number}}, and of repeated names."""
    result = {}
    for path in list_files(MARKDOWN + PYTHON):
        result[path.as_posix()] = dict(sorted(Counter(rule for _, rule, _ in iterate_violations(path)).items()))
    names = {"repeated name": len(find_repeated_names())}
    return {path: rules for path, rules in sorted(result.items()) if rules} | {PACKAGE: names}


def list_files(places: tuple[str, ...]) -> list[Path]:
    """Return the Python and Markdown files of some places, relative to the repository."""
    folders = [ROOT / place for place in places]
    actual = [path for place in folders for path in ([place] if place.is_file() else sorted(place.rglob("*")))]
    is_text = lambda path: path.suffix == ".py" or (path.suffix == ".md" and path.parts[len(ROOT.parts)] != "tests")  # noqa: E731
    return [path.relative_to(ROOT) for path in actual if is_text(path)]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        BASELINE.write_text(json.dumps(count_violations(), indent=1) + "\n", encoding="utf-8")
    for path in list_files(tuple(sys.argv[1:])) if "--write" not in sys.argv else []:
        for number, rule, text in iterate_violations(path):
            print(f"{path}:{number}: {rule}: {text}")
