"""Builds the code files of a model repository from the parts of `modeling/` that the model needs.

Transformers only resolves relative imports in the same folder, and it downloads each file in a repository separately.
The modules in a folder are therefore joined into one file in the order of their imports, with only the definitions
that the model uses. The steps are:

    modules ──parse──> definitions ──resolve names──> definitions that the model uses ──join──> files

The search starts at the model's own file and resolves all names that a definition uses. It stops at names in
`ENTRY_POINTS` whose mechanism is not used in the configuration. Such names are replaced by stubs, and definitions that
only they use are omitted. Repositories do not contain this file. When the model in a repository is saved again, the
files of the repository are copied.
"""

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple, TypeGuard

__all__ = ["build_code", "get_file_names"]

MODELING_FOLDER = Path(__file__).parent
# Each file in this folder contains the classes of one architecture or family and is not joined with others.
UNJOINED_FOLDER = "architectures"
# Modules next to this file are joined into a file with this name, and modules in a folder into a file with the folder
# name.
_BASE_GROUP = "base"
NAMES_MODULE = "variant_names"
DIGEST_LENGTH = 12
# The packages that a plugin may import, in addition to this package, because its file ships with saved models.
_PLUGIN_IMPORTS = {
    *("__future__", "abc", "collections", "dataclasses", "enum", "functools", "itertools", "math", "typing"),
    *("torch", "transformers"),
}

# The names through which other code uses mechanisms (see `fields/composition.py`): {mechanisms: names}. A repository
# includes the definition of a name if its model uses one of the mechanisms.
_NAMES_BY_MECHANISMS = {
    (): "build_code",
    ("additive_score",): "AdditiveScore ScoreFunction create_score_function",
    ("latents",): (
        "LatentAttention add_latent_projection attend_to_latent attend_to_one_latent compute_latent_with_cache "
        "should_use_latent_kernels"
    ),
    ("linear_attention",): (
        "AttentionKernel EluKernel KernelStateLayer LinformerKernel ReluKernel _prepare_state_layer check_kernels "
        "create_kernel get_kernel_class get_random_buffer_names init_kernel install_kernel kernel_attention_forward"
    ),
    ("linear_attention", "patterns"): (
        "WindowBlockLayout RelativePositionBias KeyRange attend_with_global_tokens_first windowed_attention "
        "check_global_mask "
        "check_patterns get_key_range key_range_to_mask_and_bias limit_cache_to_window limit_masks_to_padding "
        "should_compute_in_blocks"
    ),
    ("linear_attention", "patterns", "talking_heads"): "talking_heads_attention",
    ("linear_attention", "talking_heads"): "find_added_talking_heads",
    ("patterns",): (
        "AttentionPattern MemoryCompressedPattern TransientGlobalPattern add_summary_parameters "
        "attend_to_gathered_keys "
        "attend_with_summaries compute_summary_bias create_compression get_pattern_class"
    ),
    ("sinusoidal_positions",): (
        "AttnVariantAlbertEmbeddings AttnVariantBertEmbeddings AttnVariantDistilBertEmbeddings "
        "AttnVariantElectraEmbeddings AttnVariantRobertaEmbeddings SinusoidalPositions compute_sinusoids "
        "warn_about_replaced_positions"
    ),
    ("talking_heads",): (
        "DynamicTalkingHeads _check_talking_heads_in_layer _find_new_talking_heads describe_talking_heads_init "
        "get_talking_heads_parameter_shapes get_talking_heads_init_std"
    ),
    ("unequal_layers",): "merge_per_layer_config validate_layer_values",
    ("extensions",): "get_normalization install_extensions",
    ("extensions", "latents", "unequal_values"): "attend_with_projections",
    ("additive_score", "extensions", "linear_attention", "patterns", "talking_heads"): (
        "attend_with_mechanisms set_padding_rule"
    ),
    (
        *("additive_score", "extensions", "latents", "linear_attention", "patterns", "sinusoidal_positions"),
        *("talking_heads", "unequal_layers", "unequal_values"),
    ): "_check_no_mechanism_is_ignored check_combinations",
}
ENTRY_POINTS = {name: needed_by for needed_by, names in _NAMES_BY_MECHANISMS.items() for name in names.split()}
# A stub has the name of the definition that it replaces.
STUB_TEMPLATE = "class {name}(MissingDefinition):\n    mechanisms = {mechanisms!r}\n"


