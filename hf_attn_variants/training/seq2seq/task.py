"""Fine-tuning of encoder-decoders on pairs of texts, and their evaluation by generation."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel, PreTrainedTokenizerBase

from ...languages import set_languages
from ...model_properties import ignore_saved_length_limits
from ...modeling.fields.variant_config import supports_decoder_cache
from ..engine.dataloaders import prepare_eval_dataloader
from ..engine.finetune import FineTuningTask, run_rows
from ..engine.loop import TrainingLoop
from ..engine.losses import Objective, compute_target_logits, make_label_objective, token_cross_entropy
from ..engine.models import check_end_token, load_or_make_model, load_seq2seq_config
from ..engine.options import check_metric
from ..engine.outputs import progress_bar
from ..engine.settings import is_greater_better
from ..engine.text_rows import TextRows, hash_texts, make_pair_collator
from .data import (
    Seq2SeqSplit,
    apply_recorded_texts,
    check_encoder_decoder,
    check_seq2seq_lengths,
    load_seq2seq_data,
    load_task,
    warn_about_long_texts,
)
from .metrics import TEXT_METRICS
from .settings import Seq2SeqSettings

__all__ = ["Decoded", "Decoder", "GenerationSet", "Seq2SeqEvaluator", "Seq2SeqFineTuning", "get_beam_suffix"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationSet:
    """A tokenized split to evaluate or to predict.

    Attributes:
        split: The rows.
        loader: The batches. The longest rows come first.
        order: The index of the row that comes at each position.
    """

    split: Seq2SeqSplit
    loader: DataLoader
    order: list[int]


@dataclass(frozen=True)
class Decoded:
    """The generated texts of a split.

    Attributes:
        texts: One text per row.
        tokens: The number of generated tokens on all processes, including end tokens and excluding padding.
        seconds: The time in `generate` on the slowest process.
    """

    texts: list[str]
    tokens: int
    seconds: float


class Decoder:
    """Generator of texts for a split, with greedy search or beam search."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        score: Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]],
        settings: Seq2SeqSettings,
    ):
        self.accelerator, self.model, self.tokenizer = accelerator, model, tokenizer
        self.score, self.settings = score, settings

    @torch.no_grad()
    def decode(self, data: GenerationSet, num_beams: int = 1) -> Decoded:
        """Generate one text per row, with beam search if there is more than one beam."""
        accelerator, tokenizer = self.accelerator, self.tokenizer
        model = accelerator.unwrap_model(self.model).eval()
        options: dict[str, Any] = {} if supports_decoder_cache(model.config) else {"use_cache": False}
        if self.settings.no_repeat_ngram_size is not None:
            options["no_repeat_ngram_size"] = self.settings.no_repeat_ngram_size
        if num_beams > 1:
            options["length_penalty"] = self.settings.length_penalty
        texts, tokens, seconds = [], 0, 0.0
        name = f"Decoding {data.split.name}" + (f" with {num_beams} beams" if num_beams > 1 else "")
        for batch in progress_bar(
            accelerator, self.settings.disable_tqdm, iterable=data.loader, desc=name, leave=False
        ):
            start = time.perf_counter()
            with (
                accelerator.autocast(),
                ignore_saved_length_limits(model),
            ):  # `generate` calls the encoder by itself, so the autocast of the prepared model does not cover it
                ids = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=self.settings.max_target_length,
                    num_beams=num_beams,
                    do_sample=False,
                    **options,
                )[:, 1:]  # without the start token of the decoder
            lengths = _count_text_tokens(ids, model.generation_config.eos_token_id)
            seconds += time.perf_counter() - start
            ids = accelerator.pad_across_processes(ids, dim=1, pad_index=tokenizer.pad_token_id)
            # Drop the rows that were repeated to fill the last batch of each process.
            ids, lengths = accelerator.gather_for_metrics((ids, lengths))
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
            tokens += int(lengths.sum())
        slowest = accelerator.gather(torch.tensor([seconds], device=accelerator.device)).max()
        ordered_texts = [text for _, text in sorted(zip(data.order, texts, strict=True))]
        return Decoded(ordered_texts, tokens, float(slowest))

    def decode_and_score(self, data: GenerationSet, num_beams: int) -> tuple[dict[str, float], list[str]]:
        """Decode a split, and compare the texts with the references if there are any.

        Returns:
            The metrics with "decode_tokens", "decode_seconds" and "decode_tokens_per_second", and the texts.
        """
        decoded, references = self.decode(data, num_beams), data.split.references
        values = self.score(decoded.texts, references) if references is not None else {}
        values |= {
            "decode_tokens": decoded.tokens,
            "decode_seconds": round(decoded.seconds, 3),
            "decode_tokens_per_second": round(decoded.tokens / max(decoded.seconds, 1e-9), 1),
        }
        return values, decoded.texts


