"""Settings for uptraining, which continues the training of a converted checkpoint."""

import importlib.util
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from ..engine.settings import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    BETWEEN_0_AND_1,
    SCHEDULES,
    FineTuningSettings,
    LanguageSettings,
    dev_option,
    option,
    override_option,
)
from ..pretraining import SpanNoiseSettings, TextSettings, check_stream_workers
from ..seq2seq import BleuSettings

SPAN_CORRUPTION = "span_corruption"
OBJECTIVES = ("distill", "mlm", "seq2seq", "embedding", SPAN_CORRUPTION)
# The valid values of `trainable`.
TRAINABLE = ("attention", "all", "lora")
TERM_FLAGS = ("hidden_states_weight", "attention_outputs_weight", "logits_weight")
WARMUP_RATIO = 0.05
# T5 was pretrained (arXiv 1910.10683) with 512 tokens per sequence (section 3.1.2), 2^11 sequences per step for the
# released checkpoints (section 3.7), and a learning rate of 1 / sqrt(max(step, 10^4)), which is 1e-3 after one million
# steps.
T5_LENGTH, T5_SEQUENCES, T5_FLAT_STEPS, T5_LAST_RATE = 512, 2048, 10_000, 1e-3


@dataclass(frozen=True, kw_only=True)
class UptrainingTextSettings(BleuSettings):
    """Settings for reading and preparing the texts."""

    title: ClassVar[str] = "text"

    train_file: tuple[str, ...] | None = option(
        "Text files with one example per line (.txt, .gz), or tables (.csv, .tsv, .json, .jsonl). Tables for an "
        "encoder-decoder have two columns, unless --source_file is set. With --objective span_corruption, text files "
        "in which empty lines separate articles.",
        None,
    )
    validation_file: tuple[str, ...] | None = dev_option(
        "Held-out text in the same format (see --max_eval_samples).", None
    )
    text_columns: tuple[str, ...] | None = dev_option(
        "For encoders, the column of a table that contains the texts, or two columns for pairs. With --dataset_name, "
        "the column that contains the articles (default: text).",
        None,
        metavar="COLUMN",
    )
    dataset_name: str | None = override_option(
        help="Folder or Hub id of a `datasets` source to stream instead of --train_file (span_corruption).",
        owner=TextSettings,
    )
    dataset_config_name: str | None = override_option(owner=TextSettings)
    keep_whitespace: bool = override_option(owner=TextSettings)
    # `resume` is None because `UptrainingStream.get_fingerprint` checks this value if the run reads a stream.
    shuffle_buffer_size: int = override_option(
        help="Number of blocks of a stream to hold in memory and shuffle.",
        resume=None,
        owner=TextSettings,
    )
    source_file: str | None = option("File with the source texts, one per line (.txt, .gz).", None)
    validation_source_file: str | None = dev_option("File with the held-out source texts, in the same format.", None)
    source_column: str = dev_option(
        "For encoder-decoders, the column of a table that contains the source texts (default: %(default)s).", "source"
    )
    target_file: str | None = option("File with the target texts, one per line (.txt, .gz).", None)
    validation_target_file: str | None = dev_option("File with the held-out target texts, in the same format.", None)
    target_column: str = dev_option(
        "For encoder-decoders, the column of a table that contains the target texts (default: %(default)s).", "target"
    )
    source_prefix: str = option("Text to prepend to each source.", "")
    max_target_length: int | None = option(
        "Maximum length of a target in tokens (default: --max_length).", None, range=AT_LEAST_1
    )
    mlm_probability: float = option(
        "Probability that a token is masked. Different tokens are masked in each epoch.", 0.15, range=BETWEEN_0_AND_1
    )
    predict_with_generate: bool = option(
        "Generate texts with greedy search in every evaluation, and compute BLEU with SacreBLEU.", False
    )

    @property
    def text_column(self) -> str:
        """The column of a `datasets` source that contains the articles."""
        return self.text_columns[0] if self.text_columns else TextSettings.text_column


