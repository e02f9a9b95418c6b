# ruff: noqa: F401 (`__all__` is hidden from type checkers and ruff)
"""Fine-tuning, uptraining and pretraining. Each has a settings dataclass, and a task class or function that uses it.

Names are imported on first use, so that the settings can be imported without importing torch and Transformers.

Example:
    ```python
    from hf_attn_variants.training import GlueFineTuning, GlueSettings, fine_tune

    settings = GlueSettings(model_name_or_path="bert-gqa4", task_name="sst2", output_dir="out")
    results = fine_tune(GlueFineTuning, settings)
    ```
"""

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "ClassificationFineTuning": "classification.task",
    "ClassificationSettings": "classification",
    "fine_tune": "engine.finetune",
    "FineTuningTask": "engine.finetune",
    "GlueFineTuning": "glue.task",
    "GlueSettings": "glue",
    "MaskedLMSettings": "pretraining",
    "NerFineTuning": "ner.task",
    "NerSettings": "ner",
    "Seq2SeqFineTuning": "seq2seq.task",
    "Seq2SeqSettings": "seq2seq",
    "SpanCorruptionSettings": "pretraining",
    "SquadFineTuning": "squad.task",
    "SquadSettings": "squad",
    "Uptraining": "uptraining.task",
    "UptrainingSettings": "uptraining",
    "pretrain_masked_lm": "pretraining.task",
    "pretrain_span_corruption": "pretraining.span_corruption",
}


def _import_name(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


# `__getattr__` is hidden from type checkers because they would otherwise accept any name.
if TYPE_CHECKING:
    from .classification import ClassificationSettings
    from .classification.task import ClassificationFineTuning
    from .engine.finetune import FineTuningTask, fine_tune
    from .glue import GlueSettings
    from .glue.task import GlueFineTuning
    from .ner import NerSettings
    from .ner.task import NerFineTuning
    from .pretraining import MaskedLMSettings, SpanCorruptionSettings
    from .pretraining.span_corruption import pretrain_span_corruption
    from .pretraining.task import pretrain_masked_lm
    from .seq2seq import Seq2SeqSettings
    from .seq2seq.task import Seq2SeqFineTuning
    from .squad import SquadSettings
    from .squad.task import SquadFineTuning
    from .uptraining import UptrainingSettings
    from .uptraining.task import Uptraining
else:
    __all__ = sorted(_MODULES)
    __getattr__ = _import_name
