"""Check the layers of the package: imports between them, light modules, and the lengths of files and functions."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import package_tree
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_attn_variants"
# The layers from low to high. A package imports only packages of earlier lines, but not those of its own line.
ORDER = (
    ("modeling",),
    ("native",),
    ("registration", "reference"),
    ("root helpers",),
    ("conversion",),
    ("inspection",),
    ("training", "hub", "export"),
    ("serving",),
    ("sweep",),
    ("commands",),
    ("cli",),
    ("front doors",),
)
FRONT_DOORS = (PACKAGE, f"{PACKAGE}.__main__", "attn_variants")
# The folders of modeling/ in the same order. "files" are the files next to these folders, which are the lowest layer.
MODELING = ("files", "ops", "mechanisms", "fields", "attention", "architectures")
LEVELS = {layer: level for level, layers in enumerate(ORDER) for layer in layers}
MOST_LINES, MOST_FUNCTION_LINES = 800, 60
# These Triton kernels may be longer, because functions for their parts would need 25 arguments each.
LONG_FUNCTIONS = {"forward_kernel", "backward_kernel"}


def list_python_files():
    return [ROOT / "attn_variants.py", *sorted((ROOT / PACKAGE).rglob("*.py"))]


def get_module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {get_module_name(path): path for path in list_python_files()}


def find_imported_modules(name, modules=MODULES):
    """Return the modules of the package that a module imports at its top, in a function or for type checkers."""
    result = set()
    path = modules[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            result |= {item if item in modules else base for item in submodules}
    return {item for item in result if item in modules} - {name}


def get_layer(name):
    if name in FRONT_DOORS:
        return "front doors"
    inside = name.split(".")[1]
    return inside if inside in LEVELS else "root helpers"


def find_upward_imports(imports):
    """Return each import of a module in a higher layer or in another package of the same layer."""
    result = []
    for name, others in imports.items():
        for other in others:
            layer, imported_layer = get_layer(name), get_layer(other)
            if layer != imported_layer and LEVELS[imported_layer] >= LEVELS[layer]:
                result.append(f"{name} ({layer}) imports {other} ({imported_layer})")
    return sorted(result)


def find_import_cycles(imports):
    """Return the groups of modules that import each other (Tarjan's strongly connected components)."""
    index, low, stack, result = {}, {}, [], []

    def visit(name):
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in imports[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            result.extend([sorted(group)] * (len(group) > 1))

    for name in imports:
        if name not in index:
            visit(name)
    return result


IMPORTS = {name: find_imported_modules(name) for name in MODULES}


def find_defined_names(path):
    """Return the names that a module defines at its top, including those under an `if` and a `try`."""
    result = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            result.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            result.add(node.id)
    return result


def find_borrowed_names(name, modules=MODULES):
    """Return the names that a module imports from another module that imports them from a third one."""
    result, package = [], name.split(".")[:-1]
    for node in ast.walk(ast.parse(modules[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            if source in modules and modules[source].name != "__init__.py":
                known = find_defined_names(modules[source])
                result += [
                    f"{name}: {item.name} from {source}" for item in node.names if item.name not in (*known, "*")
                ]
    return result


def test_names_are_imported_from_the_module_that_defines_them(tmp_path):
    (tmp_path / "a.py").write_text("from .b import x, y\n")
    (tmp_path / "b.py").write_text("from .c import x\ny = 1\n")
    modules = {f"{PACKAGE}.hub.{name}": tmp_path / f"{name}.py" for name in "ab"}
    assert find_borrowed_names(f"{PACKAGE}.hub.a", modules) == [f"{PACKAGE}.hub.a: x from {PACKAGE}.hub.b"]
    borrowed = [item for name in MODULES if MODULES[name].name != "__init__.py" for item in find_borrowed_names(name)]
    assert not borrowed, "\n".join(borrowed)


def test_imports_have_no_cycles():
    assert not find_import_cycles(IMPORTS), "\n".join(" <-> ".join(group) for group in find_import_cycles(IMPORTS))


def test_layers_import_only_lower_layers():
    assert not find_upward_imports(IMPORTS), "\n".join(find_upward_imports(IMPORTS))


def test_folders_of_modeling_import_only_lower_folders():
    def level(name):
        parts = name.split(".")
        return MODELING.index(parts[2]) if len(parts) > 3 else 0

    inside = {name for name in IMPORTS if name.startswith(f"{PACKAGE}.modeling.")}
    pairs = [(name, other) for name in inside for other in IMPORTS[name] & inside]
    assert not [f"{name} imports {other}" for name, other in pairs if level(other) > level(name)]
    assert {level(name) for name in inside} == {*range(len(MODELING))}


def test_top_level_names_are_unique_within_a_layer():
    """Check that top-level names are unique per layer, because each layer is one file in a repository."""
    layers = {}
    for name in IMPORTS:
        if (
            name.startswith(f"{PACKAGE}.modeling.")
            and len(parts := name.split(".")) > 3
            and parts[2] != "architectures"
        ):
            layers.setdefault(parts[2], []).append(vars(importlib.import_module(name)))
    result = []
    for layer, files in layers.items():
        for name in set().union(*files) - {"__all__", "logger"}:
            meanings = {id(item[name]): item[name] for item in files if name in item}
            if len(meanings) > 1 and not re.fullmatch(r"__\w+__", name):
                result.append(f"{layer}: {name}: {list(meanings.values())}")
    assert not result, "\n".join(result)


@pytest.mark.parametrize("kind", ["kernel", "pattern"])
def test_mechanism_names_occur_only_in_their_file_and_the_table(kind):
    """Check that other files read the facts about a mechanism from its class."""
    table = importlib.import_module(f"{PACKAGE}.modeling.mechanisms.{kind}s.{kind}_table")
    names, class_of = getattr(table, f"{kind.upper()}S"), getattr(table, f"get_{kind}_class")
    assert [class_of(name).name for name in names] == [*names] and len({*map(class_of, names)}) == len(names)
    assert not find_name_strings(names, rf"(.*_{kind}s?|{kind}_table|transient_global)\.py")


def test_score_position_and_term_names_occur_only_in_their_file_and_the_table():
    """Check the names of scores, positions and terms. `transformers_internals.py` may list arguments of our calls."""
    mechanisms = f"{PACKAGE}.modeling.mechanisms"
    names = {*importlib.import_module(f"{mechanisms}.talking_heads").DYNAMIC_PROJECTIONS}
    sharing = importlib.import_module(f"{mechanisms}.head_sharing")
    names |= {item.label for item in (sharing.HeadSharing, sharing.MultiQueryAttention, sharing.GroupedQueryAttention)}
    names |= {importlib.import_module(f"{mechanisms}.additive_score").AdditiveScore.name}
    names |= {importlib.import_module(f"{mechanisms}.sinusoidal_positions").SinusoidalPositions.name}
    assert not find_name_strings(
        names,
        r"(additive_score|field_table|score_table|head_sharing|sinusoidal_positions|talking_heads|transformers_internals)\.py",
    )


def test_conflicts_of_mechanisms_are_only_in_the_composition_table():
    """Check that only the table rejects pairs of mechanisms; checks of one architecture stay in its file."""
    result = {
        path.name
        for name, path in MODULES.items()
        if name.startswith(f"{PACKAGE}.modeling.")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "cannot be combined" in node.value
    }
    assert result == {"composition.py"}


def find_name_strings(names, module):
    """Return the places where one of some names occurs as a string, except in files of that name and in formulas."""
    result = []
    for name, path in MODULES.items():
        is_own = re.fullmatch(module, path.name) or ".reference" in name
        nodes = () if is_own else ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        result += [f"{name}: {node.value}" for node in nodes if isinstance(node, ast.Constant) and node.value in names]
    return result


def test_layer_checks_detect_violations(tmp_path):
    (tmp_path / "a.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x\n")
    (tmp_path / "b.py").write_text("def f():\n    from . import a\n")
    modules = {f"{PACKAGE}.hub.{name}": tmp_path / f"{name}.py" for name in "ab"}
    imports = {name: find_imported_modules(name, modules) for name in modules}
    assert find_import_cycles(imports) == [sorted(modules)]
    assert find_upward_imports({f"{PACKAGE}.hub.a": {f"{PACKAGE}.training.b", f"{PACKAGE}.files"}}) == [
        f"{PACKAGE}.hub.a (hub) imports {PACKAGE}.training.b (training)"
    ]
    assert find_upward_imports({f"{PACKAGE}.modeling.a": {f"{PACKAGE}.registration"}}) and not find_upward_imports(
        {f"{PACKAGE}.cli": {f"{PACKAGE}.errors"}}
    )


def list_light_modules():
    """Return the modules that run before a command line is checked, and so import neither torch nor Transformers."""
    names = ["attn_variants", PACKAGE, *(f"{PACKAGE}.{name}" for name in ("cli", "command_parser", "errors"))]
    names += [name for name in MODULES if name.startswith(f"{PACKAGE}.commands.")]
    # The settings of a task are in the `__init__.py` of its folder.
    settings = [name for name in MODULES if re.search(r"\.training\.(\w+|engine\.settings)$", name)]
    return [pytest.param(names, id="commands"), pytest.param(settings, id="settings")]


@pytest.mark.parametrize("names", list_light_modules())
def test_light_modules_import_neither_torch_nor_transformers(names):
    code = f"""
import importlib, sys
import attn_variants
attn_variants.is_command = True
for name in {names!r}:
    importlib.import_module(name)
    heavy = {{"torch", "transformers", "numpy", "datasets"}} & set(sys.modules)
    assert not heavy, f"{{name}} imports {{heavy}}"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_push_imports_no_training_or_conversion_code(loaded_by):
    unwanted = [f"{PACKAGE}.conversion.calibration.", f"{PACKAGE}.conversion.conversions.", f"{PACKAGE}.training."]
    loaded = loaded_by(f"{PACKAGE}.hub.push")
    assert not [item for item in loaded if f"{item}.".startswith((*unwanted, "matplotlib."))]


@pytest.fixture(scope="module")
def loaded_by():
    """Return a cached function that lists the modules that are loaded after an import."""
    result = {}

    def loaded(name):
        if name not in result:
            code = f"import {name}, sys; print(*sys.modules)"
            command = [sys.executable, "-c", code]
            result[name] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        return result[name]

    return loaded


def test_files_and_functions_respect_the_length_limits():
    long = []
    for path in [*list_python_files(), *sorted((ROOT / "scripts").glob("*.py"))]:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        lines = len(text.splitlines())
        long += [f"{name}: {lines} lines"] if lines > MOST_LINES else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                has_docstring = ast.get_docstring(node, clean=False) is not None
                lines = node.end_lineno - node.lineno + 1
                lines -= first.end_lineno - first.lineno + 1 if has_docstring else 0
                if lines > MOST_FUNCTION_LINES and node.name not in LONG_FUNCTIONS:
                    long.append(f"{name}, {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_documented_tree_matches_the_package():
    assert package_tree.find_tree(package_tree.PAGE.read_text(encoding="utf-8")) == package_tree.make_tree(), (
        "run `make tree`"
    )


def test_tree_lists_nested_folders_with_first_sentences(tmp_path):
    files = {
        "__init__.py": '"""A package. With modules."""',
        "b.py": '"""Two\nlines of v1.1: one.\n\nMore."""',
        "a.py": "",
        "modeling/core/c.py": '"""Inner."""',
        "modeling/core/__init__.py": '"""The core."""',
        "modeling/d.py": '"""D"""',
        "commands/a_name_that_is_longer_than_others.py": '"""E."""',
    }
    for name, text in files.items():
        (tmp_path / "package" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "package" / name).write_text(text)
    assert package_tree.make_tree(tmp_path / "package").splitlines() == [
        "package/",
        "  __init__.py                  A package",
        "  a.py",
        "  b.py                         Two lines of v1.1: one",
        "  modeling/",
        "    d.py                         D",
        "    core/                        The core",
        "      c.py                         Inner",
        "  commands/",
        "    a_name_that_is_longer_than_others.py  E",
    ]