def _count_text_tokens(ids: Tensor, eos: int | Sequence[int] | None) -> Tensor:
    """Return the number of tokens of each row of `ids` [b, n] up to and including its first end token: [b]."""
    ends = torch.isin(ids, torch.as_tensor([] if eos is None else eos, device=ids.device).view(-1).to(ids.dtype))
    before = ends.cumsum(-1) == 0
    return before.sum(-1) + ends.any(-1)


class Seq2SeqEvaluator:
    """Evaluator of the dev split. It stores the last metrics and texts, so that they are not computed twice."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        data: GenerationSet,
        decoder: Decoder,
        settings: Seq2SeqSettings,
    ):
        self.accelerator, self.model, self.data = accelerator, model, data
        self.decoder, self.settings = decoder, settings
        self.metrics: dict[str, float] = {}
        self.texts: dict[int, list[str]] = {}
        self.seconds = 0.0

    def __call__(self) -> dict[str, float]:
        """Return the metrics during training: "loss" and, unless `eval_loss_only` is set, those of the first beams."""
        self.evaluate(() if self.settings.eval_loss_only else self.settings.num_beams[:1])
        return dict(self.metrics)

    def evaluate(self, beams: Sequence[int], afresh: bool = True) -> None:
        """Compute the loss, and decode with each number of beams.

        `metrics` gets "loss" and the metrics of each number of beams. From the second number on, their names end in
        `_beam<number>`. `texts` gets the texts by number of beams.

        Args:
            beams: The numbers of beams: the first of `num_beams`, or all of them.
            afresh: Whether the weights have changed since the last evaluation. If false, only compute what is missing.
        """
        if afresh:
            self.metrics, self.texts, self.seconds = {}, {}, 0.0
        start = time.perf_counter()
        if "loss" not in self.metrics:
            self.metrics["loss"] = self.compute_loss()
        for i, num_beams in enumerate(beams):
            if num_beams not in self.texts:
                values, self.texts[num_beams] = self.decoder.decode_and_score(self.data, num_beams)
                suffix = get_beam_suffix(i, num_beams)
                self.metrics |= {f"{key}{suffix}": value for key, value in values.items()}
        self.seconds += time.perf_counter() - start

    def compute_loss(self) -> float:
        """Return the mean cross-entropy of the target tokens in nats, without label smoothing."""

        def outputs(batch: dict[str, Tensor]) -> tuple[Tensor]:
            term = token_cross_entropy(compute_target_logits(self.model, batch), batch["labels"])
            return (torch.stack([part.float() for part in term], dim=-1),)  # [b, 2]

        loader, order = self.data.loader, self.data.order
        rows = run_rows(self.accelerator, self.model, loader, order, outputs, "dev loss", self.settings)[0]
        # Sum in the order of the batches, because a sum of floats depends on the order.
        total, tokens = torch.from_numpy(rows[order]).double().sum(0).tolist()
        return total / max(tokens, 1)


def get_beam_suffix(position: int, num_beams: int) -> str:
    """Return the suffix of metric names: empty for the first number of beams, and `_beam<number>` for the others."""
    return f"_beam{num_beams}" if position else ""


class Seq2SeqFineTuning(FineTuningTask[Seq2SeqSettings, Seq2SeqEvaluator]):
    """Fine-tuning on translation, summarization, tables, and GLUE or SQuAD as text.

    The model comes from a checkpoint or, with `model_type`, is trained from scratch. The results contain `eval_loss`
    (nats per target token), `eval_<metric>` and `eval_decode_tokens_per_second`. For further numbers of beams, their
    names end in `_beam<number>`. The results of a test split start with `test_`.

    Example:
        ```python
        settings = Seq2SeqSettings(
            model_name_or_path="t5-gqa4", train_file=("train.csv",), validation_file=("dev.csv",), output_dir="out"
        )
        results = fine_tune(Seq2SeqFineTuning, settings)
        ```
    """

    rows: TextRows

    name = "text to text"

    def __init__(self, settings: Seq2SeqSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config, self.tokenizer = load_seq2seq_config(settings)
        check_encoder_decoder(settings, self.config)
        languages = settings.source_lang, settings.target_lang, settings.forced_bos_token
        self.target_start = set_languages(self.tokenizer, self.config, *languages)
        if self.target_start is not None:
            self.config.decoder_start_token_id = self.target_start.decoder_start_token_id
        check_end_token(settings, self.tokenizer)
        check_seq2seq_lengths(settings, self.config, self.tokenizer)
        texts = apply_recorded_texts(settings)
        self.data = load_task(texts) if settings.task_name is not None else load_seq2seq_data(texts)
        self._choose_splits()
        metrics = () if settings.eval_loss_only else self.data.metric_names
        check_metric(settings.metric_for_best_model, ("loss", *metrics))
        self._check_dev_flags()
        longest_target = settings.max_target_length or settings.max_length  # for the type: it is always set
        for split in self.data.splits.values():
            warn_about_long_texts(split, self.tokenizer, settings.max_length, longest_target)
        self.collate = make_pair_collator(
            self.tokenizer,
            settings.max_length,
            settings.pad_to_multiple_of,
            longest_target,
            self.config.decoder_start_token_id,
        )
        self.rows = TextRows(self.data.splits["train"].pairs() if "train" in self.data.splits else [])
        self.main_metric = "loss" if settings.eval_loss_only else self.data.main_metric
        self.shown_metrics = metrics
        self._warn_about_metric_direction()

    def _choose_splits(self) -> None:
        """Truncate the splits to the maximum numbers of samples, and check that the required splits exist."""
        settings, splits = self.settings, self.data.splits
        limits = {"train": settings.max_train_samples, "dev": settings.max_eval_samples}
        splits.update({name: split.take(limits.get(name)) for name, split in splits.items()})
        if settings.skip_predict:
            splits.pop("test", None)
        if "train" not in splits and not settings.only_evaluates:
            raise ValueError("There is no training split. Add one, or set --num_train_epochs 0 to evaluate only.")
        if settings.only_evaluates and not splits.keys() & {"dev", "test"}:
            raise ValueError("There is neither a dev nor a test split to evaluate. Add one of them.")

    def _check_dev_flags(self) -> None:
        """Check that there is a dev split if a flag needs it."""
        for name in ("metric_for_best_model", "early_stopping_patience", "eval_steps"):
            if getattr(self.settings, name) is not None and "dev" not in self.data.splits:
                raise ValueError(
                    f"--{name} needs a dev split. Set --validation_source_file or --validation_file, or remove it."
                )

    def _warn_about_metric_direction(self) -> None:
        """Warn which weights are the best if the direction of a foreign metric is unknown."""
        settings = self.settings
        metric = (settings.metric_for_best_model or self.main_metric).removeprefix("eval_")
        known_metrics = {"loss", *(name for metric in TEXT_METRICS.values() for name in metric.names)}
        if settings.task_name is not None or metric in known_metrics:
            return
        if settings.keeps_best_weights and settings.greater_is_better is None:
            rises = is_greater_better(metric)
            logger.warning(
                "The best weights are those with the %s %s. If the %s values are better, set --%sgreater_is_better.",
                "highest" if rises else "lowest", metric, "lowest" if rises else "highest", "no-" if rises else "",
            )  # fmt: skip

    def load_model(self) -> PreTrainedModel:
        model = load_or_make_model(self.settings, self.config, AutoModelForSeq2SeqLM)
        if self.target_start is not None:
            self.target_start.apply_to(model)
        return model

    def objective(self) -> Objective:
        return make_label_objective(compute_target_logits, self.settings.label_smoothing_factor)

    def lengths(self) -> list[int]:
        return self.rows.lengths()

    def start_epoch(self, epoch: int) -> None:
        self.rows.start_epoch(epoch)

    def make_evaluator(self, model: nn.Module) -> Seq2SeqEvaluator | None:
        settings, splits = self.settings, self.data.splits
        self.decoder = Decoder(self.accelerator, model, self.tokenizer, self.data.score, settings)
        sets = {name: self._make_generation_set(splits[name]) for name in ("dev", "test") if name in splits}
        self.test = sets.get("test")
        if "dev" not in sets:
            return None
        return Seq2SeqEvaluator(self.accelerator, model, sets["dev"], self.decoder, settings)

    def last_evaluation(self, loop: TrainingLoop, evaluator: Seq2SeqEvaluator) -> None:
        evaluator.evaluate(self.settings.num_beams, afresh=not loop.has_current_scores())

    def fingerprint(self) -> dict[str, Any]:
        return {"training examples": len(self.rows), "hash of the training data": hash_texts(self.rows.texts)}

    def dev_fingerprint(self) -> dict[str, Any]:
        dev = self.data.splits.get("dev")
        rows = []
        if dev is not None and dev.references is not None:
            rows = [(source, *right) for source, right in zip(dev.sources, dev.references, strict=True)]
        # Evaluations in training decode with the first number of beams.
        return {"hash of the dev data": hash_texts(rows), "num_beams": self.settings.num_beams[0]}

    def dev_results(self, evaluator: Seq2SeqEvaluator) -> dict[str, Any]:
        return {"eval_samples": len(evaluator.data.split)}

    def results(self) -> dict[str, Any]:
        return self.data.results

    def predictions(self, evaluator: Seq2SeqEvaluator) -> dict[str, str]:
        return dict([_format_predictions(evaluator.data.split, evaluator.texts)])

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        if self.test is None:
            return {}, {}
        results: dict[str, Any] = {}
        texts = {}
        for i, num_beams in enumerate(self.settings.num_beams):
            metrics, texts[num_beams] = self.decoder.decode_and_score(self.test, num_beams)
            results |= {f"test_{key}{get_beam_suffix(i, num_beams)}": value for key, value in metrics.items()}
        return {**results, "test_samples": len(self.test.split)}, dict([_format_predictions(self.test.split, texts)])

    def summary(self, results: dict[str, Any]) -> str:
        lines = [
            f"{split} ({results[f'{prefix}samples']} rows): {self._format_scores(results, prefix)}\n"
            for prefix, split in (("eval_", "dev"), ("test_", "test"))
            if f"{prefix}samples" in results
        ]
        return "".join(lines)

    def _format_scores(self, results: dict[str, Any], prefix: str) -> str:
        """Return the metrics of a split for the summary."""
        parts = [f"loss {results['eval_loss']:.4f}"] if prefix == "eval_" else []
        for i, num_beams in enumerate(self.settings.num_beams):
            suffix = get_beam_suffix(i, num_beams)
            names = [name for name in self.data.metric_names if f"{prefix}{name}{suffix}" in results]
            values = [f"{name} {results[f'{prefix}{name}{suffix}']:.2f}" for name in names]
            speed = f"{results[f'{prefix}decode_tokens_per_second{suffix}']:.0f} tokens/s"
            parts.append(f"{'greedy' if num_beams == 1 else f'{num_beams} beams'}: {', '.join([*values, speed])}")
        return "; ".join(parts)

    def _make_generation_set(self, split: Seq2SeqSplit) -> GenerationSet:
        """Return a split with its batches."""
        lengths = [len(source) for source in split.sources]
        loader, order = prepare_eval_dataloader(
            self.settings, self.accelerator, TextRows(split.pairs()), lengths, self.collate
        )
        return GenerationSet(split, loader, order)


def _format_predictions(split: Seq2SeqSplit, texts: dict[int, list[str]]) -> tuple[str, str]:
    """Return the name and the content of a JSONL file of predictions.

    Each line has the keys of the row, the source, the references if they are known, and the predictions.
    """
    lines = []
    for row, source in enumerate(split.sources):
        record: dict[str, Any] = {**split.keys[row], "source": source}
        if split.references is not None:
            record["references"] = list(split.references[row])
        for i, (num_beams, predictions) in enumerate(texts.items()):
            record[f"prediction{get_beam_suffix(i, num_beams)}"] = predictions[row]
        lines.append(json.dumps(record, ensure_ascii=False))
    return f"{split.name}.jsonl", "\n".join(lines) + "\n"
