"""The settings of uptraining, and the weights of the loss's terms that they ask for."""

import dataclasses
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from ..engine.options import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    BETWEEN_0_AND_1,
    WITH_BEST_WEIGHTS,
    option,
    redefault,
)
from ..engine.settings import SCHEDULES, FineTuningSettings, LanguageSettings
from ..pretraining.settings import NoiseSettings, TextSettings
from ..seq2seq.settings import BleuSettings

__all__ = ["OBJECTIVES", "SPAN_CORRUPTION", "TRAINABLE", "UptrainingSettings", "UptrainingTextSettings"]

SPAN_CORRUPTION = "span_corruption"
OBJECTIVES = ("distill", "mlm", "seq2seq", "embedding", SPAN_CORRUPTION)
# Which parameters can be trained; see `trainable`.
TRAINABLE = ("attention", "all", "lora")
TERM_FLAGS = ("hidden_states_weight", "attention_outputs_weight", "logits_weight")
WARMUP_RATIO = 0.05
# T5's pretraining (arXiv:1910.10683): 512 tokens (section 3.1.2); of the released checkpoints 2^11 sequences a step
# (section 3.7); a rate of 1 / sqrt(max(step, 10^4)), which is this one after their million steps.
T5_LENGTH, T5_SEQUENCES, T5_FLAT_STEPS, T5_LAST_RATE = 512, 2048, 10_000, 1e-3
# What only a stream of text has, and what only rows of text have.
STREAM_FLAGS = (
    "dataset_name",
    "dataset_config_name",
    "keep_whitespace",
    "shuffle_buffer_size",
    "noise_density",
    "mean_noise_span_length",
)
ROW_FLAGS = (
    *("source_file", "validation_source_file", "target_file", "validation_target_file", "source_column"),
    *("target_column", "source_prefix", "max_target_length", "mlm_probability", "predict_with_generate", "tokenize"),
    *("max_train_samples", "group_by_length", "pad_to_multiple_of", "source_lang", "target_lang", "forced_bos_token"),
)


