"""Rewrite the source of modules of Transformers: each mutation is a change of a syntax tree.

The "op" of a mutation is a dictionary: "op" is the name of a function here or in `rewriting_general`, followed by its
arguments. "architecture" names a modeling file, and "modules" names modules that architectures share.
"""

import ast
import re
from pathlib import Path
from typing import Any

from upstream import rewriting_general
from upstream.architecture_sources import get_classes, get_method, get_parameter_names, iterate_calls

MOVED = "_moved_away"  # the suffix of a module to which a class has moved


def rewrite(mutation: dict[str, Any], module: str, source: str) -> str | None:
    """Return the source of a module after a mutation, or None if the mutation does not change it."""
    op = mutation["op"]
    architecture = f"transformers.models.{op.get('architecture')}.modeling_{op.get('architecture')}"
    name = op["op"]
    if name == "move_class":
        return move_class(module, architecture, source, op["name"])
    if name in ARCHITECTURE_OPS:
        if module != architecture:
            return None
        tree = ast.parse(source)
        changes = {key: value for key, value in op.items() if key not in ("op", "architecture", "modules")}
        ARCHITECTURE_OPS[name](tree, **changes)
        return ast.unparse(ast.fix_missing_locations(tree)) + op.get("after", "")
    if name == "nothing":
        return None
    return rewriting_general.rewrite(op, module, source)


def get_original_module(name: str) -> str:
    """Return the name of the module from which a class has moved."""
    return name.removesuffix(MOVED)


def find_importers(names: list[str], modules: dict[str, Any]) -> set[str]:
    """Return some modules and all loaded modules whose top-level imports include them, directly or indirectly."""
    imports = {name: _find_imported(name, module) for name, module in modules.items()}
    gone = {name for name in names if name in modules}
    while more := {name for name, result in imports.items() if result & gone} - gone:
        gone |= more
    # Keep utility modules, which use models only inside functions. The worker has changed one of them.
    return {name for name in gone if not re.match(r"transformers(\.utils\b.*|\.dependency_.*)?$", name)}


def _find_imported(name: str, module: Any) -> set[str]:
    path = getattr(module, "__file__", None)
    if not path or not Path(path).exists() or type(module).__name__ == "_LazyModule":
        return set()
    is_package = Path(path).name == "__init__.py"
    package = name.split(".") if is_package else name.split(".")[:-1]
    result = set()
    for dots, base, _ in re.findall(r"^(?:    )?from (\.*)([\w.]*) import (.)", Path(path).read_text("utf-8"), re.M):
        above = package[: len(package) - len(dots) + 1] if dots else []
        result.add(".".join([*above, *([base] if base else [])]))
    return result


def _find_functions(tree: ast.Module, names: list[str], method_name: str) -> list[ast.FunctionDef]:
    result = get_classes(tree)
    return [item for name in names if name in result and (item := get_method(result[name], method_name))]


def _fix_deprecations(function: ast.FunctionDef, old: str, new: str | None) -> None:
    """Update the new name in Transformers' `@deprecate_kwarg("past_key_values", ..., new_name="cache")`."""
    decorators = []
    for item in function.decorator_list:
        target = [key for key in getattr(item, "keywords", []) if key.arg == "new_name"]
        if target and getattr(target[0].value, "value", None) == old:
            if new is None:
                continue
            target[0].value = ast.Constant(new)
        decorators.append(item)
    function.decorator_list = decorators


def rename_parameter(tree: ast.Module, names: list[str], method_name: str, old: str, new: str, **_: Any) -> None:
    """Rename a method's parameter, and the keyword in all calls of these classes."""
    for function in _find_functions(tree, names, method_name):
        rewriting_general.rename_variable(function, old, new)
        _fix_deprecations(function, old, new)
    for call in iterate_calls(tree, set(names)):
        for keyword in call.keywords:
            keyword.arg = new if keyword.arg == old else keyword.arg


def drop_parameter(tree: ast.Module, names: list[str], method_name: str, old: str, **_: Any) -> None:
    """Remove a parameter and its arguments, so that the method uses its default."""
    orders = {}
    for function in _find_functions(tree, names, method_name):
        arguments = function.args
        place = [item.arg for item in arguments.args].index(old)
        orders = get_parameter_names(function)
        defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
        arguments.args.pop(place)
        default = defaults.pop(place) or ast.Constant(None)
        arguments.defaults = [item for item in defaults if item is not None]
        function.body.insert(0, ast.Assign([ast.Name(old, ast.Store())], default, lineno=1))
        _fix_deprecations(function, old, None)
    for call in iterate_calls(tree, set(names)):
        call.keywords = [item for item in call.keywords if item.arg != old]
        place = orders.index(old)
        if len(call.args) > place:
            call.args.pop(place)


def reorder(
    tree: ast.Module, names: list[str], method_name: str, old: str, new: str, by_place: bool, **_: Any
) -> None:
    """Swap two parameters and their arguments. With `by_place`, callers pass them by position."""
    for function in _find_functions(tree, names, method_name):
        before, result = get_parameter_names(function), function.args.args
        first, second = ([item.arg for item in result].index(name) for name in (old, new))
        result[first], result[second] = result[second], result[first]
        if len(function.args.defaults) < len(result) - 1:
            # Parameters without a default must come first.
            function.args.defaults = [ast.Constant(None)] * (len(result) - 2)
        after = get_parameter_names(function)
    for call in iterate_calls(tree, set(names)):
        if any(isinstance(item, ast.Starred) for item in call.args):
            continue
        arguments = dict(zip(before, call.args, strict=False))
        arguments |= {item.arg: item.value for item in call.keywords if item.arg in before}
        rest = [item for item in call.keywords if item.arg not in before]
        places = max((after.index(name) for name in arguments), default=-1) + 1 if by_place else 1
        call.args = [arguments.pop(name, ast.Constant(None)) for name in after[:places]]
        call.keywords = [ast.keyword(name, value) for name, value in arguments.items()] + rest


