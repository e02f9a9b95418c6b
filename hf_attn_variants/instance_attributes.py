"""Attributes of a module instance that refer to the instance itself, and can be copied and pickled with it."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["InstanceMethod", "WeakModuleAttribute"]


class WeakModuleAttribute:
    """Attribute of a module that holds a weak reference to this module.

    With a strong reference, the module would be part of a reference cycle. It would keep its (GPU) memory until Python
    collects such cycles.

    Args:
        module: the module that gets the attribute.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> Any:
        """The module that has this attribute."""
        return self._module()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _module=weakref.ref(state["_module"]))


class InstanceMethod(WeakModuleAttribute):
    """Function that replaces a method of one module instance.

    Args:
        function: the function. Its first argument is the module.
        module: the module that gets the attribute.

    Example:
        >>> layer.forward = InstanceMethod(lambda module, x: 2 * module.weight @ x, layer)
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__(module)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)