@dataclass(frozen=True, kw_only=True)
class UptrainingSettings(UptrainingTextSettings, SpanNoiseSettings, LanguageSettings, FineTuningSettings):
    """Settings for uptraining, such as the objective, the teacher and the trainable parameters.

    Some defaults depend on the objective. The defaults for "span_corruption" are those of T5's pretraining, as in
    arXiv 2305.13245.

    Example:
        ```python
        settings = UptrainingSettings(
            model_name_or_path="bert-gqa4", objective="mlm", train_file=("text.txt",), output_dir="out"
        )
        results = fine_tune(Uptraining, settings)
        ```
    """

    title: ClassVar[str] = "objective"

    objective: str = option("Training objective, as described below.", choices=OBJECTIVES)
    teacher: str | None = option(
        "Folder or Hub id of the model whose outputs are reproduced, usually the original model before conversion.",
        None,
    )
    multi_head_model: str | None = option(
        "Folder or Hub id of the model from which the checkpoint was converted with mean pooling. All its key and "
        "value heads are trained, and one learned weight per head combines them into the fewer heads of the "
        "checkpoint (WGQA, arXiv 2407.10855). The heads are merged at the end.",
        None,
    )
    teacher_max_length: int | None = option(
        "For encoders, split longer texts into pieces of this many tokens for the teacher. Use this if the teacher "
        "has fewer positions or works better on shorter texts (default: texts are not split).",
        None,
        range=AT_LEAST_1,
    )
    hidden_states_weight: float | None = option(
        "Weight of the error in each layer's output, relative to the output's variance (default with a teacher: 1; "
        "with --objective embedding: 0).",
        None,
        range=AT_LEAST_0,
    )
    attention_outputs_weight: float | None = option(
        "Weight of the error in each attention module's output (default: same as --hidden_states_weight).",
        None,
        range=AT_LEAST_0,
    )
    logits_weight: float | None = option(
        "Weight of the divergence between the output distributions, in nats (default with a teacher: 1 for mlm, for "
        "seq2seq and for encoder-decoders, otherwise 0).",
        None,
        range=AT_LEAST_0,
    )
    temperature: float = option("Temperature by which the logits are divided for --logits_weight.", 1.0, range=ABOVE_0)
    trainable: str = option(
        "Parameters to train, which are those of the attention modules, all parameters, or low-rank updates of the "
        "attention projections that are merged at the end (default: attention; span_corruption: all).",
        None,
        choices=TRAINABLE,
    )
    lora_rank: int = option("Rank of the low-rank updates (default: %(default)s).", 32, range=AT_LEAST_1)
    lora_alpha: float = option(
        "Scaling parameter for the low-rank updates, which is divided by their rank (default: %(default)s).",
        32.0,
        range=AT_LEAST_0,
    )
    alpha: float | None = option(
        "Share of --pretraining_steps to train for, rounded up (arXiv 2305.13245 uses 0.05).",
        None,
        range=AT_LEAST_0,
    )
    pretraining_steps: int | None = option(
        "Number of steps that the checkpoint was pretrained for (released T5 checkpoints: 1000000). With "
        "span_corruption, the learning rate continues from there.",
        None,
        range=AT_LEAST_1,
    )
    total_train_batch_size: int | None = option(
        "Number of examples per step on all devices, as an alternative to --gradient_accumulation_steps (default with "
        f"span_corruption: {T5_SEQUENCES}, as for T5).",
        None,
        range=AT_LEAST_1,
    )
    noise_density: float = override_option(resume=None)
    mean_noise_span_length: float = override_option(resume=None)
    max_length: int = override_option(
        None,
        help="Maximum length of an example in tokens, including special tokens. Longer examples are truncated "
        f"(default: 64; span_corruption: {T5_LENGTH} input tokens).",
    )
    optim: str = override_option(
        None,
        help="Optimizer to use. Adafactor does not store moments of whole matrices (default: adamw; "
        "span_corruption: adafactor).",
    )
    adafactor_scale_parameter: bool = override_option(
        None,
        help="Scale the steps by the root mean square of each parameter (default: no; span_corruption with Adafactor: "
        "yes, as for T5).",
    )
    learning_rate: float = override_option(
        None,
        help="Peak learning rate (default: 0.001). With span_corruption, --pretraining_steps N and Adafactor, it is "
        f"T5's rate at this step, 1 / sqrt(max(N, {T5_FLAT_STEPS})).",
    )
    lr_scheduler_type: str = override_option(
        None,
        help=f"One of {', '.join(SCHEDULES)} (default: linear; span_corruption: inverse_sqrt, continued from "
        "--pretraining_steps, or constant without it).",
    )
    lr_scheduler_kwargs: dict[str, Any] = override_option(None)  # noqa: RUF009 (None, until it is filled in)
    max_grad_norm: float = override_option(
        None,
        help="Maximum gradient norm; 0 disables clipping (default: 1.0; span_corruption: 0, because Adafactor clips "
        "each update).",
    )
    gradient_accumulation_steps: int = override_option(None)
    num_train_epochs: float | None = override_option(
        None, help="Number of training epochs (0: only evaluate; default: --max_train_steps, or 300 steps)."
    )
    warmup_ratio: float = override_option(
        None,
        help=f"Share of all steps that is used for warm-up (default: {WARMUP_RATIO} without --num_warmup_steps; "
        "span_corruption: no warm-up).",
    )
    eval_steps: int | None = override_option(help="Evaluate every N optimizer steps (default: five times per run).")

    @property
    def is_stream(self) -> bool:
        """True if the text is a stream that is split into blocks, and False if it consists of rows."""
        return self.objective == SPAN_CORRUPTION

    @property
    def alpha_steps(self) -> int | None:
        """The product of `alpha` and `pretraining_steps`, rounded up, or None if one of them is not set."""
        if self.alpha is None or self.pretraining_steps is None:
            return None
        return math.ceil(Fraction(str(self.alpha)) * self.pretraining_steps)

    def __post_init__(self) -> None:
        """Set the defaults for the objective, and check the settings."""
        if self.total_train_batch_size is not None and self.gradient_accumulation_steps not in (None, 1):
            raise ValueError("Set either --total_train_batch_size or --gradient_accumulation_steps, but not both.")
        defaults = self._get_t5_defaults() if self.is_stream else self._get_standard_defaults()
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()

    def _get_standard_defaults(self) -> dict[str, Any]:
        """Return the defaults for all objectives except span corruption."""
        has_no_warmup = self.lr_scheduler_type == "constant" or self.adafactor_relative_step
        warmup_is_set = has_no_warmup or self.num_warmup_steps is not None
        return {
            "max_length": 64,
            "trainable": "attention",
            "optim": "adamw",
            "adafactor_scale_parameter": False,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "linear",
            "lr_scheduler_kwargs": {},
            "max_grad_norm": 1.0,
            "warmup_ratio": 0.0 if warmup_is_set else WARMUP_RATIO,
            "gradient_accumulation_steps": 1,
        }

    def _get_t5_defaults(self) -> dict[str, Any]:
        """Return the defaults for span corruption, which continue T5's pretraining."""
        is_adafactor = self.optim in (None, "adafactor")
        # The inverse_sqrt schedule in Transformers decreases with 1 / sqrt(timescale + step), which continues T5's
        # schedule. If pretraining ended within T5's first 10,000 steps, in which the rate is constant, the schedule
        # starts at the end of these steps.
        timescale = None if self.pretraining_steps is None else max(self.pretraining_steps, T5_FLAT_STEPS)
        has_warmup = bool(self.num_warmup_steps or self.warmup_ratio)
        schedule = self.lr_scheduler_type or ("inverse_sqrt" if timescale else "constant")
        if self.lr_scheduler_type is None and has_warmup and not timescale:
            schedule = "constant_with_warmup"
        continues = timescale and schedule == "inverse_sqrt" and not self.adafactor_relative_step
        return {
            "total_train_batch_size": T5_SEQUENCES if self.gradient_accumulation_steps is None else None,
            "max_length": T5_LENGTH,
            "trainable": "all",
            "optim": "adafactor",
            "adafactor_scale_parameter": is_adafactor,
            "learning_rate": timescale**-0.5 if timescale and is_adafactor else T5_LAST_RATE,
            "lr_scheduler_type": schedule,
            "lr_scheduler_kwargs": {"timescale": timescale} if continues else {},
            "max_grad_norm": 0.0 if is_adafactor else 1.0,
            "warmup_ratio": 0.0,
            "gradient_accumulation_steps": 1,
        }

    def check(self) -> None:
        """Check the settings, including those that are specific to uptraining."""
        super().check()
        if self.teacher is None:
            flags = [f"--objective {self.objective}"] if self.objective in ("distill", "embedding") else []
            flags += [f"--{name}" for name in TERM_FLAGS if getattr(self, name)]
            if flags:
                raise ValueError(f"{flags[0]} requires --teacher. Set it to the original model.")
        self._check_num_steps()
        if self.is_stream:
            self._check_stream()
        if self.predict_with_generate and importlib.util.find_spec("sacrebleu") is None:
            raise ValueError("--predict_with_generate requires sacrebleu. Run `pip install sacrebleu`.")
        if self.trainable == "lora" and importlib.util.find_spec("peft") is None:
            raise ValueError("--trainable lora requires peft. Run `pip install peft`.")
        if self.trainable == "lora" and self.multi_head_model is not None:
            raise ValueError(
                "--multi_head_model must not be combined with --trainable lora, which does not train the heads. Use "
                "--trainable attention or all."
            )

    def _check_num_steps(self) -> None:
        """Check the settings that determine the number of steps."""
        if self.alpha is None:
            # --pretraining_steps may be set without --alpha because the schedule for streams continues from there.
            return
        if self.pretraining_steps is None:
            raise ValueError("--alpha requires --pretraining_steps. Set both or neither.")
        if self.max_train_steps is not None or self.num_train_epochs is not None:
            raise ValueError(
                f"--alpha {self.alpha} of --pretraining_steps {self.pretraining_steps} sets {self.alpha_steps} steps. "
                "Remove --alpha, or --max_train_steps and --num_train_epochs."
            )

    def _check_stream(self) -> None:
        """Check the settings for a text stream."""
        if (self.train_file is None) == (self.dataset_name is None):
            raise ValueError(f"Set either --train_file or --dataset_name for --objective {self.objective}.")
        if self.train_file is not None and self.validation_file is None:
            raise ValueError(
                f"--objective {self.objective} requires --validation_file because no text is held out from a stream."
            )
        if self.alpha is None and self.max_train_steps is None and self.num_train_epochs != 0:
            raise ValueError(
                "--max_train_steps, or --alpha and --pretraining_steps, must be set because the length of a text "
                "stream is unknown."
            )
        check_stream_workers(self)
