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
from .settings import ENTITY_METRICS, NerSettings

__all__ = ["NerFineTuning", "score_entities"]

logger = logging.getLogger(__name__)


def score_entities(predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
    """Compute precision, recall and F1 of whole entities, and the accuracy of tags, with seqeval.

    Args:
        predictions: The predicted tags of each sentence.
        references: The true tags of each sentence, equally many.

    Returns:
        The values of the metrics, from 0 to 1.

    Example:
        ```python
        score_entities([["B-PER", "O"]], [["B-PER", "O"]])  # {"precision": 1.0, "recall": 1.0, "f1": 1.0, ...}
        ```
    """
    from seqeval import metrics

    functions = {name: getattr(metrics, f"{name}_score") for name in ENTITY_METRICS}
    options = {name: {"zero_division": 0} for name in ("precision", "recall", "f1")}
    return {
        name: float(function(references, predictions, **options.get(name, {}))) for name, function in functions.items()
    }


class NerFineTuning(FineTuningTask[NerSettings, MetricEvaluator]):
    """Fine-tuning on named entities (arXiv cs/0306050) or other tags of words.

    The tag of a word is predicted at its first token.

    Example:
        ```python
        settings = NerSettings(
            model_name_or_path="bert-gqa4", train_file="train.txt", validation_file="dev.txt", output_dir="out"
        )
        results = fine_tune(NerFineTuning, settings)
        ```
    """

    name, main_metric, shown_metrics = "tags", "f1", ENTITY_METRICS

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
        checkpoint_labels = {str(name) for name in id2label.values()}
        if not self.settings.only_evaluates:
            self._warn_about_unlearned_tags()
        # A checkpoint may have more tags than these sentences. If it is only evaluated, it cannot get new tags.
        if self.settings.only_evaluates or labels <= checkpoint_labels:
            labels = checkpoint_labels
        else:
            labels = labels | {"O"}
        model, _ = load_classifier(self.settings, self.config, sorted(labels), AutoModelForTokenClassification)
        self.names: Any = model.config.id2label
        self.labels: Any = model.config.label2id
        for split in ("validation", "test"):
            self._check_tags(split)
        self.rows, _ = self._encode_all("train")
        return model

    def _warn_about_unlearned_tags(self) -> None:
        """Warn about tags that only dev sentences have. The model gets outputs for them, but does not learn them."""
        learned = {tag for _, tags in self.splits["train"] for tag in tags}
        for words, tags in self.splits["validation"]:
            for word, tag in zip(words, tags, strict=True):
                if tag not in learned:
                    learned.add(tag)
                    message = "No training sentence has the tag %r, which the dev set gives to %r (%.60s)."
                    logger.warning(message, tag, word, " ".join(words))

    def _check_tags(self, split: str) -> None:
        """Check that the model has an output for each tag of a split."""
        name = {"validation": "dev"}.get(split, split)
        for words, tags in self.splits.get(split, ()):
            for word, tag in zip(words, tags, strict=False):  # there is one tag per word, or no tag at all
                if tag not in self.labels:
                    known = ", ".join(sorted(self.labels))
                    raise ValueError(
                        f"The {name} tags must be among those of the model ({known}), got {tag!r} for {word!r} "
                        f"({' '.join(words):.60}). Correct the tag."
                    )

    def _encode_all(self, split: str) -> tuple[list[dict[str, list[int]]], list[dict[int, int]]]:
        """Return the tokens of all sentences, and the positions of their words. Warn about words that are cut off."""
        length, encoded = self.settings.max_length, list(map(self._encode, self.splits[split]))
        cut = [
            len(words) - 1 - max(positions, default=-1)
            for (words, _), (row, positions) in zip(self.splits[split], encoded, strict=True)
            if len(row["input_ids"]) == length
        ]
        if any(cut):
            message = "%s: %d of %d sentences have more than --max_length %d tokens. Their last %d words are cut off."
            logger.warning(message, split, len(list(filter(None, cut))), len(encoded), length, sum(cut))
        return [row for row, _ in encoded], [positions for _, positions in encoded]

    def _encode(self, sentence: Sentence) -> tuple[dict[str, list[int]], dict[int, int]]:
        """Return the tokens and labels of a sentence, and the position of the first token of each word.

        Only the first token of a word has a label. The other labels are -100.
        """
        words, tags = sentence
        row, positions = encode_words(self.tokenizer, words, self.settings.max_length)
        row["labels"] = [IGNORED_LABEL] * len(row["input_ids"])
        for word, position in positions.items() if tags else ():
            row["labels"][position] = self.labels[tags[word]]
        return row, positions

    def objective(self) -> Objective:
        return make_label_objective(compute_logits)

    def make_evaluator(self, model: nn.Module) -> MetricEvaluator:
        self.model = model
        self.sets = {split: self._make_eval_set(split) for split in self.splits if split != "train"}
        return MetricEvaluator(self._compute_scores)

    def _make_eval_set(self, split: str) -> tuple[Any, ...]:
        """Return the batches of a split, the order of their rows, and the positions of the words."""
        rows, positions = self._encode_all(split)
        lengths = [len(row["input_ids"]) for row in rows]
        return *prepare_eval_dataloader(self.settings, self.accelerator, rows, lengths, self.collate), positions

    def _compute_scores(self) -> dict[str, float]:
        """Tag the dev sentences and return their metrics."""
        self.dev_tags, loss = self._tag_sentences("validation")
        references = [tags for _, tags in self.splits["validation"]]
        return {**score_entities(self.dev_tags, references), "loss": loss}

    def _tag_sentences(self, split: str) -> tuple[list[list[str]], float]:
        """Return the tags of each sentence, with "O" for words that are cut off, and the mean loss per word."""

        def outputs(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
            logits = compute_logits(self.model, batch)
            tag_ids = pad(logits.argmax(-1), (0, self.settings.max_length - logits.shape[1]))  # [b, max_length]
            # Sentences without tags have no loss. The largest logit then shows whether outputs are finite.
            return tag_ids, *token_cross_entropy(logits, batch["labels"]), logits.amax((1, 2))

        loader, order, positions = self.sets[split]
        tag_ids, losses, counts, _ = run_rows(
            self.accelerator, self.model, loader, order, outputs, split, self.settings
        )
        tags = [
            [self.names[int(row[at[i]])] if i in at else "O" for i in range(len(words))]
            for row, at, (words, _) in zip(tag_ids, positions, self.splits[split], strict=True)
        ]
        return tags, float(losses.sum() / max(counts.sum(), 1))

    def fingerprint(self) -> dict[str, Any]:
        return {
            "hash of the training data": _hash_sentences(self.splits["train"]),
            "tags of the model": sorted(self.labels),
        }

    def dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": _hash_sentences(self.splits["validation"])}

    def dev_results(self, evaluator: MetricEvaluator) -> dict[str, Any]:
        return {"eval_samples": len(self.splits["validation"])}

    def predictions(self, evaluator: MetricEvaluator) -> dict[str, str]:
        return {"dev.txt": _format_conll(self.splits["validation"], self.dev_tags)}

    def predict(self) -> tuple[dict[str, Any], dict[str, str]]:
        if "test" not in self.splits:
            return {}, {}
        sentences, (tags, loss) = self.splits["test"], self._tag_sentences("test")
        results: dict[str, Any] = {"test_samples": len(sentences)}
        if sentences[0][1]:
            scores = {**score_entities(tags, [tags for _, tags in sentences]), "loss": loss}
            results |= {f"test_{name}": value for name, value in scores.items()}
        return results, {"test.txt": _format_conll(sentences, tags)}

    def summary(self, results: dict[str, Any]) -> str:
        if "test_f1" not in results:
            return super().summary(results)
        scores = ", ".join(f"{name} {results[f'test_{name}']:.4f}" for name in ENTITY_METRICS)
        return f"{super().summary(results)}\ntest ({results['test_samples']} sentences): {scores}; "


def _hash_sentences(sentences: list[Sentence]) -> str:
    """Return a hash of words and tags."""
    return hash_texts([(*words, *tags) for words, tags in sentences])


def _format_conll(sentences: list[Sentence], tags: list[list[str]]) -> str:
    """Return the content of a CoNLL file."""
    return "\n".join(
        "".join(map(_format_line, words, sentence_tags))
        for (words, _), sentence_tags in zip(sentences, tags, strict=True)
    )


def _format_line(word: str, tag: str) -> str:
    """Return the line of a word in a CoNLL file."""
    word = re.sub(r"[\t\r\n]", " ", word)  # words of a `datasets` source may contain separators
    return f"{word}{chr(9) if ' ' in word else ' '}{tag}\n"
