"""The rooms of the package: who may import whom, what starts light, how long files and functions are."""

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
# From the lowest to the highest: a room imports those of the lines above its own, and none beside it on its line.
ORDER = (
    ("modeling",),
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
# The same of the rooms in modeling/; what stands beside them is below all.
MODELING = ("beside", "ops", "mechanisms", "fields", "attention", "architectures")
LEVELS = {room: level for level, rooms in enumerate(ORDER) for room in rooms}
MOST_LINES, MOST_FUNCTION_LINES = 800, 60
# Triton kernels: parts of them would take 25 arguments each, and none has run on a GPU yet.
LONG_FUNCTIONS = {"forward_kernel", "backward_kernel"}


def python_files():
    return [ROOT / "attn_variants.py", *sorted((ROOT / PACKAGE).rglob("*.py"))]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files()}


def imported_modules(name, modules=MODULES):
    """The package's modules that a module imports anywhere: at its top, in a function, for type checkers."""
    found = set()
    path = modules[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            submodules = [f"{base}.{alias.name}" for alias in node.names]
            found |= {each if each in modules else base for each in submodules}
    return {each for each in found if each in modules} - {name}


def room(name):
    if name in FRONT_DOORS:
        return "front doors"
    inside = name.split(".")[1]
    return inside if inside in LEVELS else "root helpers"


def arrows_upward(imports):
    """Each import that leads to a room above, or to one beside."""
    found = []
    for name, others in imports.items():
        for other in others:
            here, there = room(name), room(other)
            if here != there and LEVELS[there] >= LEVELS[here]:
                found.append(f"{name} ({here}) imports {other} ({there})")
    return sorted(found)


def circles(imports):
    """The groups of modules that reach each other (Tarjan's strongly connected components)."""
    index, low, stack, found = {}, {}, [], []

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
            found.extend([sorted(group)] * (len(group) > 1))

    for name in imports:
        if name not in index:
            visit(name)
    return found


IMPORTS = {name: imported_modules(name) for name in MODULES}


def names_defined(path):
    """The names that a module's own lines define at its top, with those under an `if` and a `try`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def borrowed_names(name, modules=MODULES):
    """What a module imports from another that has it from a third; a package's `__init__` is a front door."""
    found, package = [], name.split(".")[:-1]
    for node in ast.walk(ast.parse(modules[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            if source in modules and modules[source].name != "__init__.py":
                known = names_defined(modules[source])
                found += [
                    f"{name}: {each.name} from {source}" for each in node.names if each.name not in (*known, "*")
                ]
    return found


def test_a_name_is_imported_from_where_it_is_defined(tmp_path):
    (tmp_path / "a.py").write_text("from .b import x, y\n")
    (tmp_path / "b.py").write_text("from .c import x\ny = 1\n")
    modules = {f"{PACKAGE}.hub.{name}": tmp_path / f"{name}.py" for name in "ab"}
    assert borrowed_names(f"{PACKAGE}.hub.a", modules) == [f"{PACKAGE}.hub.a: x from {PACKAGE}.hub.b"]
    borrowed = [each for name in MODULES if MODULES[name].name != "__init__.py" for each in borrowed_names(name)]
    assert not borrowed, "\n".join(borrowed)


def test_no_module_imports_itself_through_others():
    assert not circles(IMPORTS), "\n".join(" <-> ".join(group) for group in circles(IMPORTS))


def test_no_room_imports_one_above_it():
    assert not arrows_upward(IMPORTS), "\n".join(arrows_upward(IMPORTS))


def test_the_rooms_of_modeling_import_downwards():
    def level(name):
        parts = name.split(".")
        return MODELING.index(parts[2]) if len(parts) > 3 else 0

    inside = {name for name in IMPORTS if name.startswith(f"{PACKAGE}.modeling.")}
    pairs = [(name, other) for name in inside for other in IMPORTS[name] & inside]
    assert not [f"{name} imports {other}" for name, other in pairs if level(other) > level(name)]
    assert {level(name) for name in inside} == {*range(len(MODELING))}


def test_a_name_at_a_files_top_has_one_meaning_in_a_room():
    """In a repository a room is one file."""
    rooms = {}
    for name in IMPORTS:
        if (
            name.startswith(f"{PACKAGE}.modeling.")
            and len(parts := name.split(".")) > 3
            and parts[2] != "architectures"
        ):
            rooms.setdefault(parts[2], []).append(vars(importlib.import_module(name)))
    found = []
    for room, files in rooms.items():
        for name in set().union(*files) - {"__all__", "logger"}:
            meanings = {id(each[name]): each[name] for each in files if name in each}
            if len(meanings) > 1 and not re.fullmatch(r"__\w+__", name):
                found.append(f"{room}: {name}: {list(meanings.values())}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", ["kernel", "pattern"])
def test_mechanisms_are_named_in_their_file_and_the_table_alone(kind):
    """What else has to be known of one, its class says."""
    table = importlib.import_module(f"{PACKAGE}.modeling.mechanisms.{kind}s.{kind}_table")
    names, class_of = getattr(table, f"{kind.upper()}S"), getattr(table, f"get_{kind}_class")
    assert [class_of(name).name for name in names] == [*names] and len({*map(class_of, names)}) == len(names)
    assert not literals(names, rf"(.*_{kind}s?|{kind}_table|transient_global)\.py")


def test_scores_positions_and_terms_are_named_in_their_file_and_the_table_alone():
    """`transformers_internals.py`, which all of `modeling/` stands on, lists the arguments of our own calls."""
    mechanisms = f"{PACKAGE}.modeling.mechanisms"
    names = {*importlib.import_module(f"{mechanisms}.talking_heads").DYNAMIC_PROJECTIONS}
    sharing = importlib.import_module(f"{mechanisms}.head_sharing")
    names |= {each.label for each in (sharing.HeadSharing, sharing.MultiQuery, sharing.GroupedQuery)}
    names |= {importlib.import_module(f"{mechanisms}.additive_score").AdditiveScore.name}
    names |= {importlib.import_module(f"{mechanisms}.sinusoidal_positions").SinusoidalPositions.name}
    assert not literals(
        names,
        r"(additive_score|field_table|head_sharing|sinusoidal_positions|talking_heads|transformers_internals)\.py",
    )


def test_refusals_of_pairs_are_in_the_table_alone():
    found = {
        path.name
        for name, path in MODULES.items()
        if name.startswith(f"{PACKAGE}.modeling.")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "cannot be combined" in node.value
    }
    assert found == {"composition.py"}


def literals(names, own):
    """Where any of some names stands as a string by itself, but in files whose name fits, and in formulas."""
    found = []
    for name, path in MODULES.items():
        is_own = re.fullmatch(own, path.name) or ".reference" in name
        nodes = () if is_own else ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        found += [f"{name}: {node.value}" for node in nodes if isinstance(node, ast.Constant) and node.value in names]
    return found


def test_the_checks_find_what_is_wrong(tmp_path):
    (tmp_path / "a.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x\n")
    (tmp_path / "b.py").write_text("def f():\n    from . import a\n")
    modules = {f"{PACKAGE}.hub.{name}": tmp_path / f"{name}.py" for name in "ab"}
    made = {name: imported_modules(name, modules) for name in modules}
    assert circles(made) == [sorted(modules)]
    assert arrows_upward({f"{PACKAGE}.hub.a": {f"{PACKAGE}.training.b", f"{PACKAGE}.files"}}) == [
        f"{PACKAGE}.hub.a (hub) imports {PACKAGE}.training.b (training)"
    ]
    assert arrows_upward({f"{PACKAGE}.modeling.a": {f"{PACKAGE}.registration"}}) and not arrows_upward(
        {f"{PACKAGE}.cli": {f"{PACKAGE}.errors"}}
    )


def light_modules():
    """What runs before a command line is checked, and so imports neither torch nor transformers at its top."""
    names = ["attn_variants", PACKAGE, *(f"{PACKAGE}.{name}" for name in ("cli", "command_line", "errors"))]
    names += [name for name in MODULES if name.startswith(f"{PACKAGE}.commands.")]
    settings = [name for name in MODULES if re.search(r"\.training\..*\bsettings$", name)]
    return [pytest.param(names, id="commands"), pytest.param(settings, id="settings")]


@pytest.mark.parametrize("names", light_modules())
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


def test_a_push_loads_nothing_that_fits_trains_or_draws(loaded_by):
    unwanted = [f"{PACKAGE}.conversion.calibration.", f"{PACKAGE}.conversion.conversions.", f"{PACKAGE}.training."]
    loaded = loaded_by(f"{PACKAGE}.hub.push")
    assert not [each for each in loaded if f"{each}.".startswith((*unwanted, "matplotlib."))]


@pytest.fixture(scope="module")
def loaded_by():
    """The modules that are there after an import, as a function that remembers them."""
    found = {}

    def loaded(name):
        if name not in found:
            code = f"import {name}, sys; print(*sys.modules)"
            command = [sys.executable, "-c", code]
            found[name] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        return found[name]

    return loaded


def test_no_file_and_no_function_is_too_long():
    long = []
    for path in [*python_files(), *sorted((ROOT / "scripts").glob("*.py"))]:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        lines = len(text.splitlines())
        long += [f"{name}: {lines} lines"] if lines > MOST_LINES else []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_FUNCTION_LINES and node.name not in LONG_FUNCTIONS:
                    long.append(f"{name}, {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def test_the_tree_of_the_architecture_is_the_packages():
    assert package_tree.tree_in(package_tree.PAGE.read_text(encoding="utf-8")) == package_tree.tree_of(), (
        "run `make tree`"
    )


def test_a_tree_has_folders_within_folders_and_first_sentences(tmp_path):
    files = {
        "__init__.py": '"""A house. Of stone."""',
        "b.py": '"""Two\nlines of v1.1: one.\n\nMore."""',
        "a.py": "",
        "modeling/core/c.py": '"""Inner."""',
        "modeling/core/__init__.py": '"""The core."""',
        "modeling/d.py": '"""D"""',
        "commands/a_name_that_is_longer_than_others.py": '"""E."""',
    }
    for name, text in files.items():
        (tmp_path / "house" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "house" / name).write_text(text)
    assert package_tree.tree_of(tmp_path / "house").splitlines() == [
        "house/",
        "  __init__.py                  A house",
        "  a.py",
        "  b.py                         Two lines of v1.1: one",
        "  modeling/",
        "    d.py                         D",
        "    core/                        The core",
        "      c.py                         Inner",
        "  commands/",
        "    a_name_that_is_longer_than_others.py  E",
    ]
