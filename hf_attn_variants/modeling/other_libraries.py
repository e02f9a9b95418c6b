"""Entries for the architectures of this package in the tables of peft and sentence-transformers."""

import sys
from typing import Any

__all__ = ["register_with_peft", "register_with_sentence_transformers"]

TEXT_ENCODER = "AutoModelForTextEncoding"


def register_with_peft(config_class: Any) -> None:
    """Add a model type to peft's tables of default target modules, with the modules of Transformers' own."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in list(vars(constants).items()) if constants else ():
        if isinstance(table, dict) and name.endswith("_MODULES_MAPPING") and config_class.model_type not in table:
            modules = next((table[each] for each in config_class.upstream_model_types if each in table), None)
            # It has no row for ALBERT, whose queries and values are called as BERT's.
            if modules is None and table.get("bert") == ["query", "value"]:
                modules = table["bert"]
            if modules is not None:
                table[config_class.model_type] = modules


def register_with_sentence_transformers(config_class: Any) -> None:
    """Let sentence-transformers load the encoder of a T5 or UMT5 by its Auto class, if the library is imported.

    Its table names Transformers' own encoder for each subclass of `T5Config`. The first entry that fits is used, and
    the Auto class finds the encoder of this package in remote code too.
    """
    library = sys.modules.get("sentence_transformers.base.modules.transformer")
    table = getattr(library, "_ENCODER_ONLY_MODELS", None)
    if not isinstance(table, list) or TEXT_ENCODER not in config_class.auto_classes:
        return
    is_encoder_decoder = hasattr(config_class, "encoder_decoder_layers")
    if is_encoder_decoder and all(row[0] is not config_class for row in table):
        table.insert(0, (config_class, "transformers", TEXT_ENCODER))
