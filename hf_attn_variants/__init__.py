"""Multi-query, grouped-query and talking-heads attention for the checkpoints of Hugging Face Transformers.

Importing the package registers its classes with transformers' Auto factories.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

# In the process of a command (`attn_variants.py`) the classes are imported when they are first asked for: they take
# seconds, which `--help` and a mistyped flag should not. `cli` registers them before a command's work.
_IS_COMMAND = getattr(sys.modules.get("attn_variants"), "is_command", False)

if TYPE_CHECKING or not _IS_COMMAND:
    from . import public as _public
    from .public import *  # noqa: F403

    if not TYPE_CHECKING:  # as in `public`
        __all__ = ["convert", "quantize", "share_memory", *_public.__all__]


def _found(name: str) -> Any:
    if name == "convert":  # its imports take seconds too
        from .conversion import convert

        return convert
    if name == "quantize":
        from .quantization.quantize import quantize

        return quantize
    if name == "share_memory":
        from .shared_memory.share import share_memory

        return share_memory
    if _IS_COMMAND and name == "__version__":
        from .command_line import package_version

        return package_version()
    # Python asks for a submodule's name here, too, before it imports that.
    if _IS_COMMAND and (name == "__all__" or name.startswith("AttnVariant")):
        public: Any = importlib.import_module(".public", __name__)
        return ["convert", "quantize", "share_memory", *public.__all__] if name == "__all__" else getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# A type checker that saw it would take any name for one that is here.
if TYPE_CHECKING:
    from .conversion import convert
    from .quantization.quantize import quantize
    from .shared_memory.share import share_memory
else:
    __getattr__ = _found


def __dir__() -> list[str]:
    package: Any = sys.modules[__name__]
    return sorted({*globals(), *package.__all__})