def require(tree: ast.Module, names: list[str], method_name: str, new: str, uses: bool, **_: Any) -> None:
    """Add a required argument to a method and its calls. With `uses`, it multiplies the hidden states."""
    for function in _find_functions(tree, names, method_name):
        order = get_parameter_names(function)
        function.args.args.insert(2, ast.arg(new))
        places = len(function.args.args)
        if places - len(function.args.defaults) < 3:
            function.args.defaults = function.args.defaults[-(places - 3) :]
        if uses:
            _use(function, new)
    for call in iterate_calls(tree, set(names)):
        if any(isinstance(item, ast.Starred) for item in call.args):
            continue
        for place, value in enumerate(call.args[1:], 1):
            call.keywords.insert(place - 1, ast.keyword(order[place], value))
        del call.args[1:]
        call.keywords.insert(0, ast.keyword(new, ast.Constant(1.25)))


def _use(function: ast.FunctionDef, new: str) -> None:
    scaled = "hidden_states = hidden_states * {new}"
    if "hidden_states" in get_parameter_names(function):
        function.body.insert(0, ast.parse(scaled.format(new=new)).body[0])
        return
    for place, item in enumerate(function.body):
        if isinstance(item, ast.Assign) and ast.unparse(item.targets[0]) in ("hidden_states", "embeddings"):
            name = ast.unparse(item.targets[0])
            function.body.insert(place + 1, ast.parse(f"{name} = {name} * {new}").body[0])
            return
    raise ValueError(f"no place to use {new}")


# These expressions convert the changed result of a call to the old tuple.
TUPLES = {
    "more": "(lambda each: each[:-1])({0})",
    "fewer": "(lambda each: (*each, None))({0})",
    "between": "(lambda each: (each[0], *each[2:]))({0})",
    "swapped": "(lambda each: each[::-1])({0})",
}


def change_tuple(tree: ast.Module, names: list[str], method_name: str, how: str, **_: Any) -> None:
    """Change the tuple that a method returns, and let its callers change it back."""
    result = list(iterate_calls(tree, set(names)))
    for function in _find_functions(tree, names, method_name):
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
                parts = node.value.elts
                parts = {
                    "more": [*parts, ast.Constant(None)],
                    "fewer": parts[:-1],
                    "between": [parts[0], ast.Constant(None), *parts[1:]],
                    "swapped": parts[::-1],
                }[how]
                node.value = ast.Tuple(parts, ast.Load())

    class Unpacking(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            if not any(node is item for item in result):
                return node
            return ast.parse(TUPLES[how].format(ast.unparse(node)), mode="eval").body

    Unpacking().visit(tree)


def rename_attribute(tree: ast.Module, names: list[str], old: str, new: str, anywhere: bool, **_: Any) -> None:
    """Rename an attribute of instances of some classes or, with `anywhere`, of every object except configurations."""
    result = get_classes(tree)
    for name, node in result.items():
        is_target = name in names or any(ast.unparse(base) in names for base in node.bases)
        for item in ast.walk(node):
            if not (isinstance(item, ast.Attribute) and item.attr == old):
                continue
            owner = ast.unparse(item.value)
            if (owner == "self" and is_target) or (
                anywhere and not re.search(r"config|torch|functional|cache|past_key", owner)
            ):
                item.attr = new
            elif owner == "module":  # the initialization of weights
                item.attr = new
        for item in ast.walk(node):
            is_asked = isinstance(item, ast.Call) and ast.unparse(item.func) in ("hasattr", "getattr")
            if is_asked and getattr(item.args[1], "value", None) == old and (anywhere or is_target):
                item.args[1] = ast.Constant(new)
        if anywhere:
            _rename_in_paths(node, old, new)


def _rename_in_paths(node: ast.ClassDef, old: str, new: str) -> None:
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            for item in ast.walk(statement.value):
                if isinstance(item, ast.Constant) and isinstance(item.value, str):
                    item.value = re.sub(rf"(?<![\w]){re.escape(old)}(?![\w])", new, item.value)


def rename_names(tree: ast.Module, old: str, new: str, **_: Any) -> None:
    """Rename a class or a method everywhere in the file."""
    rewriting_general.rename_identifier(tree, old, new)


def attend_to_halves(tree: ast.Module, names: list[str], **_: Any) -> None:
    """Let attention read only half of its input features, which changes the meaning but no name."""
    for name in names:
        text = (
            "def __call__(self, hidden_states, *args, **kwargs):\n"
            "    half = torch.arange(hidden_states.shape[-1]) < hidden_states.shape[-1] // 2\n"
            "    return super().__call__(hidden_states * half, *args, **kwargs)\n"
        )
        get_classes(tree)[name].body += ast.parse(text).body


def move_class(module: str, architecture: str, source: str, name: str) -> str | None:
    """Move a class into a new module next to the modeling file, which imports it from there."""
    if module == architecture + MOVED:
        return source
    if module != architecture:
        return None
    return (
        f"from transformers.models.{architecture.split('.')[2]} import __name__ as _package\nimport importlib\n"
        f"_moved = importlib.import_module('{architecture + MOVED}')\n"
        f"globals().update({{k: v for k, v in vars(_moved).items() if not k.startswith('__') and k != '{name}'}})\n"
    )


_OPS = (
    rename_parameter,
    drop_parameter,
    reorder,
    require,
    change_tuple,
    rename_attribute,
    rename_names,
    attend_to_halves,
)
ARCHITECTURE_OPS = {item.__name__: item for item in _OPS}
