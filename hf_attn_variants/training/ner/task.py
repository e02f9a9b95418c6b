"""Fine-tuning on token classification: tokens and their labels, and the scores of whole entities."""

import logging
import re
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification, PreTrainedModel

from ..engine.dataloaders import IGNORED_LABEL, prepare_eval_dataloader
from ..engine.finetune import FineTuningTask, MetricEvaluator, run_rows
from ..engine.losses import Objective, compute_logits, make_label_objective, token_cross_entropy
from ..engine.models import check_trained_head, load_classifier, load_config
from ..engine.text_rows import hash_texts
from ..engine.tokenizers import check_max_length, encode_words, fit_token_types, load_tokenizer
from .data import Sentence, load_sentences
from .settings import METRICS, NerSettings

__all__ = ["NerFineTuning", "score_entities"]

logger = logging.getLogger(__name__)


def score_entities(predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
    """Return precision, recall and F1 of whole entities, and the accuracy of tags, by seqeval: all from 0 to 1.

    Args:
        predictions, references: the tags of each sentence, as many of both.
    """
    from seqeval import metrics

    found = {name: getattr(metrics, f"{name}_score") for name in METRICS}
    none = {name: {"zero_division": 0} for name in ("precision", "recall", "f1")}
    return {name: float(score(references, predictions, **none.get(name, {}))) for name, score in found.items()}


class NerFineTuning(FineTuningTask[NerSettings, MetricEvaluator]):
    """Named entities (arXiv:cs/0306050), or whatever else tags words: a word is tagged at its first token."""

    name, main_metric, shown_metrics = "tags", "f1", METRICS

    def __init__(self, settings: NerSettings, accelerator: Accelerator):
        super().__init__(settings, accelerator)
        self.config = load_config(settings)
        check_trained_head(settings, self.config, "ForTokenClassification", "tags words")
        self.tokenizer = load_tokenizer(settings, self.config, words=True)
        fit_token_types(self.tokenizer, self.config, pairs=False)
        check_max_length(settings.max_length, self.config, self.tokenizer, multiple=settings.pad_to_multiple_of)
        self.splits = {"train": [], **load_sentences(settings)}
        for name, limit in (("train", settings.max_train_samples), ("validation", settings.max_eval_samples)):
            self.splits[name] = self.splits[name][:limit]
        self.collate = DataCollatorForTokenClassification(
            self.tokenizer, pad_to_multiple_of=settings.pad_to_multiple_of
        )

    def load_model(self) -> PreTrainedModel:
        labels = {tag for name in ("train", "validation") for _, tags in self.splits[name] for tag in tags}
        id2label: Any = self.config.id2label
        had = {str(name) for name in id2label.values()}
        if not self.settings.only_evaluates:
            self._warn_of_unlearned()
        # A tagger may know more than these sentences have. One that is only evaluated knows no other tag.
        labels = had if self.settings.only_evaluates or labels <= had else labels | {"O"}
        model, _ = load_classifier(self.settings, self.config, sorted(labels), AutoModelForTokenClassification)
        self.names: Any = model.config.id2label
        self.labels: Any = model.config.label2id
        for split in ("validation", "test"):
            self._check_tags(split)
        self.rows, _ = self._encode_all("train")
        return model

    def _warn_of_unlearned(self) -> None:
        """Warn of tags that only the dev sentences have: an output for each is made, and nothing teaches it."""
        learned = {tag for _, tags in self.splits["train"] for tag in tags}
        for words, tags in self.splits["validation"]:
            for word, tag in zip(words, tags, strict=True):
                if tag not in learned:
                    learned.add(tag)
                    message = "no training sentence has the tag %r, which a dev sentence gives to %r (%.60s)"
                    logger.warning(message, tag, word, " ".join(words))

    def _check_tags(self, split: str) -> None:
        name = {"validation": "dev"}.get(split, split)
        for words, tags in self.splits.get(split, ()):
            for word, tag in zip(words, tags, strict=False):  # as many, or none
                if tag not in self.labels:
                    there = ", ".join(sorted(self.labels))
                    raise ValueError(
                        f"the {name} tag {tag!r} of {word!r} ({' '.join(words):.60}) is none of {there}: these are "
                        "the model's"
                    )

    def _encode_all(self, split: str) -> tuple[list[dict[str, list[int]]], list[dict[int, int]]]:
        """Return the tokens and the places of all sentences; warn of words that are cut off."""
        length, found = self.settings.max_length, list(map(self._encode, self.splits[split]))
        cut = [
            len(words) - 1 - max(places, default=-1)
            for (words, _), (row, places) in zip(self.splits[split], found, strict=True)
            if len(row["input_ids"]) == length
        ]
        if any(cut):
            message = "%s: %d of %d sentences have more than --max_length %d tokens: their last words, %d, are cut"
            logger.warning(message, split, len(list(filter(None, cut))), len(found), length, sum(cut))
        return [row for row, _ in found], [places for _, places in found]

    def _encode(self, sentence: Sentence) -> tuple[dict[str, list[int]], dict[int, int]]:
        """Return a sentence's tokens with their labels, -100 but at the first of a word, and the places of these."""
        words, tags = sentence
        row, places = encode_words(self.tokenizer, words, self.settings.max_length)
        row["labels"] = [IGNORED_LABEL] * len(row["input_ids"])
        for word, place in places.items() if tags else ():
            row["labels"][place] = self.labels[tags[word]]
        return row, places

    def objective(self) -> Objective:
        return make_label_objective(compute_logits)

    def make_evaluator(self, model: nn.Module) -> MetricEvaluator:
        self.model = model
        self.sets = {split: self._eval_set(split) for split in self.splits if split != "train"}
        return MetricEvaluator(self._score)

    def _eval_set(self, split: str) -> tuple[Any, ...]:
        rows, places = self._encode_all(split)
        lengths = [len(row["input_ids"]) for row in rows]
        return *prepare_eval_dataloader(self.settings, self.accelerator, rows, lengths, self.collate), places

    def _score(self) -> dict[str, float]:
        self.dev_tags, loss = self._tag("validation")
        references = [tags for _, tags in self.splits["validation"]]
        return {**score_entities(self.dev_tags, references), "loss": loss}

    def _tag(self, split: str) -> tuple[list[list[str]], float]:
        """Return the tags of each sentence, "O" for words that were cut off, and the mean loss of a word."""

        def outputs(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
            logits = compute_logits(self.model, batch)
            found = pad(logits.argmax(-1), (0, self.settings.max_length - logits.shape[1]))  # [b, n], of one n
            # Of sentences without tags the largest number alone says that outputs are none.
            return found, *token_cross_entropy(logits, batch["labels"]), logits.amax((1, 2))

        loader, order, places = self.sets[split]
        found, losses, counts, _ = run_rows(self.accelerator, self.model, loader, order, outputs, split, self.settings)
        tags = [
            [self.names[int(row[at[i]])] if i in at else "O" for i in range(len(words))]
            for row, at, (words, _) in zip(found, places, self.splits[split], strict=True)
        ]
        return tags, float(losses.sum() / max(counts.sum(), 1))

    def fingerprint(self) -> dict[str, Any]:
        return {"hash of the training data": _hash(self.splits["train"]), "tags of the model": sorted(self.labels)}

    def dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": _hash(self.splits["validation"])}

    def dev_results(self, evaluator: MetricEvaluator) -> dict[str, Any]:
        return {"eval_samples": len(self.splits["validation"])}

    def predictions(self, evaluator: MetricEvaluator) -> dict[str, str]:
        return {"dev.txt": _conll(self.splits["validation"], self.dev_tags)}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        if "test" not in self.splits:
            return {}, {}
        sentences, (tags, loss) = self.splits["test"], self._tag("test")
        results: dict[str, Any] = {"test_samples": len(sentences)}
        if sentences[0][1]:
            scores = {**score_entities(tags, [tags for _, tags in sentences]), "loss": loss}
            results |= {f"test_{name}": value for name, value in scores.items()}
        return results, {"test.txt": _conll(sentences, tags)}

    def summary(self, results: dict[str, Any]) -> str:
        if "test_f1" not in results:
            return super().summary(results)
        scores = ", ".join(f"{name} {results[f'test_{name}']:.4f}" for name in METRICS)
        return f"{super().summary(results)}\ntest ({results['test_samples']} sentences): {scores}; "


def _hash(sentences: list[Sentence]) -> str:
    return hash_texts([(*words, *tags) for words, tags in sentences])


def _conll(sentences: list[Sentence], tags: list[list[str]]) -> str:
    return "\n".join("".join(map(_line, words, found)) for (words, _), found in zip(sentences, tags, strict=True))


def _line(word: str, tag: str) -> str:
    word = re.sub(r"[\t\r\n]", " ", word)  # of a `datasets` source: in a line they would divide it
    return f"{word}{chr(9) if ' ' in word else ' '}{tag}\n"
