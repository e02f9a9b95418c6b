"""Loads plugins, which are Python files that register score functions and kernels."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def load_plugin(path: str | Path) -> Any:
    """Import a Python file that registers mechanisms, unless it has been imported before.

    Args:
        path: the file, whose code also ships with the models that use its mechanisms.

    Returns:
        The module.

    Raises:
        OSError: if the file does not exist.
        ValueError: if the file registers an existing name, or must not ship with models.

    Example:
        >>> from hf_attn_variants import load_plugin
        >>> load_plugin("examples/my_attention.py").CosineScore.name
        'cosine'
    """
    from .modeling.code_builder import read_plugin

    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"The plugin {str(path)!r} does not exist. Set --plugin to a Python file.")
    read_plugin(file)
    name = file.stem
    loaded = sys.modules.get(name)
    installed = importlib.util.find_spec(name) if loaded is None else loaded.__spec__
    if installed is not None and Path(installed.origin or "").resolve() != file:
        raise ValueError(f"The name of the plugin {str(path)!r} must differ from installed modules. Rename the file.")
    if loaded is not None:
        return loaded
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
