"""How a configuration is saved: with its code beside it, and an `auto_map` that points there."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..travel import lies_in_a_room, write_code

__all__ = ["SavedWithCode", "without_repository"]

# A mixin is no configuration before it stands beside upstream's class: the checker alone sees the two as one.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    _Saved = PreTrainedConfig
else:
    _Saved = object

CONFIGURATIONS = "configuration_attn_variants"


class SavedWithCode(_Saved):
    """What saves a configuration with its code; listed before upstream's class among the bases.

    Class attributes:
        modeling_file: the name of the file with its architecture's models.
        auto_classes: for each Auto class, the name of the model there.
    """

    modeling_file: ClassVar[str] = ""
    auto_classes: ClassVar[dict[str, str]] = {}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Register a class as upstream does, but one of ours: then upstream would copy its code, which we write."""
        if not lies_in_a_room(cls):
            super().register_for_auto_class(auto_class)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Save as upstream does, and beside it the code that `auto_map` points to.

        A tokenizer's class is left to tokenizer_config.json: where no tokenizer is saved, `AutoTokenizer` would make
        one of that class to which every word is unknown, and say nothing.
        """
        names = ("auto_map", "tokenizer_class")
        kept: dict[str, Any] = {name: self.__dict__[name] for name in names if name in self.__dict__}
        self.auto_map = self._own_auto_map() | without_repository(self.__dict__["auto_map"])
        self.__dict__.pop("tokenizer_class", None)
        try:
            super().save_pretrained(save_directory)
            write_code(save_directory, CONFIGURATIONS, self.modeling_file)
        finally:
            self.__dict__.update(kept)
        if push_to_hub:  # by upstream's method, which saves once more: it uploads all that it finds there
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    def _own_auto_map(self) -> dict[str, str]:
        own = {"AutoConfig": f"{CONFIGURATIONS}.{type(self).__name__}"}
        return own | {auto: f"{self.modeling_file}.{name}" for auto, name in self.auto_classes.items()}


def without_repository(auto_map: dict[str, Any]) -> dict[str, Any]:
    """Return an `auto_map` without the repository that it was read from, which files saved anew are not in."""
    return {key: name.split("--")[-1] if isinstance(name, str) else name for key, name in auto_map.items()}
