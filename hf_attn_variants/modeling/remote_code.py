"""Writes the modeling code to the folder of a saved model.

The installed package builds the files that a model requires (see `code_builder`). Code that was loaded from a
repository copies the files of this repository instead. No other code in `modeling/` reads or writes files.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .code_builder import build_code
from .variant_names import CODE_DIGEST

__all__ = ["CONFIGURATION_MODULE", "get_code_files", "is_package_class", "write_code"]

_FOLDER = Path(__file__).parent
CONFIGURATION_MODULE = "configuration_attn_variants"


def get_code_files(
    config_class: type, modeling_file: str, mechanisms: Iterable[str] | None, plugins: Sequence[type] = ()
) -> Mapping[str, str]:
    """Return the code files of a repository: {file name: text}.

    Args:
        config_class: the configuration class.
        modeling_file: the name of the file with the models of the architecture.
        mechanisms: the mechanisms that the model uses (see `get_used_mechanisms`), or None for all mechanisms. Code in
            a repository ignores this argument, because it only contains its own mechanisms.
        plugins: the classes from plugins that the model uses. Code in a repository ignores this argument too.
    """
    if not CODE_DIGEST:
        names = [
            base.__name__ for base in config_class.__mro__ if base.__module__.endswith(f".{CONFIGURATION_MODULE}")
        ]
        roots = ((CONFIGURATION_MODULE, names[0]), (modeling_file, "*"))
        files_and_names = tuple((Path(str(sys.modules[cls.__module__].__file__)), cls.__name__) for cls in plugins)
        return build_code(roots, None if mechanisms is None else frozenset(mechanisms), files_and_names)
    files: dict[str, str] = {}
    module_names = [CONFIGURATION_MODULE, modeling_file]
    while module_names:
        name = f"{module_names.pop()}.py"
        # If only the configuration was loaded from the Hub, the file with the models was not downloaded.
        if name not in files and (_FOLDER / name).exists():
            files[name] = (_FOLDER / name).read_bytes().decode()
            module_names += re.findall(r"^ *from \.(\w+) import", files[name], re.MULTILINE)
    return files


def write_code(
    folder: str | Path,
    config_class: type,
    modeling_file: str,
    mechanisms: Iterable[str] | None,
    plugins: Sequence[type] = (),
) -> None:
    """Write the code files of a repository to a folder. See `get_code_files` for the other arguments."""
    for name, text in get_code_files(config_class, modeling_file, mechanisms, plugins).items():
        (Path(folder) / name).write_bytes(text.encode())


def is_package_class(cls: type) -> bool:
    """Return True if a class is defined in the installed package.

    When Transformers saves a model, it copies the files of registered classes. It must not copy files from the
    package, because `write_code` writes them.
    """
    package = __name__.rpartition(".")[0]
    inside = cls.__module__.removeprefix(f"{package}.")
    return inside != cls.__module__ and "." in inside