class _Definition(NamedTuple):
    """A statement at the top level of a module, with the comment above it.

    Args:
        text: its source.
        names: the names that it defines. Statements that are run for their side effects define no names.
        uses: the names that it uses.
        node: its syntax tree.
    """

    text: str
    names: frozenset[str]
    uses: frozenset[str]
    node: ast.stmt


class _SourceModule(NamedTuple):
    """A module of `modeling/`.

    Args:
        name: its name without folders.
        file: the name of the file that will contain it, without ".py".
        docstring: the source of its docstring.
        body: its statements in order, except the docstring and `__all__`.
        imported: the module and the original name for each name that it imports from another module in `modeling/`.
        needed: the modules that must be executed before it.
    """

    name: str
    file: str
    docstring: str
    body: list[_Definition]
    imported: dict[str, tuple[str, str]]
    needed: list[str]


@cache  # all checkpoints in a training run contain the same code
def build_code(
    roots: tuple[tuple[str, str], ...], mechanisms: frozenset[str] | None, plugins: tuple[tuple[Path, str], ...] = ()
) -> Mapping[str, str]:
    """Return the code files of a repository: {file name: text}.

    Args:
        roots: the definitions that the repository must contain, as (module, name). The name "*" selects a whole
            module. The first module contains the configuration.
        mechanisms: the mechanisms that the model uses, or None for all mechanisms.
        plugins: the classes from plugins that the model uses, as (file, name).

    Raises:
        ValueError: if a repository must not contain the code of a plugin.

    Example:

    ```py
    >>> from hf_attn_variants.modeling.code_builder import build_code
    >>> files = build_code((("modeling_attn_variant_bert", "*"),), frozenset())
    >>> "modeling_attn_variant_bert.py" in files
    True
    ```
    """
    modules = _read_modules() | {path.stem: read_plugin(path) for path, _ in plugins}
    stubs = _list_stubs(mechanisms)
    used_definitions = _find_used_definitions(modules, (*roots, *((path.stem, name) for path, name in plugins)), stubs)
    files: dict[str, list[_SourceModule]] = {}
    for module in _sort_modules_by_import(modules, {name for name, _ in used_definitions}):
        files.setdefault(module.file, []).append(module)
    texts = {
        f"{file}.py": _build_file_text(parts, modules, used_definitions, stubs)
        for file, parts in sorted(files.items())
    }
    if plugins:  # Transformers imports the configuration before the model
        imports = [f"from .{path.stem} import {name}" for path, name in plugins]
        texts[f"{roots[0][0]}.py"] += "\n".join(["\n# These classes from plugins register themselves.", *imports, ""])
    return _insert_constants(texts, mechanisms)


def build_single_file(module: str, name: str, paths: Iterable[Path], mechanisms: frozenset[str] = frozenset()) -> str:
    """Return the text of a file with a definition from outside `modeling/` and all package code that it uses.

    The file only imports torch, Transformers and the standard library.

    Args:
        module: the name of the module with the definition.
        name: the name of the definition.
        paths: the modules outside `modeling/` that the definition may use, including its own module.
        mechanisms: the mechanisms that the file contains.

    Example:

    ```py
    >>> from pathlib import Path
    >>> import hf_attn_variants
    >>> from hf_attn_variants.modeling.code_builder import build_single_file
    >>> path = Path(hf_attn_variants.__file__).parent / "model_properties.py"
    >>> "class WeakModuleAttribute" in build_single_file("model_properties", "InstanceMethod", [path])
    True
    ```
    """
    modules = {**_read_modules(), **{path.stem: _read_module(path, module) for path in paths}}
    modules = {key: value._replace(file=module) for key, value in modules.items()}
    stubs = _list_stubs(mechanisms)
    used_definitions = _find_used_definitions(modules, [(module, name)], stubs)
    parts = list(_sort_modules_by_import(modules, {place for place, _ in used_definitions}))
    # The module with the definition comes last. Its docstring comes first.
    text = _build_file_text(parts, modules, used_definitions, stubs)
    docstring = ast.literal_eval(modules[module].docstring)
    text = f'"""{docstring.split(chr(10))[0]}"""\n\n{text[len(parts[0].docstring) :].lstrip()}'
    digest = hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
    return re.sub(r"^CODE_DIGEST\b.*$", f'CODE_DIGEST = "{digest}"', text, flags=re.MULTILINE)


