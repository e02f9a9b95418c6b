"""The settings of pretraining: the text, and what each of its ways adds."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ..engine.options import (
    ALWAYS,
    AT_LEAST_1,
    BETWEEN_0_AND_1,
    WITH_BEST_WEIGHTS,
    Settings,
    check_metric,
    option,
    redefault,
)
from ..engine.settings import EncoderDecoderVariantSettings, NewModelSettings, TrainingSettings

__all__ = ["MaskedLMSettings", "PretrainingSettings", "SpanCorruptionSettings", "TextSettings", "check_evaluated"]

METRICS = ("loss", "perplexity", "accuracy")
# nsp, as BERT (arXiv:1810.04805); sop, as ALBERT (arXiv:1909.11942).
SENTENCE_TASKS = ("nsp", "sop")
MASKED_LM_TYPES = ("albert", "bert", "distilbert", "electra", "roberta")
# What a language model learns: masked tokens, or each next token. Those that transformers has a causal class of.
MASKED, CAUSAL = "mlm", "clm"
CAUSAL_LM_TYPES = ("bert", "electra", "roberta")


def check_evaluated(settings: TrainingSettings, why: str = "") -> None:
    """Raise ValueError if a flag is given that means nothing without held-out text."""
    for name in ("metric_for_best_model", "early_stopping_patience", "eval_steps"):
        if getattr(settings, name) is not None:
            raise ValueError(f"--{name} needs --validation_file{why}")


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """Which text, files or a stream, and how it is shuffled."""

    title: ClassVar[str] = "text"

    train_file: tuple[str, ...] | None = option("Text files, .txt or .gz; articles separated by empty lines.", None)
    validation_file: tuple[str, ...] | None = option(
        "Held-out text, of the same kind.", None, resume=WITH_BEST_WEIGHTS
    )
    dataset_name: str | None = option(
        "Folder or Hub id of a `datasets` source, streamed, instead of --train_file.", None
    )
    dataset_config_name: str | None = option("Its configuration.", None)
    text_column: str = option("Its column that holds an article.", "text")
    keep_whitespace: bool = option(
        "Read line ends, tabs and runs of spaces as they are, for a tokenizer that has tokens of them (RoBERTa's) and "
        "text that means something by them, such as code or verse. Without it each is one space.",
        False,
    )
    shuffle_buffer_size: int = option(
        "Blocks that are held in memory and shuffled among themselves.", 4096, range=AT_LEAST_1, resume=ALWAYS
    )


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings(TextSettings, NewModelSettings, TrainingSettings):
    """What all ways of pretraining have."""

    def check(self) -> None:
        super().check()
        given = [name for name in (self.train_file, self.dataset_name) if name is not None]
        if len(given) > 1 or not (given or self.only_evaluates):
            raise ValueError("give --train_file or --dataset_name, one of them")
        if self.max_train_steps is None and not self.only_evaluates:
            raise ValueError("text is a stream without a length: give --max_train_steps (or --num_train_epochs 0)")
        if self.dataloader_num_workers > 1:
            raise ValueError(
                f"--dataloader_num_workers must be 0 or 1 for a stream, got {self.dataloader_num_workers}"
            )
        check_metric(self.metric_for_best_model, METRICS)
        if self.validation_file is None and self.dataset_name is None:
            check_evaluated(self)


@dataclass(frozen=True, kw_only=True)
class MaskingSettings(Settings):
    """How tokens are masked."""

    title: ClassVar[str] = "masking"

    mlm_probability: float = option(
        "Chance of a token to be masked; anew in every epoch.", 0.15, range=BETWEEN_0_AND_1, resume=ALWAYS
    )
    whole_word_mask: bool = option("Mask words instead of tokens.", False, resume=ALWAYS)
    sentence_task: str | None = option(
        "Cut each block in two and learn from the pair as well. nsp, as BERT: does the second segment follow, or is "
        "it of other text? sop, as ALBERT: are the two in order? The model then is a ...ForPreTraining, and "
        "eval_sentence_accuracy says how often it is right (0.5: guessing).",
        None,
        choices=SENTENCE_TASKS,
        resume=ALWAYS,
    )


@dataclass(frozen=True, kw_only=True)
class MaskedLMSettings(MaskingSettings, PretrainingSettings):
    """The settings of masked language modelling and, with the objective "clm", of causal language modelling."""

    title: ClassVar[str] = "objective"

    objective: str = option(
        "mlm: masked tokens, by an encoder. clm: each next token, by a decoder alone (BERT, RoBERTa or ELECTRA, whose "
        "configuration then says is_decoder).",
        MASKED,
        choices=(MASKED, CAUSAL),
    )
    model_type: str | None = redefault(choices=MASKED_LM_TYPES)

    @property
    def is_causal(self) -> bool:
        """Whether each next token is learned, and not masked ones."""
        return self.objective == CAUSAL

    def resume_values(self, with_best_weights: bool) -> dict[str, Any]:
        """Return, as JSON holds them, the settings that a resumed run must share."""
        # The checkpoints of earlier versions, all of masked language modelling, name no objective.
        return super().resume_values(with_best_weights) | {"objective": self.objective if self.is_causal else None}

    def check(self) -> None:
        super().check()
        if not self.is_causal:
            return
        for name in (name for name in MaskingSettings.__annotations__ if name != "title"):
            if getattr(self, name) != getattr(MaskingSettings, name):
                raise ValueError(f"--{name} is for masked tokens; --objective {CAUSAL} masks none")
        if self.model_type not in (None, *CAUSAL_LM_TYPES):
            raise ValueError(
                f"--objective {CAUSAL}: transformers has no causal language model of the --model_type "
                f"{self.model_type}; it has of {', '.join(CAUSAL_LM_TYPES)}"
            )


@dataclass(frozen=True, kw_only=True)
class NoiseSettings(Settings):
    """Which spans are left out."""

    title: ClassVar[str] = "noise"

    noise_density: float = option(
        "Share of tokens that is left out (default: %(default)s).", 0.15, range=BETWEEN_0_AND_1, resume=ALWAYS
    )
    mean_noise_span_length: float = option(
        "Mean length of the spans that are left out, in tokens (default: %(default)s).",
        3.0,
        range=AT_LEAST_1,
        resume=ALWAYS,
    )


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionSettings(NoiseSettings, PretrainingSettings, EncoderDecoderVariantSettings):
    """The settings of span corruption."""

    model_type: str | None = redefault(choices=("t5",))
