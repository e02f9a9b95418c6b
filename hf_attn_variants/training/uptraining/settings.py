"""The settings of uptraining, and the weights of the loss's terms that they ask for."""

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

from ..engine.options import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    BETWEEN_0_AND_1,
    WITH_BEST_WEIGHTS,
    Settings,
    option,
    redefault,
)
from ..engine.settings import FineTuningSettings, LanguageSettings

__all__ = ["OBJECTIVES", "TRAINABLE", "UptrainingSettings", "UptrainingTextSettings"]

OBJECTIVES = ("distill", "mlm", "seq2seq", "embedding")
# Which parameters can be trained; see `trainable`.
TRAINABLE = ("attention", "all", "lora")
TERM_FLAGS = ("hidden_states_weight", "attention_outputs_weight", "logits_weight")
WARMUP_RATIO = 0.05


@dataclass(frozen=True, kw_only=True)
class UptrainingTextSettings(Settings):
    """Which texts, and what is made of them."""

    title: ClassVar[str] = "text"

    train_file: tuple[str, ...] | None = option(
        "Text, one example a line (.txt, .gz), or tables (.csv, .tsv, .json, .jsonl); for an encoder-decoder tables "
        "with two columns, unless --source_file is given.",
        None,
    )
    validation_file: tuple[str, ...] | None = option(
        "Held-out text of the same kind; see --max_eval_samples.", None, resume=WITH_BEST_WEIGHTS
    )
    text_columns: tuple[str, ...] | None = option(
        "An encoder's table: the column of texts, or two columns of texts to read as pairs (default: text).",
        None,
        resume=WITH_BEST_WEIGHTS,
        metavar="COLUMN",
    )
    source_file: str | None = option("The source side of parallel text, one example a line (.txt, .gz).", None)
    validation_source_file: str | None = option("Its held-out twin.", None, resume=WITH_BEST_WEIGHTS)
    source_column: str = option(
        "Its column in an encoder-decoder's table (default: %(default)s).", "source", resume=WITH_BEST_WEIGHTS
    )
    target_file: str | None = option("The target side of parallel text, one example a line (.txt, .gz).", None)
    validation_target_file: str | None = option("Its held-out twin.", None, resume=WITH_BEST_WEIGHTS)
    target_column: str = option(
        "Its column in an encoder-decoder's table (default: %(default)s).", "target", resume=WITH_BEST_WEIGHTS
    )
    source_prefix: str = option("Text put before each source.", "")
    max_target_length: int | None = option("Tokens of a target (default: --max_length).", None, range=AT_LEAST_1)
    mlm_probability: float = option(
        "Chance of a token to be masked; anew in every epoch.", 0.15, range=BETWEEN_0_AND_1
    )
    predict_with_generate: bool = option("Generate greedily in every evaluation, and report BLEU (sacrebleu).", False)


@dataclass(frozen=True, kw_only=True)
class UptrainingSettings(UptrainingTextSettings, LanguageSettings, FineTuningSettings):
    """What is learned, of whom, and by which parameters. `warmup_ratio`, where not given, becomes its default."""

    title: ClassVar[str] = "objective"

    objective: str = option("What is learned; see below.", choices=OBJECTIVES)
    teacher: str | None = option(
        "Folder or Hub id of the checkpoint to come close to; usually the one that was converted.", None
    )
    teacher_max_length: int | None = option(
        "Encoders: the teacher reads a longer text in pieces of so many tokens, for it has fewer positions or does "
        "better with them (default: as a whole).",
        None,
        range=AT_LEAST_1,
    )
    hidden_states_weight: float | None = option(
        "Weight of the error of each layer's output, as a share of its variance (default with a teacher: 1; with "
        "--objective embedding: 0).",
        None,
        range=AT_LEAST_0,
    )
    attention_outputs_weight: float | None = option(
        "Weight of the same error of each attention's output (default: as the one before).", None, range=AT_LEAST_0
    )
    logits_weight: float | None = option(
        "Weight of the divergence of the output distribution, in nats (default with a teacher: 1 for mlm, seq2seq and "
        "an encoder-decoder; otherwise 0).",
        None,
        range=AT_LEAST_0,
    )
    temperature: float = option("Divides the logits of that divergence.", 1.0, range=ABOVE_0)
    trainable: str = option(
        "Which parameters are trained: those of the attention modules, all, or low-rank updates of the attention "
        "projections that are merged at the end (default: %(default)s).",
        "attention",
        choices=TRAINABLE,
    )
    lora_rank: int = option("Rank of these updates (default: %(default)s).", 32, range=AT_LEAST_1)
    lora_alpha: float = option(
        "They are scaled by this over their rank (default: %(default)s).", 32.0, range=AT_LEAST_0
    )
    alpha: float | None = option(
        "Train for this share of --pretraining_steps (arXiv:2305.13245 takes 0.05).", None, range=AT_LEAST_0
    )
    pretraining_steps: int | None = option("Steps that the checkpoint was pretrained for.", None, range=AT_LEAST_1)
    max_length: int = redefault(FineTuningSettings, "max_length", 64)
    learning_rate: float = redefault(FineTuningSettings, "learning_rate", 1e-3)
    num_train_epochs: float | None = redefault(
        FineTuningSettings,
        "num_train_epochs",
        None,
        help="Epochs (0: only evaluate; default: --max_train_steps, or 300 steps).",
    )
    warmup_ratio: float | None = redefault(  # type: ignore[assignment]  # a number as soon as it is made
        FineTuningSettings,
        "warmup_ratio",
        None,
        help=f"Warm-up steps as a share of all (default: {WARMUP_RATIO}, without --num_warmup_steps).",
    )
    eval_steps: int | None = redefault(
        FineTuningSettings, "eval_steps", help="Evaluate every N optimiser steps (default: five times in the run)."
    )

    def __post_init__(self) -> None:
        if self.warmup_ratio is None:
            takes_none = self.lr_scheduler_type == "constant" or self.adafactor_relative_step
            has_none = takes_none or self.num_warmup_steps is not None
            object.__setattr__(self, "warmup_ratio", 0.0 if has_none else WARMUP_RATIO)
        super().__post_init__()

    def check(self) -> None:
        super().check()
        if self.teacher is None:
            needing = [f"--objective {self.objective}"] if self.objective in ("distill", "embedding") else []
            needing += [f"--{name}" for name in TERM_FLAGS if getattr(self, name)]
            if needing:
                raise ValueError(f"{needing[0]} needs --teacher")
            if self.teacher_max_length is not None:
                raise ValueError("--teacher_max_length is of a --teacher; there is none")
        if (self.alpha is None) != (self.pretraining_steps is None):
            raise ValueError("--alpha and --pretraining_steps belong together: give both or neither")
        if self.alpha is not None and self.max_train_steps is not None:
            raise ValueError("give --max_train_steps, or --alpha and --pretraining_steps, not both")
        if self.predict_with_generate and importlib.util.find_spec("sacrebleu") is None:
            raise ValueError("--predict_with_generate needs sacrebleu: `pip install sacrebleu`")
        if self.trainable == "lora" and importlib.util.find_spec("peft") is None:
            raise ValueError("--trainable lora needs peft: `pip install peft`")