def read_plugin(path: Path) -> _SourceModule:
    """Read the file of a plugin, whose imports from this package become imports from the files of the repository.

    Raises:
        ValueError: if the name of the file is not a new module name, or if the file imports other packages, or names
            that this package does not define, or opens files.
    """
    if not path.stem.isidentifier() or path.name in get_file_names():
        raise ValueError(
            f"The name of a plugin must be a Python identifier that no file of this package has, got {path.name!r}. "
            "Rename the file."
        )
    module, package = _read_module(path, path.stem), __name__.partition(".")[0]
    kinds = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign
    homes = {
        name: other.name
        for other in _read_modules().values()
        for definition in other.body
        if isinstance(definition.node, kinds)
        for name in definition.names
    }
    imported: dict[str, tuple[str, str]] = {}
    body = []
    for definition in module.body:
        node, packages = definition.node, {*_find_imported_packages(definition.node)}
        if isinstance(node, ast.ImportFrom) and packages == {package}:
            if missing := [alias.name for alias in node.names if alias.name not in homes]:
                raise ValueError(
                    f"{path} must only import names that the code of models defines, got `{missing[0]}`. Define it in "
                    "the plugin."
                )
            imported |= {alias.asname or alias.name: (homes[alias.name], alias.name) for alias in node.names}
            continue
        if not packages <= _PLUGIN_IMPORTS or "open" in definition.uses:
            raise ValueError(
                f"{path} must not open files, and it can only import torch, transformers and this package, because "
                f"the file ships with saved models. Change the statement in line {node.lineno}."
            )
        body.append(definition)
    return module._replace(body=body, imported=imported, needed=[home for home, _ in imported.values()])


def _find_imported_packages(node: ast.stmt) -> Iterator[str]:
    """Yield the packages that a statement imports, also inside functions."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").partition(".")[0]


def get_file_names() -> set[str]:
    """Return the names of all code files that a repository may contain."""
    return {
        f"{_get_output_file_name(path)}.py"
        for path in MODELING_FOLDER.rglob("*.py")
        if path.stem not in ("__init__", "code_builder")
    }


def _list_stubs(mechanisms: frozenset[str] | None) -> dict[str, tuple[str, ...]]:
    """Return the names that are replaced by stubs, with the mechanisms that need them."""
    if mechanisms is None:
        return {name: needed_by for name, needed_by in ENTRY_POINTS.items() if not needed_by}
    extensions = _find_extensions()
    used = mechanisms if mechanisms.isdisjoint(extensions.values()) else {*mechanisms, "extensions"}
    needed = ENTRY_POINTS | {name: (field,) for name, field in extensions.items()}
    return {name: needed_by for name, needed_by in needed.items() if used.isdisjoint(needed_by)}


def _find_extensions() -> dict[str, str]:
    """Return the class name of each attention extension, with its field, which is the name of its mechanism."""
    texts = [module.body for module in _read_modules().values()]
    classes = [item.node for body in texts for item in body if isinstance(item.node, ast.ClassDef)]
    return {
        kind.name: ast.literal_eval(statement.value)
        for kind in classes
        if "AttentionExtension" in map(ast.unparse, kind.bases)
        for statement in kind.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "field"
    }


def _get_output_file_name(path: Path) -> str:
    folder = path.relative_to(MODELING_FOLDER).parts[0] if path.parent != MODELING_FOLDER else _BASE_GROUP
    return path.stem if folder == UNJOINED_FOLDER else f"attn_variants_{folder}"


@cache
def _read_modules() -> dict[str, _SourceModule]:
    return {path.stem: _read_module(path) for path in sorted(MODELING_FOLDER.rglob("*.py")) if path.stem != "__init__"}


def _read_module(path: Path, file: str | None = None) -> _SourceModule:
    text = path.read_bytes().decode()
    lines, tree = text.splitlines(), ast.parse(text)
    nodes = [child for node in tree.body for child in (node.orelse if _is_for_type_checkers(node) else [node])]
    docstring, end = "", 0
    body: list[_Definition] = []
    imported: dict[str, tuple[str, str]] = {}
    needed: list[str] = []
    for node in nodes:
        start = min([node.lineno, *(line.lineno for line in getattr(node, "decorator_list", []))]) - 1
        source = "\n".join(lines[end:start]).strip("\n"), textwrap.dedent("\n".join(lines[start : node.end_lineno]))
        end = node.end_lineno or node.lineno
        if not body and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and not docstring:
            docstring = source[1]
            continue
        names = frozenset(_find_defined_names(node))
        if "__all__" in names:
            continue
        is_relative = isinstance(node, ast.ImportFrom) and node.level > 0
        if not is_relative:
            comment = "\n".join(line for line in source[0].split("\n") if line.startswith("#"))
            statement_text = f"{comment}\n{source[1]}" if comment else source[1]
            body.append(_Definition(statement_text, names, frozenset(_find_used_names(node)), node))
        for child in ast.walk(node):
            if isinstance(child, ast.ImportFrom) and child.level and child.module is not None:
                module = child.module.rpartition(".")[2]
                imported |= {alias.asname or alias.name: (module, alias.name) for alias in child.names}
                needed += [module] if is_relative else []
    return _SourceModule(path.stem, file or _get_output_file_name(path), docstring, body, imported, needed)


def _is_for_type_checkers(node: ast.stmt) -> TypeGuard[ast.If]:
    """Return True if a statement is an `if TYPE_CHECKING` block. Repositories only include its `else` branch."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _find_defined_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.If | ast.With | ast.Try):
        for child in (*node.body, *getattr(node, "orelse", ()), *getattr(node, "finalbody", ())):
            yield from _find_defined_names(child)
        for handler in getattr(node, "handlers", ()):
            for child in handler.body:
                yield from _find_defined_names(child)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (child.id for child in ast.walk(target) if isinstance(child, ast.Name))


