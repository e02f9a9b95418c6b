"""Training: each way of it has settings, a frozen dataclass, and a task or a function that takes them.

The names below are imported when they are first used: settings alone import neither torch nor transformers.
"""

import importlib
from typing import Any

_HOMES = {
    "fine_tune": "engine.finetune",
    "FineTuningTask": "engine.finetune",
    "GlueFineTuning": "glue.task",
    "GlueSettings": "glue.settings",
    "MaskedLMSettings": "pretraining.settings",
    "NerFineTuning": "ner.task",
    "NerSettings": "ner.settings",
    "Seq2SeqFineTuning": "seq2seq.task",
    "Seq2SeqSettings": "seq2seq.settings",
    "SpanCorruptionSettings": "pretraining.settings",
    "SquadFineTuning": "squad.task",
    "SquadSettings": "squad.settings",
    "Uptraining": "uptraining.task",
    "UptrainingSettings": "uptraining.settings",
    "pretrain_masked_lm": "pretraining.run_mlm",
    "pretrain_span_corruption": "pretraining.run_span_corruption",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
