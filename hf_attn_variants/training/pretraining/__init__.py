"""Settings for pretraining, such as the text, the masking and the options for each objective."""

from dataclasses import dataclass
from typing import ClassVar

from ..engine.settings import (
    AT_LEAST_1,
    BETWEEN_0_AND_1,
    EncoderDecoderVariantSettings,
    NewModelSettings,
    Settings,
    TrainingSettings,
    check_dev_settings,
    check_metric_for_best_model,
    dev_option,
    fixed_option,
    option,
    override_option,
)

PRETRAINING_METRICS = ("loss", "perplexity", "accuracy")
# Next sentence prediction is used in BERT (arXiv 1810.04805), and sentence order prediction in ALBERT (arXiv
# 1909.11942).
SENTENCE_TASKS = ("nsp", "sop")
MASKED_LM_TYPES = ("albert", "bert", "distilbert", "electra", "eurobert", "modernbert", "nomic_bert", "roberta")
# The objectives predict masked tokens or the next token. The causal objective requires a causal class in Transformers.
MASKED, CAUSAL = "mlm", "clm"
CAUSAL_LM_TYPES = ("bert", "electra", "roberta")


@dataclass(frozen=True, kw_only=True)
class TextSettings(Settings):
    """Settings for reading and shuffling the text, which comes from files or from a streamed dataset."""

    title: ClassVar[str] = "text"

    train_file: tuple[str, ...] | None = option(
        "Text files (.txt or .gz) for training. Empty lines separate articles.", None
    )
    validation_file: tuple[str, ...] | None = dev_option("Text files for evaluation, in the same format.", None)
    dataset_name: str | None = option(
        "Folder or Hub id of a `datasets` source to stream instead of --train_file.", None
    )
    dataset_config_name: str | None = option("Configuration of the `datasets` source.", None)
    text_column: str = option("Column of the `datasets` source that contains the articles.", "text")
    keep_whitespace: bool = option(
        "Keep line ends, tabs and runs of spaces. Use this if whitespace is meaningful, as in code or verse, and if "
        "the tokenizer has tokens for it, like RoBERTa's. Otherwise, each run becomes a single space.",
        False,
    )
    shuffle_buffer_size: int = fixed_option("Number of blocks to hold in memory and shuffle.", 4096, range=AT_LEAST_1)


def check_stream_workers(settings: TrainingSettings) -> None:
    """Check that there is at most one dataloader worker, because each worker would yield the whole text stream."""
    if settings.dataloader_num_workers > 1:
        raise ValueError(
            f"--dataloader_num_workers must be 0 or 1 for a text stream, got {settings.dataloader_num_workers}."
        )


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings(TextSettings, NewModelSettings, TrainingSettings):
    """Settings shared by all pretraining objectives."""

    def check(self) -> None:
        """Check the settings, including those that are specific to pretraining."""
        super().check()
        sources = [name for name in (self.train_file, self.dataset_name) if name is not None]
        if len(sources) > 1 or not (sources or self.only_evaluates):
            raise ValueError("Set either --train_file or --dataset_name.")
        if self.max_train_steps is None and not self.only_evaluates:
            raise ValueError("--max_train_steps is required because the length of a text stream is unknown.")
        check_stream_workers(self)
        check_metric_for_best_model(self.metric_for_best_model, PRETRAINING_METRICS)
        if self.validation_file is None and self.dataset_name is None:
            check_dev_settings(self, False)


@dataclass(frozen=True, kw_only=True)
class MaskingSettings(Settings):
    """Settings for masking tokens and for the sentence task."""

    title: ClassVar[str] = "masking"

    mlm_probability: float = fixed_option(
        "Probability that a token is masked. Different tokens are masked in each epoch.", 0.15, range=BETWEEN_0_AND_1
    )
    whole_word_mask: bool = fixed_option("Mask whole words instead of tokens.", False)
    sentence_task: str | None = fixed_option(
        "Split each block into two segments, and also learn to predict whether the second segment follows the first "
        "one (nsp, as in BERT) or whether the segments are in the correct order (sop, as in ALBERT). The model then "
        "has a ...ForPreTraining class, and eval_sentence_accuracy is its accuracy on pairs (0.5 for guessing).",
        None,
        choices=SENTENCE_TASKS,
    )


@dataclass(frozen=True, kw_only=True)
class MaskedLMSettings(MaskingSettings, PretrainingSettings):
    """Settings for masked language modeling or, with the objective "clm", for causal language modeling.

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

    objective: str = fixed_option(
        "Training objective. With mlm, an encoder learns to predict masked tokens. With clm, a decoder (BERT, RoBERTa "
        "or ELECTRA with is_decoder in its configuration) learns to predict the next token.",
        MASKED,
        choices=(MASKED, CAUSAL),
    )
    model_type: str | None = override_option(choices=MASKED_LM_TYPES)

    @property
    def is_causal(self) -> bool:
        """True if the model predicts the next token instead of masked tokens."""
        return self.objective == CAUSAL


@dataclass(frozen=True, kw_only=True)
class SpanNoiseSettings(Settings):
    """Settings for the spans that are removed from the text."""

    title: ClassVar[str] = "noise"

    noise_density: float = fixed_option(
        "Share of tokens to remove (default: %(default)s).", 0.15, range=BETWEEN_0_AND_1
    )
    mean_noise_span_length: float = fixed_option(
        "Mean length of the removed spans in tokens (default: %(default)s).", 3.0, range=AT_LEAST_1
    )


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionSettings(SpanNoiseSettings, PretrainingSettings, EncoderDecoderVariantSettings):
    """Settings for pretraining a T5 model with span corruption.

    Example:
        ```python
        settings = SpanCorruptionSettings(
            model_name_or_path="t5-gqa4", train_file=("text.txt",), max_train_steps=1000, output_dir="out"
        )
        results = pretrain_span_corruption(settings)
        ```
    """

    model_type: str | None = override_option(choices=("t5",))