@dataclass(frozen=True, kw_only=True)
class UptrainingTextSettings(BleuSettings):
    """Which texts, and what is made of them."""

    title: ClassVar[str] = "text"

    train_file: tuple[str, ...] | None = option(
        "Text, one example a line (.txt, .gz), or tables (.csv, .tsv, .json, .jsonl); for an encoder-decoder tables "
        "with two columns, unless --source_file is given. With --objective span_corruption a stream of articles that "
        "empty lines separate (.txt, .gz).",
        None,
    )
    validation_file: tuple[str, ...] | None = option(
        "Held-out text of the same kind; see --max_eval_samples.", None, resume=WITH_BEST_WEIGHTS
    )
    text_columns: tuple[str, ...] | None = option(
        "An encoder's table: the column of texts, or two columns of texts to read as pairs; of --dataset_name the "
        "column of articles (default: text).",
        None,
        resume=WITH_BEST_WEIGHTS,
        metavar="COLUMN",
    )
    dataset_name: str | None = redefault(
        help="Folder or Hub id of a `datasets` source, streamed, instead of --train_file (span_corruption).",
        owner=TextSettings,
    )
    dataset_config_name: str | None = redefault(owner=TextSettings)
    keep_whitespace: bool = redefault(owner=TextSettings)
    # What a resumed run must share of a stream, other objectives do not have: see `UptrainingStream.fingerprint`.
    shuffle_buffer_size: int = redefault(
        help="Blocks of a stream that are held in memory and shuffled among themselves.",
        resume=None,
        owner=TextSettings,
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
class UptrainingSettings(UptrainingTextSettings, NoiseSettings, LanguageSettings, FineTuningSettings):
    """What is learned, of whom, and by which parameters.

    What depends on the objective and is not given becomes its default. Those of "span_corruption" are T5's own
    pretraining, which arXiv:2305.13245 uptrains by.
    """

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
        "projections that are merged at the end (default: attention; span_corruption: all).",
        None,
        choices=TRAINABLE,
    )
    lora_rank: int = option("Rank of these updates (default: %(default)s).", 32, range=AT_LEAST_1)
    lora_alpha: float = option(
        "They are scaled by this over their rank (default: %(default)s).", 32.0, range=AT_LEAST_0
    )
    alpha: float | None = option(
        "Train for this share of --pretraining_steps, rounded up (arXiv:2305.13245 takes 0.05).",
        None,
        range=AT_LEAST_0,
    )
    pretraining_steps: int | None = option(
        "Steps that the checkpoint was pretrained for (T5's released ones: 1000000). With span_corruption the rate "
        "goes on from there.",
        None,
        range=AT_LEAST_1,
    )
    total_train_batch_size: int | None = option(
        "Examples of a step on all devices together, instead of --gradient_accumulation_steps (default with "
        f"span_corruption: {T5_SEQUENCES}, T5's).",
        None,
        range=AT_LEAST_1,
    )
    noise_density: float = redefault(resume=None)
    mean_noise_span_length: float = redefault(resume=None)
    max_length: int = redefault(
        None,
        help="Tokens per example, special tokens included; longer ones are cut (default: 64; span_corruption: "
        f"{T5_LENGTH}, of the inputs).",
    )
    optim: str = redefault(
        None, help="Adafactor keeps no moments of whole matrices (default: adamw; span_corruption: adafactor)."
    )
    adafactor_scale_parameter: bool = redefault(
        None,
        help="Steps in proportion to each parameter's root mean square (default: no; span_corruption with Adafactor: "
        "yes, as T5).",
    )
    learning_rate: float = redefault(
        None,
        help="Peak learning rate (default: 0.001); span_corruption with --pretraining_steps N and Adafactor: T5's at "
        f"that step, 1 / sqrt(max(N, {T5_FLAT_STEPS})).",
    )
    lr_scheduler_type: str = redefault(
        None,
        help=f"One of {', '.join(SCHEDULES)} (default: linear; span_corruption: inverse_sqrt, continued from "
        "--pretraining_steps, or constant without them).",
    )
    lr_scheduler_kwargs: dict[str, Any] = redefault(None)  # noqa: RUF009 (None, until it is filled in)
    max_grad_norm: float = redefault(
        None,
        help="Clip the gradient norm to this; 0: never clip (default: 1.0; span_corruption: 0, for Adafactor clips "
        "each update).",
    )
    gradient_accumulation_steps: int = redefault(None)
    num_train_epochs: float | None = redefault(
        None, help="Epochs (0: only evaluate; default: --max_train_steps, or 300 steps)."
    )
    warmup_ratio: float = redefault(
        None,
        help=f"Warm-up steps as a share of all (default: {WARMUP_RATIO}, without --num_warmup_steps; span_corruption: "
        "none).",
    )
    eval_steps: int | None = redefault(help="Evaluate every N optimiser steps (default: five times in the run).")

    @property
    def is_stream(self) -> bool:
        """Whether the text is a stream of unknown length, packed into blocks, and not rows."""
        return self.objective == SPAN_CORRUPTION

    @property
    def alpha_steps(self) -> int | None:
        """The steps that `alpha` asks for, rounded up; None without it."""
        if self.alpha is None or self.pretraining_steps is None:
            return None
        return math.ceil(Fraction(str(self.alpha)) * self.pretraining_steps)

    def __post_init__(self) -> None:
        if self.total_train_batch_size is not None and self.gradient_accumulation_steps not in (None, 1):
            raise ValueError("give --total_train_batch_size or --gradient_accumulation_steps, not both")
        defaults = self._t5_defaults() if self.is_stream else self._defaults()
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()

    def _defaults(self) -> dict[str, Any]:
        takes_none = self.lr_scheduler_type == "constant" or self.adafactor_relative_step
        has_none = takes_none or self.num_warmup_steps is not None
        return {
            "max_length": 64,
            "trainable": "attention",
            "optim": "adamw",
            "adafactor_scale_parameter": False,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "linear",
            "lr_scheduler_kwargs": {},
            "max_grad_norm": 1.0,
            "warmup_ratio": 0.0 if has_none else WARMUP_RATIO,
            "gradient_accumulation_steps": 1,
        }

    def _t5_defaults(self) -> dict[str, Any]:
        is_adafactor = self.optim in (None, "adafactor")
        # transformers' schedule falls as 1 / sqrt(timescale + step): T5's, at the step where pretraining ended. One
        # that ended within the steps of a constant rate counts as if it had just left them.
        timescale = None if self.pretraining_steps is None else max(self.pretraining_steps, T5_FLAT_STEPS)
        has_warmup = bool(self.num_warmup_steps or self.warmup_ratio)
        schedule = self.lr_scheduler_type or ("inverse_sqrt" if timescale else "constant")
        if self.lr_scheduler_type is None and has_warmup and not timescale:
            schedule = "constant_with_warmup"
        goes_on = timescale and schedule == "inverse_sqrt" and not self.adafactor_relative_step
        return {
            "total_train_batch_size": T5_SEQUENCES if self.gradient_accumulation_steps is None else None,
            "max_length": T5_LENGTH,
            "trainable": "all",
            "optim": "adafactor",
            "adafactor_scale_parameter": is_adafactor,
            "learning_rate": timescale**-0.5 if timescale and is_adafactor else T5_LAST_RATE,
            "lr_scheduler_type": schedule,
            "lr_scheduler_kwargs": {"timescale": timescale} if goes_on else {},
            "max_grad_norm": 0.0 if is_adafactor else 1.0,
            "warmup_ratio": 0.0,
            "gradient_accumulation_steps": 1,
        }

    def check(self) -> None:
        super().check()
        if self.teacher is None:
            needing = [f"--objective {self.objective}"] if self.objective in ("distill", "embedding") else []
            needing += [f"--{name}" for name in TERM_FLAGS if getattr(self, name)]
            if needing:
                raise ValueError(f"{needing[0]} needs --teacher")
            if self.teacher_max_length is not None:
                raise ValueError("--teacher_max_length is of a --teacher; there is none")
        self._check_length()
        if self.is_stream:
            self._check_stream()
        else:
            self._refuse(STREAM_FLAGS, f"is for --objective {SPAN_CORRUPTION}, which reads a stream of text")
        if self.predict_with_generate and importlib.util.find_spec("sacrebleu") is None:
            raise ValueError("--predict_with_generate needs sacrebleu: `pip install sacrebleu`")
        if self.trainable == "lora" and importlib.util.find_spec("peft") is None:
            raise ValueError("--trainable lora needs peft: `pip install peft`")

    def _check_length(self) -> None:
        if self.alpha is None:
            # There the schedule goes on from them, however long the run is.
            if self.pretraining_steps is not None and not self.is_stream:
                raise ValueError("--alpha and --pretraining_steps belong together: give both or neither")
            return
        if self.pretraining_steps is None:
            raise ValueError("--alpha and --pretraining_steps belong together: --alpha is a share of those steps")
        for name in ("max_train_steps", "num_train_epochs"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"--alpha {self.alpha} of --pretraining_steps {self.pretraining_steps} makes {self.alpha_steps} "
                    f"steps, and --{name} {value} says how long the run is as well: give one of them, not both"
                )

    def _check_stream(self) -> None:
        self._refuse(ROW_FLAGS, f"is for rows of text; --objective {self.objective} reads a stream of it")
        if (self.train_file is None) == (self.dataset_name is None):
            raise ValueError(f"--objective {self.objective} needs --train_file or --dataset_name, one of them")
        if self.train_file is not None and self.validation_file is None:
            raise ValueError(
                f"--objective {self.objective} needs --validation_file: of a stream of text no rows are held out"
            )
        if self.alpha is None and self.max_train_steps is None and self.num_train_epochs != 0:
            raise ValueError(
                "text is a stream without a length: give --alpha and --pretraining_steps, or --max_train_steps (or "
                "--num_train_epochs 0)"
            )
        if self.text_columns is not None and (self.dataset_name is None or len(self.text_columns) > 1):
            raise ValueError(f"--objective {self.objective}: --text_columns names the one column of --dataset_name")
        if self.dataloader_num_workers > 1:
            raise ValueError(
                f"--dataloader_num_workers must be 0 or 1 for a stream, got {self.dataloader_num_workers}"
            )

    def _refuse(self, names: Sequence[str], why: str) -> None:
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"--{name} {why}")
