"""Rewrite the modules that all architectures share: caches, masks, attention functions, generation, the base class."""

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any


def rewrite(op: dict[str, Any], module: str, source: str) -> str | None:
    """Return the source of a module after a mutation, or None if the mutation does not change it."""
    needle = op.get("needle", op.get("old"))
    if needle and not re.search(rf"\b{re.escape(needle)}\b", source):
        return None
    tree = ast.parse(source)
    before = ast.dump(tree)
    changes = {key: value for key, value in op.items() if key not in ("op", "modules", "architecture", "needle")}
    GENERAL_OPS[op["op"]](tree, **changes)
    tree = ast.fix_missing_locations(tree)
    return None if ast.dump(tree) == before else ast.unparse(tree)


def rename_identifier(tree: ast.Module, old: str, new: str, but_of: str = "", **_: Any) -> None:
    """Rename an identifier everywhere: definitions, names, attributes, keywords and equal strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and but_of and re.search(but_of, ast.unparse(node.value)):
            continue
        for place in ("id", "attr", "arg", "name"):
            if getattr(node, place, None) == old:
                setattr(node, place, new)
        if isinstance(node, ast.Constant) and node.value == old:
            node.value = new


def rename_cache_member(tree: ast.Module, old: str, new: str, **_: Any) -> None:
    """Rename an attribute or a method of caches and their layers, wherever code reads it."""
    of_cache = re.compile(r"(cache|cache_key\]|past_key_values|layers\[.*\]|layer)$", re.IGNORECASE)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and re.search(r"Cache|Layer(Mixin)?$", node.name):
            for item in ast.walk(node):
                _rename_of_self(item, old, new)
        if isinstance(node, ast.Attribute) and node.attr == old and of_cache.search(ast.unparse(node.value)):
            node.attr = new
    for call in _iterate_calls(tree, ["hasattr", "getattr"]):
        if getattr(call.args[1], "value", None) == old and of_cache.search(ast.unparse(call.args[0])):
            call.args[1] = ast.Constant(new)


def rename_of_attentions(tree: ast.Module, old: str, new: str, **_: Any) -> None:
    """Rename an attribute of attention modules that attention functions read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == old and ast.unparse(node.value) in ("self", "module"):
            node.attr = new
    for call in _iterate_calls(tree, ["hasattr", "getattr"]):
        if getattr(call.args[1], "value", None) == old and ast.unparse(call.args[0]) == "module":
            call.args[1] = ast.Constant(new)


def _rename_of_self(node: ast.AST, old: str, new: str) -> None:
    if isinstance(node, ast.FunctionDef) and node.name == old:
        node.name = new
    if isinstance(node, ast.ClassDef):
        for item in node.body:
            target = item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None)
            if isinstance(target, ast.Name) and target.id == old:
                target.id = new
    if isinstance(node, ast.Attribute) and node.attr == old and ast.unparse(node.value) in ("self", "super()"):
        node.attr = new


def _iterate_definitions(tree: ast.Module, names: list[str]) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names)


def _iterate_calls(tree: ast.Module, names: list[str]) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) in names:
            yield node


def rename_variable(function: ast.FunctionDef, old: str, new: str) -> None:
    """Rename a parameter or local variable in the definition of a function."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = new
        elif isinstance(node, ast.arg) and node.arg == old:
            node.arg = new


def rename_argument(
    tree: ast.Module, functions: list[str], old: str, new: str, called: list[str] | None = None, **_: Any
) -> None:
    """Rename a parameter in all definitions of some functions, and the keyword in all their calls."""
    for function in _iterate_definitions(tree, functions):
        rename_variable(function, old, new)
    for call in _iterate_calls(tree, called or functions):
        for keyword in call.keywords:
            keyword.arg = new if keyword.arg == old else keyword.arg


def drop_argument(tree: ast.Module, functions: list[str], called: list[str], old: str, **_: Any) -> None:
    """Remove a parameter from functions and from their calls, so that its default is used."""
    for function in _iterate_definitions(tree, functions):
        arguments = function.args
        names = [item.arg for item in arguments.args]
        if old not in names:
            continue
        place = names.index(old) - len(names) + len(arguments.defaults)
        default = arguments.defaults.pop(place)
        arguments.args.pop(names.index(old))
        function.body.insert(0, ast.Assign([ast.Name(old, ast.Store())], default, lineno=1))
    for call in _iterate_calls(tree, called):
        call.keywords = [item for item in call.keywords if item.arg != old]


def require_argument(
    tree: ast.Module, functions: list[str], called: list[str], new: str, uses: str | None, **_: Any
) -> None:
    """Add a required argument to functions and their calls. It multiplies the parameter `uses`, if any."""
    for function in _iterate_definitions(tree, functions):
        function.args.kwonlyargs.append(ast.arg(new))
        function.args.kw_defaults.append(None)
        if uses:
            function.body.insert(0, ast.parse(f"{uses} = {uses} * {new}").body[0])
    for call in _iterate_calls(tree, called):
        call.keywords.insert(0, ast.keyword(new, ast.Constant(1.25)))


def swap_arguments(tree: ast.Module, functions: list[str], called: list[str], old: str, new: str, **_: Any) -> None:
    """Swap two parameters that calls pass by position."""
    places = None
    for function in _iterate_definitions(tree, functions):
        names = [item.arg for item in function.args.args]
        places = [names.index(old), names.index(new)]
        _swap(function.args.args, *places)
    shift = 0
    for call in _iterate_calls(tree, called):
        first, second = places or (2, 3)
        if len(call.args) > max(first, second) - shift:
            _swap(call.args, first - shift, second - shift)


def _swap(items: list[Any], first: int, second: int) -> None:
    items[first], items[second] = items[second], items[first]


def invert_masks(tree: ast.Module, **_: Any) -> None:
    """Let masks mark the ignored positions: mask functions and attention functions invert them."""
    text = "def _inverted(mask):\n    return mask if mask is None or mask.dtype != torch.bool else ~mask\n"
    for function in list(_iterate_definitions(tree, ["sdpa_mask"])):
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                node.value = ast.parse(f"_inverted({ast.unparse(node.value)})", mode="eval").body
        _insert_before_functions(tree, text)
    for function in list(_iterate_definitions(tree, ["eager_mask"])):
        for call in _iterate_calls(ast.Module(function.body, []), ["sdpa_mask"]):
            call.func = ast.parse("(lambda **each: _inverted(sdpa_mask(**each)))", mode="eval").body
    for function in list(_iterate_definitions(tree, ["sdpa_attention_forward"])):
        function.body.insert(0, ast.parse("attention_mask = _inverted(attention_mask)").body[0])
        _insert_before_functions(tree, text)


def _insert_before_functions(tree: ast.Module, text: str) -> None:
    place = next(i for i, item in enumerate(tree.body) if isinstance(item, ast.FunctionDef | ast.ClassDef))
    tree.body[place:place] = ast.parse(text).body


_RENAMING = (rename_identifier, rename_cache_member, rename_of_attentions, rename_argument)
_CHANGING = (drop_argument, require_argument, swap_arguments, invert_masks)
GENERAL_OPS: dict[str, Callable[..., None]] = {item.__name__: item for item in (*_RENAMING, *_CHANGING)}
