"""Multi-query, grouped-query, latent, linear and talking-heads attention for Hugging Face Transformers checkpoints.

Importing the package registers its classes with the Transformers Auto classes.

Example:
    >>> from hf_attn_variants import convert
    >>> model = convert("google-bert/bert-base-uncased", 4, method="mean")
    >>> model.save_pretrained("bert-gqa4")
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

# When the `attn-variants` command runs, the classes are imported only when they are used. Importing them takes several
# seconds, and `--help` and errors in the flags should not wait for it. `cli` registers the classes before a command
# runs.
_IS_COMMAND = getattr(sys.modules.get("attn_variants"), "is_command", False)

# The functions of the package, the base classes of plugins, and their modules, whose imports take several seconds.
_FUNCTIONS = {
    "convert": ".conversion",
    "load_plugin": ".plugins",
    "quantize": ".quantization.quantize",
    "share_memory": ".shared_memory.share",
    "ScoreFunction": ".modeling.mechanisms.score_function",
    "TokenwiseKernel": ".modeling.mechanisms.kernels.feature_kernel",
    "register_kernel": ".modeling.mechanisms.kernels.kernel_table",
    "register_score": ".modeling.mechanisms.score_table",
}

if TYPE_CHECKING or not _IS_COMMAND:
    from . import public as _public
    from .public import *

    if not TYPE_CHECKING:  # for the reason given in `public`
        __all__ = [
            "ScoreFunction",
            "TokenwiseKernel",
            "convert",
            "load_plugin",
            "quantize",
            "register_kernel",
            "register_score",
            "share_memory",
            *_public.__all__,
        ]


def _get_attribute(name: str) -> Any:
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name], __name__), name)
    if _IS_COMMAND and name == "__version__":
        from .command_parser import get_package_version

        return get_package_version()
    # Python also calls this function with the name of each submodule before it imports that submodule.
    if _IS_COMMAND and (name == "__all__" or name.startswith("AttnVariant")):
        public: Any = importlib.import_module(".public", __name__)
        return [*_FUNCTIONS, *public.__all__] if name == "__all__" else getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# This is hidden from type checkers, which would accept any name if they saw a module-level `__getattr__`.
if TYPE_CHECKING:
    from .conversion import convert
    from .modeling.mechanisms.kernels.feature_kernel import TokenwiseKernel
    from .modeling.mechanisms.kernels.kernel_table import register_kernel
    from .modeling.mechanisms.score_function import ScoreFunction
    from .modeling.mechanisms.score_table import register_score
    from .plugins import load_plugin
    from .quantization.quantize import quantize
    from .shared_memory.share import share_memory
else:
    __getattr__ = _get_attribute


def __dir__() -> list[str]:
    package: Any = sys.modules[__name__]
    return sorted({*globals(), *package.__all__})
