"""The base class of configurations that are saved with their code and with an `auto_map` to this code."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..remote_code import CONFIGURATIONS, is_package_class, write_code
from .used_mechanisms import used_mechanisms

__all__ = ["SavedWithCode", "without_repository"]

# This class becomes a configuration only with a class of Transformers, so only the type checker sees it as one.
if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    _Saved = PreTrainedConfig
else:
    _Saved = object


class SavedWithCode(_Saved):
    """A configuration that is saved with its code, as a mixin to list before a class of Transformers.

    Class attributes:
        modeling_file: name of the file with the models of the architecture.
        auto_classes: name of the model in this file for each Auto class.
    """

    modeling_file: ClassVar[str] = ""
    auto_classes: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, *args: Any, **kwargs: Any) -> None:
        super().__init_subclass__(*args, **kwargs)
        if "modeling_file" in vars(cls):
            cls.register_for_auto_class()

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Register a class that is not part of this package, because Transformers would copy the code of its own."""
        if not is_package_class(cls):
            super().register_for_auto_class(auto_class)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> Any:
        """Save the configuration as Transformers does, together with the code that `auto_map` refers to.

        The class of the tokenizer is only saved in tokenizer_config.json. Without a saved tokenizer, `AutoTokenizer`
        would otherwise silently create one of this class with an empty vocabulary.
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
        if push_to_hub:  # the Transformers method saves again and uploads all files of the folder
            self.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)

    @classmethod
    def own_auto_map(cls) -> dict[str, str]:
        """Return the `auto_map` of a saved configuration."""
        own = {"AutoConfig": f"{CONFIGURATIONS}.{cls.__name__}"}
        return own | {auto: f"{cls.modeling_file}.{name}" for auto, name in cls.auto_classes.items()}


def without_repository(auto_map: dict[str, Any]) -> dict[str, Any]:
    """Return an `auto_map` without the source repository, because newly saved files are not in that repository."""
    return {key: name.split("--")[-1] if isinstance(name, str) else name for key, name in auto_map.items()}
