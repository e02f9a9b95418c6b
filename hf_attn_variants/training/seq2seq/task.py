"""Training on text to text: its rows, its encoder-decoder, its decoding and its metrics."""

import json
import logging
from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from ...languages import set_languages
from ..engine.dataloaders import prepare_eval_dataloader
from ..engine.finetune import FineTuningTask
from ..engine.loop import TrainingLoop
from ..engine.loop_settings import greater_is_better
from ..engine.losses import Objective, label_objective, target_logits
from ..engine.new_model import check_end_token, load_or_make_model, load_seq2seq_config
from ..engine.options import check_metric
from ..engine.text_rows import TextRows, hash_texts, pair_collator
from .data import (
    Seq2SeqSplit,
    check_encoder_decoder,
    check_seq2seq_lengths,
    load_seq2seq_data,
    warn_of_long_texts,
    with_recorded_texts,
)
from .evaluation import Decoder, GenerationSet, Seq2SeqEvaluator, beam_suffix
from .metrics import TEXT_METRICS
from .settings import Seq2SeqSettings
from .worded_tasks import load_task

__all__ = ["Seq2SeqFineTuning"]

logger = logging.getLogger(__name__)


class Seq2SeqFineTuning(FineTuningTask[Seq2SeqSettings, Seq2SeqEvaluator]):
    """Translation, summaries, GLUE and SQuAD as text; from a checkpoint or, with `model_type`, from scratch.

    The results have `eval_loss` (nats a target token), `eval_<metric>` and `eval_decode_tokens_per_second`, the same
    with the suffix `_beam<number>` for further numbers of beams, and as `test_<metric>` for a test split.
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
        texts = with_recorded_texts(settings)
        self.data = load_task(texts) if settings.task_name is not None else load_seq2seq_data(texts)
        self._choose_splits()
        metrics = () if settings.eval_loss_only else self.data.metric_names
        check_metric(settings.metric_for_best_model, ("loss", *metrics))
        self._check_dev_flags()
        longest_target = settings.max_target_length or settings.max_length  # the first is given by now
        for split in self.data.splits.values():
            warn_of_long_texts(split, self.tokenizer, settings.max_length, longest_target)
        self.collate = pair_collator(
            self.tokenizer,
            settings.max_length,
            settings.pad_to_multiple_of,
            longest_target,
            self.config.decoder_start_token_id,
        )
        self.rows = TextRows(self.data.splits["train"].pairs() if "train" in self.data.splits else [])
        self.main_metric = "loss" if settings.eval_loss_only else self.data.main_metric
        self.shown_metrics = metrics
        self._warn_of_direction()

    def _choose_splits(self) -> None:
        settings, splits = self.settings, self.data.splits
        limits = {"train": settings.max_train_samples, "dev": settings.max_eval_samples}
        splits.update({name: split.first(limits.get(name)) for name, split in splits.items()})
        if settings.skip_predict:
            splits.pop("test", None)
        if "train" not in splits and not settings.only_evaluates:
            raise ValueError("there is no training split: give one, or --num_train_epochs 0 to evaluate only")
        if settings.only_evaluates and not splits.keys() & {"dev", "test"}:
            raise ValueError("there is neither a dev nor a test split to evaluate")

    def _check_dev_flags(self) -> None:
        for name in ("metric_for_best_model", "early_stopping_patience", "eval_steps"):
            if getattr(self.settings, name) is not None and "dev" not in self.data.splits:
                raise ValueError(f"--{name} needs a dev split: --validation_source_file or --validation_file")

    def _warn_of_direction(self) -> None:
        """Say which weights are the best where a metric of others decides."""
        settings = self.settings
        metric = (settings.metric_for_best_model or self.main_metric).removeprefix("eval_")
        ours = {"loss", *(name for each in TEXT_METRICS.values() for name in each.names)}
        if settings.task_name is not None or metric in ours:
            return
        if settings.keeps_best_weights and settings.greater_is_better is None:
            rises = greater_is_better(metric)
            logger.warning(
                "the best weights are those with the %s %s; where the %s are better, give --%sgreater_is_better",
                "highest" if rises else "lowest", metric, "lowest" if rises else "highest", "no-" if rises else "",
            )  # fmt: skip

    def load_model(self) -> PreTrainedModel:
        model = load_or_make_model(self.settings, self.config, AutoModelForSeq2SeqLM)
        if self.target_start is not None:
            self.target_start.give(model)
        return model

    def objective(self) -> Objective:
        return label_objective(target_logits, self.settings.label_smoothing_factor)

    def lengths(self) -> list[int]:
        return self.rows.lengths()

    def start_epoch(self, epoch: int) -> None:
        self.rows.start_epoch(epoch)

    def make_evaluator(self, model: nn.Module) -> Seq2SeqEvaluator | None:
        settings, splits = self.settings, self.data.splits
        self.decoder = Decoder(self.accelerator, model, self.tokenizer, self.data.score, settings)
        sets = {name: self._generation_set(splits[name]) for name in ("dev", "test") if name in splits}
        self.test = sets.get("test")
        if "dev" not in sets:
            return None
        return Seq2SeqEvaluator(self.accelerator, model, sets["dev"], self.decoder, settings)

    def last_evaluation(self, loop: TrainingLoop, evaluator: Seq2SeqEvaluator) -> None:
        evaluator.evaluate(self.settings.num_beams, afresh=not loop.scores_are_current())

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
        return dict([_file(evaluator.data.split, evaluator.texts)])

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        if self.test is None:
            return {}, {}
        results: dict[str, Any] = {}
        texts = {}
        for i, num_beams in enumerate(self.settings.num_beams):
            metrics, texts[num_beams] = self.decoder.decode_and_score(self.test, num_beams)
            results |= {f"test_{key}{beam_suffix(i, num_beams)}": value for key, value in metrics.items()}
        return {**results, "test_samples": len(self.test.split)}, dict([_file(self.test.split, texts)])

    def summary(self, results: dict[str, Any]) -> str:
        lines = [
            f"{split} ({results[f'{prefix}samples']} rows): {self._scores(results, prefix)}\n"
            for prefix, split in (("eval_", "dev"), ("test_", "test"))
            if f"{prefix}samples" in results
        ]
        return "".join(lines)

    def _scores(self, results: dict[str, Any], prefix: str) -> str:
        parts = [f"loss {results['eval_loss']:.4f}"] if prefix == "eval_" else []
        for i, num_beams in enumerate(self.settings.num_beams):
            suffix = beam_suffix(i, num_beams)
            names = [name for name in self.data.metric_names if f"{prefix}{name}{suffix}" in results]
            values = [f"{name} {results[f'{prefix}{name}{suffix}']:.2f}" for name in names]
            speed = f"{results[f'{prefix}decode_tokens_per_second{suffix}']:.0f} tokens/s"
            parts.append(f"{'greedy' if num_beams == 1 else f'{num_beams} beams'}: {', '.join([*values, speed])}")
        return "; ".join(parts)

    def _generation_set(self, split: Seq2SeqSplit) -> GenerationSet:
        lengths = [len(source) for source in split.sources]
        loader, order = prepare_eval_dataloader(
            self.settings, self.accelerator, TextRows(split.pairs()), lengths, self.collate
        )
        return GenerationSet(split, loader, order)


def _file(split: Seq2SeqSplit, texts: dict[int, list[str]]) -> tuple[str, str]:
    """Return the name and the content of a file of predictions: each row's number, source, references, prediction."""
    lines = []
    for row, source in enumerate(split.sources):
        record: dict[str, Any] = {**split.keys[row], "source": source}
        if split.references is not None:
            record["references"] = list(split.references[row])
        for i, (num_beams, found) in enumerate(texts.items()):
            record[f"prediction{beam_suffix(i, num_beams)}"] = found[row]
        lines.append(json.dumps(record, ensure_ascii=False))
    return f"{split.name}.jsonl", "\n".join(lines) + "\n"
