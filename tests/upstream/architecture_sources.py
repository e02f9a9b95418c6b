"""Read Transformers' modeling files as syntax trees: classes by role, and the classes that hold and call them."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ARCHITECTURES = (
    *("bert", "albert", "t5", "umt5", "bart", "mbart", "marian", "m2m_100", "pegasus", "whisper"),
    *("roberta", "distilbert", "electra", "modernbert", "nomic_bert"),
)


def get_transformers_folder() -> Path:
    """Return the folder of the installed Transformers, without importing it."""
    return Path(importlib.util.find_spec("transformers").submodule_search_locations[0])


@cache
def parse_modeling_file(architecture: str) -> ast.Module:
    """Return the syntax tree of an architecture's modeling file."""
    return ast.parse(
        (get_transformers_folder() / "models" / architecture / f"modeling_{architecture}.py").read_text(
            encoding="utf-8"
        )
    )


def get_classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    """Return a dictionary of the classes of a file."""
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def get_method(result: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """Return a method that a class itself defines."""
    return next((item for item in result.body if isinstance(item, ast.FunctionDef) and item.name == name), None)


def get_parameter_names(function: ast.FunctionDef) -> list[str]:
    """Return the names of a method's parameters except `self` and the starred ones."""
    arguments = function.args
    return [item.arg for item in (*arguments.posonlyargs, *arguments.args)][1:] + [
        item.arg for item in arguments.kwonlyargs
    ]


def _count_linears(result: ast.ClassDef) -> int:
    calls = (node for node in ast.walk(result) if isinstance(node, ast.Call))
    return sum(ast.unparse(call.func) == "nn.Linear" for call in calls)


def find_role_classes(tree: ast.Module, name: str) -> list[str]:
    """Return the classes of a role: "attention", "embeddings", "stack" or "base"."""
    result = get_classes(tree)
    bases = {item: {ast.unparse(base) for base in node.bases} for item, node in result.items()}
    if name == "attention":
        return [item for item, node in result.items() if "Attention" in item and _count_linears(node) >= 2]
    if name == "embeddings":
        return [item for item, node in result.items() if item.endswith("Embeddings") and get_method(node, "forward")]
    if name == "stack":
        stacks = [item for item in result if re.search(r"(Stack|Encoder|Decoder)$", item)]
        return [item for item in stacks if any(base.endswith("PreTrainedModel") for base in bases[item])]
    return [item for item in result if re.fullmatch(r"[A-Za-z0-9]+(?<!Encoder)Model", item) and "PreTr" not in item]


def find_holders(tree: ast.Module, names: set[str]) -> dict[str, set[str]]:
    """Return the attributes of each class that hold instances of the named classes, or lists of them."""
    result: dict[str, set[str]] = {}
    for name, node in get_classes(tree).items():
        local: set[str] = set()
        for item in ast.walk(node):
            if not isinstance(item, ast.Assign):
                continue
            used = {part.id for part in ast.walk(item.value) if isinstance(part, ast.Name)}
            if not used & (names | local):
                continue
            target = item.targets[0]
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                if any(isinstance(part, ast.Call) for part in ast.walk(item.value)):
                    result.setdefault(name, set()).add(target.attr)
            elif isinstance(target, ast.Name) and used & names and not isinstance(item.value, ast.Call):
                local.add(target.id)
    return result


def iterate_calls(tree: ast.Module, names: set[str]) -> Iterator[ast.Call]:
    """Yield each call of an instance of the named classes."""
    held_names = find_holders(tree, names)
    everywhere = set().union(*held_names.values()) if held_names else set()
    for name, node in get_classes(tree).items():
        class_names = held_names.get(name, set()).union(
            *(held_names.get(ast.unparse(base), set()) for base in node.bases)
        )
        looped = _find_loop_names(node, class_names)
        for item in ast.walk(node):
            if isinstance(item, ast.Call) and _is_held(item.func, class_names, everywhere, looped):
                yield item


@cache
def list_calls(tree: ast.Module, names: frozenset[str]) -> tuple[ast.Call, ...]:
    """Return the calls in a tree from a cache. The tree must not change."""
    return tuple(iterate_calls(tree, set(names)))


def _find_loop_names(node: ast.AST, class_names: set[str]) -> set[str]:
    result = set()
    for item in ast.walk(node):
        if isinstance(item, ast.For) and any(
            isinstance(part, ast.Attribute) and part.attr in class_names for part in ast.walk(item.iter)
        ):
            names = [part.id for part in ast.walk(item.target) if isinstance(part, ast.Name)]
            result.add(names[-1])
    return result


def _is_held(func: ast.expr, class_names: set[str], everywhere: set[str], looped: set[str]) -> bool:
    if isinstance(func, ast.Subscript):
        func = func.value
    if isinstance(func, ast.Name):
        return func.id in looped
    if not isinstance(func, ast.Attribute):
        return False
    if isinstance(func.value, ast.Name):
        return func.value.id == "self" and func.attr in class_names
    # In a chain such as self.model.decoder(...), only the last name is compared.
    return isinstance(func.value, ast.Attribute) and func.attr in everywhere and func.attr in ("encoder", "decoder")
