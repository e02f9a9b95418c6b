"""Attributes of one module that know it: a method of its own, say. They are copied and pickled with it."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["InstanceMethod", "OfModule"]


class OfModule:
    """An attribute of a module that needs the module.

    It holds it weakly. A module that held itself would stay in memory, a GPU's too, after its last user has gone,
    until Python looks for such circles.

    Args:
        module: the one whose attribute it becomes.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> Any:
        """The module."""
        return self._module()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _module=weakref.ref(state["_module"]))


class InstanceMethod(OfModule):
    """A function in place of a method of one module's.

    Args:
        function: it gets the module before the arguments of a call.
        module: the one whose attribute it becomes.
    """

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        super().__init__(module)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)
