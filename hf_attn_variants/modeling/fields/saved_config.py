"""How a configuration is saved: with its code beside it, and an `auto_map` that points there."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..remote_code import CONFIGURATIONS, is_package_class, write_code
from .used_mechanisms import used_mechanisms

__all__ = ["SavedWithCode", "without_repository"]

# A mixin is no configuration before it stands beside upstream's class: the checker alone sees the two as one.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    _Saved = PreTrainedConfig
else:
    _Saved = object


class SavedWithCode(_Saved):
    """What saves a configuration with its code; listed before upstream's class among the bases.

    Class attributes:
        modeling_file: the name of the file with its architecture's models.
        auto_classes: for each Auto class, the name of the model there.
    """

    modeling_file: ClassVar[str] = ""
    auto_classes: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init_subclass__(*args, **kwargs)
        if "modeling_file" in vars(cls):
            cls.register_for_auto_class()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Register a class as upstream does, unless it is ours: upstream would copy its code, which we write."""
        if not is_package_class(cls):
            super().register_for_auto_class(auto_class)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Save as upstream does, and beside it the code that `auto_map` points to.

        A tokenizer's class is left to tokenizer_config.json: where no tokenizer is saved, `AutoTokenizer` would make
        one of that class to which every word is unknown, and say nothing.
        """
        names = ("auto_map", "tokenizer_class")
        own: dict[str, Any] = {name: self.__dict__[name] for name in names if name in self.__dict__}
        self.auto_map = self.own_auto_map() | without_repository(self.__dict__["auto_map"])
        self.__dict__.pop("tokenizer_class", None)
        try:
            super().save_pretrained(save_directory)
            write_code(save_directory, type(self), self.modeling_file, used_mechanisms(self))
        finally:
            self.__dict__.update(own)
        if push_to_hub:  # by upstream's method, which saves once more: it uploads all that it finds there
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @classmethod
    def own_auto_map(cls) -> dict[str, str]:
        """Return the `auto_map` of a saved configuration."""
        own = {"AutoConfig": f"{CONFIGURATIONS}.{cls.__name__}"}
        return own | {auto: f"{cls.modeling_file}.{name}" for auto, name in cls.auto_classes.items()}


def without_repository(auto_map: dict[str, Any]) -> dict[str, Any]:
    """Return an `auto_map` without the repository that it was read from, which files saved anew are not in."""
    return {key: name.split("--")[-1] if isinstance(name, str) else name for key, name in auto_map.items()}
