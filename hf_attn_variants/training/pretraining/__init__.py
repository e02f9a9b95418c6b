"""Settings of pretraining: the text, the masking, and the options of each objective."""

from dataclasses import dataclass
from typing import ClassVar

from ..engine.settings import (
    ALWAYS,
    AT_LEAST_1,
    BETWEEN_0_AND_1,
    WITH_BEST_WEIGHTS,
    EncoderDecoderVariantSettings,
    NewModelSettings,
    Settings,
    TrainingSettings,
    check_dev_settings,
    check_metric,
    option,
    override_option,
)

PRETRAINING_METRICS = ("loss", "perplexity", "accuracy")
# nsp is the task of BERT (arXiv 1810.04805), and sop the task of ALBERT (arXiv 1909.11942).
SENTENCE_TASKS = ("nsp", "sop")
MASKED_LM_TYPES = ("albert", "bert", "distilbert", "electra", "roberta")
# The objectives: masked tokens, or the next token. The latter needs a causal class in Transformers.
MASKED, CAUSAL = "mlm", "clm"
CAUSAL_LM_TYPES = ("bert", "electra", "roberta")


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """The text, from files or from a streamed dataset, and its shuffling."""

    title: ClassVar[str] = "text"

    train_file: tuple[str, ...] | None = option(
        "Text files (.txt or .gz) for training. Empty lines separate articles.", None
    )
    validation_file: tuple[str, ...] | None = option(
        "Text files for the evaluation, in the same format.", None, resume=WITH_BEST_WEIGHTS
    )
    dataset_name: str | None = option(
        "Folder or Hub id of a `datasets` source that is streamed, instead of --train_file.", None
    )
    dataset_config_name: str | None = option("Configuration of the `datasets` source.", None)
    text_column: str = option("Column of the `datasets` source with the articles.", "text")
    keep_whitespace: bool = option(
        "Keep line ends, tabs and runs of spaces. Use it if they have a meaning, as in code or verse, and if the "
        "tokenizer has tokens for them, as that of RoBERTa. Otherwise, each run becomes one space.",
        False,
    )
    shuffle_buffer_size: int = option(
        "Number of blocks that are held in memory and shuffled.", 4096, range=AT_LEAST_1, resume=ALWAYS
    )


def check_stream_workers(settings: TrainingSettings) -> None:
    """Raise ValueError if several workers would each yield the whole text stream."""
    if settings.dataloader_num_workers > 1:
        raise ValueError(
            f"--dataloader_num_workers must be 0 or 1 for a text stream, got {settings.dataloader_num_workers}."
        )


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings(TextSettings, NewModelSettings, TrainingSettings):
    """Settings of all pretraining objectives."""

    def check(self) -> None:
        """Check the settings, in addition to the checks of all training commands."""
        super().check()
        sources = [name for name in (self.train_file, self.dataset_name) if name is not None]
        if len(sources) > 1 or not (sources or self.only_evaluates):
            raise ValueError("Set either --train_file or --dataset_name.")
        if self.max_train_steps is None and not self.only_evaluates:
            raise ValueError("--max_train_steps must be set, because a text stream has no length.")
        check_stream_workers(self)
        check_metric(self.metric_for_best_model, PRETRAINING_METRICS)
        if self.validation_file is None and self.dataset_name is None:
            check_dev_settings(self, False)


@dataclass(frozen=True, kw_only=True)
class MaskingSettings(Settings):
    """The masking of tokens, and the sentence task."""

    title: ClassVar[str] = "masking"

    mlm_probability: float = option(
        "Probability that a token is masked. Every epoch masks other tokens.",
        0.15,
        range=BETWEEN_0_AND_1,
        resume=ALWAYS,
    )
    whole_word_mask: bool = option("Mask whole words instead of tokens.", False, resume=ALWAYS)
    sentence_task: str | None = option(
        "Split each block into two segments, and also learn a task about the pair. nsp, as in BERT: does the second "
        "segment follow the first one? sop, as in ALBERT: are the segments in the correct order? The model is then a "
        "...ForPreTraining, and eval_sentence_accuracy is its accuracy on pairs (0.5: guessing).",
        None,
        choices=SENTENCE_TASKS,
        resume=ALWAYS,
    )


@dataclass(frozen=True, kw_only=True)
class MaskedLMSettings(MaskingSettings, PretrainingSettings):
    """Settings of masked language modeling and, with the objective "clm", of causal language modeling.

    Example:
        ```python
        settings = MaskedLMSettings(
            model_type="bert", tokenizer_name="bert-base-uncased", train_file=("text.txt",), max_train_steps=1000,
            output_dir="out",
        )
        results = pretrain_masked_lm(settings)
        ```
    """

    title: ClassVar[str] = "objective"

    objective: str = option(
        "mlm: an encoder learns masked tokens. clm: a decoder (BERT, RoBERTa or ELECTRA with is_decoder in its "
        "configuration) learns the next token.",
        MASKED,
        choices=(MASKED, CAUSAL),
        resume=ALWAYS,
    )
    model_type: str | None = override_option(choices=MASKED_LM_TYPES)

    @property
    def is_causal(self) -> bool:
        """Whether the objective is the next token instead of masked tokens."""
        return self.objective == CAUSAL

    def check(self) -> None:
        """Check the settings, in addition to the checks of all pretraining objectives."""
        super().check()
        if self.is_causal and self.model_type not in (None, *CAUSAL_LM_TYPES):
            raise ValueError(
                f"--model_type must be one of {', '.join(CAUSAL_LM_TYPES)} with --objective {CAUSAL}, got "
                f"{self.model_type}."
            )


@dataclass(frozen=True, kw_only=True)
class NoiseSettings(Settings):
    """The spans that are removed from the text."""

    title: ClassVar[str] = "noise"

    noise_density: float = option(
        "Share of the tokens that is removed (default: %(default)s).", 0.15, range=BETWEEN_0_AND_1, resume=ALWAYS
    )
    mean_noise_span_length: float = option(
        "Mean length of the removed spans in tokens (default: %(default)s).",
        3.0,
        range=AT_LEAST_1,
        resume=ALWAYS,
    )


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionSettings(NoiseSettings, PretrainingSettings, EncoderDecoderVariantSettings):
    """Settings of span corruption.

    Example:
        ```python
        settings = SpanCorruptionSettings(
            model_name_or_path="t5-gqa4", train_file=("text.txt",), max_train_steps=1000, output_dir="out"
        )
        results = pretrain_span_corruption(settings)
        ```
    """

    model_type: str | None = override_option(choices=("t5",))