def _find_used_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement uses."""
    return (child.id for child in ast.walk(node) if isinstance(child, ast.Name))


def _find_used_definitions(
    modules: Mapping[str, _SourceModule], roots: Iterable[tuple[str, str]], stubs: Mapping[str, tuple[str, ...]]
) -> set[tuple[str, str]]:
    """Return all definitions that the roots use directly or indirectly, including stubs, as (module, name)."""
    visited: set[tuple[str, str]] = set()
    pending: list[tuple[str, str]] = []
    for module_name, root in roots:
        all_names = (name for definition in modules[module_name].body for name in definition.names)
        pending += [(module_name, name) for name in (all_names if root == "*" else [root])]
    while pending:
        place = pending.pop()
        if place in visited or place[0] not in modules:
            continue
        visited.add(place)
        if place[1] in stubs:
            pending.append(BASE_STUB)
            continue
        module = modules[place[0]]
        for definition in module.body:
            # Statements that are run for their side effects, such as registrations, define no names.
            if place[1] in definition.names or not definition.names:
                pending += [module.imported.get(name, (module.name, name)) for name in definition.uses]
    return visited


# The base class of stubs, which is defined in the base file of a repository.
BASE_STUB = (NAMES_MODULE, "MissingDefinition")


def _sort_modules_by_import(modules: Mapping[str, _SourceModule], names: set[str]) -> Iterator[_SourceModule]:
    """Yield each module after the modules that it imports at runtime."""
    needed = {
        name: [required for required in module.needed if required in modules] for name, module in modules.items()
    }
    return (modules[name] for name in TopologicalSorter(needed).static_order() if name in names)


def _build_file_text(
    file_modules: list[_SourceModule],
    modules: Mapping[str, _SourceModule],
    used_definitions: set[tuple[str, str]],
    stubs: Mapping[str, tuple[str, ...]],
) -> str:
    """Return the text of a joined file, with the imports and the used definitions of its modules."""
    imports: dict[str, set[str]] = {}
    plain: dict[str, None] = {}
    texts: list[str] = []  # the docstring of each module, and its code
    for module in file_modules:
        body: list[str] = []
        definitions: list[_Definition] = []
        is_used = any(place == module.name and name not in stubs for place, name in used_definitions)
        for definition in module.body:
            names = {name for name in definition.names if (module.name, name) in used_definitions}
            if not names and (definition.names or not is_used):
                continue
            if stubbed := sorted(name for name in names if name in stubs):
                body += [STUB_TEMPLATE.format(name=name, mechanisms=stubs[name]) for name in stubbed]
                _add_import(imports, (NAMES_MODULE, "MissingDefinition"), "MissingDefinition", module, modules)
                continue
            definitions.append(definition)
            if isinstance(definition.node, ast.Import | ast.ImportFrom):
                _add_external_import(plain, imports, definition.node, names)
            else:
                body.append(_build_definition_text(definition, module, modules, names))
        uses = {name for definition in definitions for name in definition.uses}
        for name, place in module.imported.items():
            if name in uses and place in used_definitions:
                _add_import(imports, place, name, module, modules)
        if body:
            docstring = _docstring_to_comment(module.docstring) if texts else module.docstring
            texts += [docstring if definitions else "", _join_statements(body)]
    lines = [f"from {source} import {', '.join(sorted(names))}" for source, names in sorted(imports.items())]
    future = [line for line in lines if line.startswith("from __future__")]
    relative = [line for line in lines if line.startswith("from .")]
    other_lines = [line for line in lines if line not in (*future, *relative)]
    head = "\n".join([*future, *plain, *other_lines, *relative])
    return "\n\n\n".join(part for part in (texts[0], head, *texts[1:]) if part) + "\n"


def _docstring_to_comment(docstring: str) -> str:
    """Convert a module docstring to a comment, because a joined file has only one docstring."""
    return "\n".join(f"# {line}".rstrip() for line in ast.literal_eval(docstring).strip().split("\n"))


def _add_import(
    imports: dict[str, set[str]],
    origin: tuple[str, str],
    name: str,
    module: _SourceModule,
    modules: Mapping[str, _SourceModule],
) -> None:
    """Add the import of a name from another file."""
    source, original = origin
    if modules[source].file != module.file:
        imports.setdefault(f".{modules[source].file}", set()).add(
            original if name == original else f"{original} as {name}"
        )


def _add_external_import(
    import_lines: dict[str, None], imports: dict[str, set[str]], node: ast.Import | ast.ImportFrom, names: set[str]
) -> None:
    """Add an import from torch, Transformers or the standard library, limited to the names that are used."""
    for alias in node.names:
        imported_name = alias.name + (f" as {alias.asname}" if alias.asname else "")
        if (alias.asname or alias.name).partition(".")[0] in names or getattr(node, "module", "") == "__future__":
            if isinstance(node, ast.Import):
                import_lines.setdefault(f"import {imported_name}")
            else:
                imports.setdefault(node.module or "", set()).add(imported_name)


def _format_guarded_imports(block: ast.With, names: set[str]) -> str:
    """Return a `guarded_imports` block that imports only the used names."""
    lines = [f"with {ast.unparse(block.items[0])}:"]
    for node in block.body:
        imported = [alias for alias in getattr(node, "names", ()) if (alias.asname or alias.name) in names]
        if isinstance(node, ast.ImportFrom) and imported:
            statement = ast.ImportFrom(module=node.module, names=imported, level=node.level)
            lines.append(f"    {ast.unparse(statement)}")
    return "\n".join(lines)


def _join_statements(parts: list[str]) -> str:
    """Join statements, with two blank lines around functions and classes."""
    text = ""
    for part in filter(None, parts):
        is_block = re.match(r"(#.*\n)*(@|def |class |\"\"\")", part) is not None
        separator = "\n\n\n" if is_block or text.rstrip("\n").split("\n")[-1].startswith((" ", ")")) else "\n"
        text = f"{text.rstrip()}{separator if text else ''}{part}"
    return text


def _build_definition_text(
    definition: _Definition, module: _SourceModule, modules: Mapping[str, _SourceModule], names: set[str]
) -> str:
    """Return the source of a statement, and adapt the relative imports inside it to the files of the repository.

    Args:
        names: the used names that the statement defines. A `guarded_imports` block only imports these names.
    """
    if isinstance(definition.node, ast.With):
        return _format_guarded_imports(definition.node, names)
    lines = definition.text.split("\n")
    end = definition.node.end_lineno or definition.node.lineno
    first = end - len(lines) + 1  # the line in the module at which the text begins
    relative_imports = [node for node in ast.walk(definition.node) if isinstance(node, ast.ImportFrom) and node.level]
    for child in sorted(relative_imports, key=lambda node: -node.lineno):
        source = (child.module or "").rpartition(".")[2]
        imported_name = ", ".join(map(ast.unparse, child.names))
        is_joined = modules[source].file == module.file
        new = "pass" if is_joined else f"from .{modules[source].file} import {imported_name}"
        lines[child.lineno - first : (child.end_lineno or child.lineno) - first + 1] = [
            f"{' ' * child.col_offset}{new}"
        ]
    return "\n".join(lines)


def _insert_constants(files: dict[str, str], mechanisms: frozenset[str] | None) -> dict[str, str]:
    """Insert the included mechanisms and a digest into the base file. The digest is part of the registered names."""
    included = None if mechanisms is None else tuple(sorted(mechanisms))
    name = f"attn_variants_{_BASE_GROUP}.py"
    files[name] = re.sub(
        r"^INCLUDED_MECHANISMS\b.*$", f"INCLUDED_MECHANISMS = {included!r}", files[name], flags=re.MULTILINE
    )
    digest = hashlib.sha256("".join(files[file] for file in sorted(files)).encode()).hexdigest()[:DIGEST_LENGTH]
    files[name] = re.sub(r"^CODE_DIGEST\b.*$", f'CODE_DIGEST = "{digest}"', files[name], flags=re.MULTILINE)
    return files
