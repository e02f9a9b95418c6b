"""What peft adapts in a model of our types: what it does in upstream's."""

import sys
from typing import Any

__all__ = ["tell_peft"]


def tell_peft(config_class: Any) -> None:
    """Where peft is imported, give its tables our model type, with the modules that it adapts in upstream's."""
    constants = sys.modules.get("peft.utils.constants")
    for name, table in list(vars(constants).items()) if constants else ():
        if isinstance(table, dict) and name.endswith("_MODULES_MAPPING") and config_class.model_type not in table:
            modules = next((table[each] for each in config_class.upstream_model_types if each in table), None)
            # It has no row for ALBERT, whose queries and values are called as BERT's.
            if modules is None and table.get("bert") == ["query", "value"]:
                modules = table["bert"]
            if modules is not None:
                table[config_class.model_type] = modules
