"""Read Transformers' modeling files as syntax trees: classes by role, and the classes that hold and call them."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ARCHITECTURES = "bert albert t5 umt5 bart mbart marian m2m_100 pegasus whisper roberta distilbert electra".split()


def folder() -> Path:
    """Return the folder of the installed Transformers, without importing it."""
    return Path(importlib.util.find_spec("transformers").submodule_search_locations[0])


@cache
def tree_of(architecture: str) -> ast.Module:
    """Return the syntax tree of an architecture's modeling file."""
    return ast.parse((folder() / "models" / architecture / f"modeling_{architecture}.py").read_text(encoding="utf-8"))


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """Return a dictionary of the classes of a file."""
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def method(found: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return a method that a class itself defines."""
    return next((each for each in found.body if isinstance(each, ast.FunctionDef) and each.name == name), None)


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the names of a method's parameters except `self` and the starred ones."""
    arguments = function.args
    return [each.arg for each in (*arguments.posonlyargs, *arguments.args)][1:] + [
        each.arg for each in arguments.kwonlyargs
    ]


def _linears(found: ast.ClassDef) -> int:
    calls = (node for node in ast.walk(found) if isinstance(node, ast.Call))
    return sum(ast.unparse(call.func) == "nn.Linear" for call in calls)


def role(tree: ast.Module, name: str) -> list[str]:
    """Return the classes of a role: "attention", "embeddings", "stack" or "base"."""
    found = classes(tree)
    bases = {each: {ast.unparse(base) for base in node.bases} for each, node in found.items()}
    if name == "attention":
        return [each for each, node in found.items() if "Attention" in each and _linears(node) >= 3]
    if name == "embeddings":
        return [each for each, node in found.items() if each.endswith("Embeddings") and method(node, "forward")]
    if name == "stack":
        stacks = [each for each in found if re.search(r"(Stack|Encoder|Decoder)$", each)]
        return [each for each in stacks if any(base.endswith("PreTrainedModel") for base in bases[each])]
    return [each for each in found if re.fullmatch(r"[A-Za-z0-9]+(?<!Encoder)Model", each) and "PreTr" not in each]


def holders(tree: ast.Module, names: set[str]) -> dict[str, set[str]]:
    """Return for each class the attributes of `self` that hold instances of some classes, or lists of them."""
    found: dict[str, set[str]] = {}
    for name, node in classes(tree).items():
        local: set[str] = set()
        for each in ast.walk(node):
            if not isinstance(each, ast.Assign):
                continue
            used = {part.id for part in ast.walk(each.value) if isinstance(part, ast.Name)}
            if not used & (names | local):
                continue
            target = each.targets[0]
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                if any(isinstance(part, ast.Call) for part in ast.walk(each.value)):
                    found.setdefault(name, set()).add(target.attr)
            elif isinstance(target, ast.Name) and used & names and not isinstance(each.value, ast.Call):
                local.add(target.id)
    return found


def calls(tree: ast.Module, names: set[str]) -> Iterator[ast.Call]:
    """Yield each call of an instance of some classes."""
    held = holders(tree, names)
    everywhere = set().union(*held.values()) if held else set()
    for name, node in classes(tree).items():
        mine = held.get(name, set()).union(*(held.get(ast.unparse(base), set()) for base in node.bases))
        looped = _loop_names(node, mine)
        for each in ast.walk(node):
            if isinstance(each, ast.Call) and _is_held(each.func, mine, everywhere, looped):
                yield each


@cache
def calls_in(tree: ast.Module, names: frozenset[str]) -> tuple[ast.Call, ...]:
    """Return the calls of a tree that does not change, from a cache."""
    return tuple(calls(tree, set(names)))


def _loop_names(node: ast.AST, mine: set[str]) -> set[str]:
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.For) and any(
            isinstance(part, ast.Attribute) and part.attr in mine for part in ast.walk(each.iter)
        ):
            names = [part.id for part in ast.walk(each.target) if isinstance(part, ast.Name)]
            found.add(names[-1])
    return found


def _is_held(func: ast.expr, mine: set[str], everywhere: set[str], looped: set[str]) -> bool:
    if isinstance(func, ast.Subscript):
        func = func.value
    if isinstance(func, ast.Name):
        return func.id in looped
    if not isinstance(func, ast.Attribute):
        return False
    if isinstance(func.value, ast.Name):
        return func.value.id == "self" and func.attr in mine
    # self.model.decoder(...): a chain, by its last name.
    return isinstance(func.value, ast.Attribute) and func.attr in everywhere and func.attr in ("encoder", "decoder")
