"""Reads tagged sentences, fine-tunes models on token classification, and scores whole entities."""

import logging
import re
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import load_dataset
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification, PreTrainedModel

from ...files import WHITESPACE, is_blank, is_unicode
from ...text_files import TableRow, make_missing_column_error, read_lines, read_table_rows
from ..engine import models
from ..engine.dataloaders import IGNORED_LABEL, EvalBatches, hash_texts
from ..engine.dataset_splits import find_split_files, read_dataset_rows
from ..engine.finetune import FineTuningTask
from ..engine.optimization import Objective, compute_logits, compute_token_cross_entropy, make_cross_entropy_objective
from . import ENTITY_METRICS, NerSettings

logger = logging.getLogger(__name__)
# The words of a sentence and their tags ("O", or an entity type with the prefix "B-" or "I-"). The list of tags is
# empty if they are unknown.
Sentence = tuple[list[str], list[str]]
# The placeholder for a missing tag.
UNTAGGED = ""


def read_conll(path: str, needs_tags: bool = True) -> list[Sentence]:
    """Read a file in the CoNLL format.

    Each line contains a word in its first column and its tag in its last column. Blank lines separate sentences.
    Columns are separated by tabs if the line contains a tab, and by spaces otherwise. Other whitespace, such as the
    no-break space in "2\u00a0000", is part of the word.

    Args:
        path: The path of the file.
        needs_tags: Whether a line without a tag is an error. If False, the tags are only returned if every line has a
            tag and at least one tag is not "O". Otherwise, the tags are treated as unknown.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is not text, if a line is invalid or lacks a tag, or if the first column numbers the
            words. The message names the file and, for errors in a line, the line.
    """
    sentences: list[Sentence] = [([], [])]
    first: tuple[int, int] | None = None  # the number and the columns of the first line with space-separated columns
    has_warned, untagged = False, 0  # `untagged` is the number of the first line without a tag
    for number, line in enumerate(read_lines([path], keep_blank=True), start=1):
        cells = _split_columns(line)
        words, tags = sentences[-1]
        if not cells or cells[0] == "-DOCSTART-":
            if words:
                sentences.append(([], []))
            continue
        if not cells[0]:
            raise ValueError(f"{path}, line {number}: Each line must start with a word, got a tab in {line!r}.")
        is_tagged = len(cells) > 1 and _is_tag(cells[-1])
        if needs_tags and not is_tagged:
            raise ValueError(
                f"{path}, line {number}: Each line must contain a word and end with its tag (O, B-... or I-...), got "
                f"{line!r}."
            )
        if "\r" in line.strip(WHITESPACE):
            raise ValueError(
                f"{path}, line {number}: There is a carriage return inside {line!r:.60}. End every line with \\n or "
                "\\r\\n."
            )
        untagged = untagged or (0 if is_tagged else number)
        if "\t" not in line:
            first = first or (number, len(cells))
            if len(cells) != first[1] and not has_warned:
                problem = (
                    f"{path}, line {number}: {line!r} must have as many space-separated columns as line {first[0]} "
                    f"({first[1]}), got {len(cells)}. If words contain spaces, separate the columns with tabs."
                )
                if needs_tags:
                    raise ValueError(problem)
                logger.warning("%s The word is read as %r.", problem, cells[0])
                has_warned = True
        words.append(cells[0])
        tags.append(cells[-1] if is_tagged else UNTAGGED)
    if not (sentences := [sentence for sentence in sentences if sentence[0]]):
        raise ValueError(f"{path} must contain at least one sentence, but is empty.")
    _check_words(path, sentences)
    if needs_tags:
        return sentences
    return _drop_unknown_tags(sentences, path, f"Line {untagged} has no tag" if untagged else None)


def _check_words(path: str, sentences: list[Sentence]) -> None:
    """Check that the words of a file are not the numbers 1, 2, 3, ... in every sentence, as in CoNLL-U files."""
    numbers = list(map(str, range(1, 1 + max(len(words) for words, _ in sentences))))
    if len(numbers) > 1 and all(words == numbers[: len(words)] for words, _ in sentences):
        raise ValueError(
            f"{path}: Each line must start with a word, but the first column numbers the words in every sentence. "
            "Remove this column."
        )


def _drop_unknown_tags(sentences: list[Sentence], location: str, reason: str | None) -> list[Sentence]:
    """Remove the tags of test sentences if the tags are unknown.

    The tags are unknown if a reason is given or if all tags are "O".

    Args:
        sentences: The sentences.
        location: The description of the file in messages.
        reason: The reason why the tags are unknown, or None if no reason has been found.
    """
    has_entities = any(tag not in ("O", UNTAGGED) for _, tags in sentences for tag in tags)
    if reason is None and has_entities:
        return sentences
    # Missing tags may be a mistake if other words have tags, but it is normal that a file contains no tags.
    level = logging.WARNING if has_entities else logging.INFO
    message = "%s: %s. The sentences are tagged but not scored."
    logger.log(level, message, location, reason or "Every tag is O")
    return [(words, []) for words, _ in sentences]


def _is_tag(tag: str) -> bool:
    """Return whether a text is an entity tag or "O"."""
    return tag == "O" or (tag[:2] in ("B-", "I-") and len(tag) > 2)


def _split_columns(line: str) -> list[str]:
    """Split a line into columns, or return an empty list for a blank line."""
    if is_blank(line):
        return []
    if "\t" in line:
        return [cell.strip(WHITESPACE) for cell in line.rstrip(WHITESPACE).split("\t")]
    return [cell for cell in line.strip(WHITESPACE).split(" ") if cell]


def load_sentences(settings: NerSettings) -> dict[str, list[Sentence]]:
    """Read the sentences of a run.

    Returns:
        A dictionary with the splits "train" (unless the run only evaluates), "validation" and "test" (if it exists).

    Raises:
        OSError: If a file or a Hub dataset cannot be read.
        ValueError: If a file or a dataset has invalid content.
    """
    splits = ["validation", "test"] if settings.only_evaluates else ["train", "validation", "test"]
    if settings.dataset_name is None:
        files = {split: getattr(settings, f"{split}_file") for split in splits}
        return {split: read_conll(path, split != "test") for split, path in files.items() if path is not None}
    name, names = settings.dataset_name, None
    split_files = find_split_files(settings)
    try:
        source: Any = split_files or load_dataset(name, settings.dataset_config_name)
        loaded: dict[str, list[TableRow]] = {
            split: [record for path in source[split] for record in read_table_rows(Path(path))]
            if split_files
            else [*read_dataset_rows(f"{name} ({split})", source[split])]
            for split in splits
            if split != "test" or split in source
        }
        if not split_files:
            tags = source["validation"].features.get("ner_tags")
            names = getattr(getattr(tags, "feature", None), "names", None)  # None if tags are names
    except Exception as error:  # `datasets` and the Hub raise many exception types
        raise OSError(
            f"--dataset_name {name} could not be loaded with the splits train and validation "
            f"({type(error).__name__}: {error}). Use files instead."
        ) from error
    sentences = {
        split: [sentence for record in records if (sentence := _read_row(record, split != "test"))[0]]
        for split, records in loaded.items()
    }
    return {
        split: _convert_tags_to_names(rows, names, f"{name} ({split})", split != "test")
        for split, rows in sentences.items()
    }


def _read_row(record: TableRow, needs_tags: bool) -> tuple[list[str], list[Any]]:
    """Return the words and the tags in a row of a `datasets` source. Empty columns result in empty lists."""
    row = record.values
    if missing := [name for name in ("tokens", "ner_tags")[: 1 + needs_tags] if name not in row]:
        raise make_missing_column_error(record.header_location, row, missing[0], None)
    words, tags = row["tokens"] or [], row.get("ner_tags") or []
    if not isinstance(words, list) or not all(isinstance(word, str) and is_unicode(word) for word in words):
        raise ValueError(f"{record.place}: Column 'tokens' must contain a list of words, got {words!r:.60}.")
    if not isinstance(tags, list):
        raise ValueError(f"{record.place}: Column 'ner_tags' must contain a list of tags, got {tags!r:.60}.")
    return words, tags


def _convert_tags_to_names(
    sentences: list[tuple[list[str], list[Any]]], names: list[str] | None, location: str, needs_tags: bool
) -> list[Sentence]:
    """Convert the tags in a split of a `datasets` source to tag names, and return the sentences.

    Args:
        sentences: The words and their tags, which are names or numbers.
        names: The tag names in the order of their numbers, or None if tags are already names.
        location: The description of the split in messages.
        needs_tags: Whether missing or invalid tags are an error.
    """
    if not sentences:
        raise ValueError(f"{location} must contain at least one sentence with words, but has none.")
    try:
        tagged, reason = [(words, _read_tags(words, tags, names)) for words, tags in sentences], None
    except ValueError as error:
        if needs_tags:
            raise ValueError(f"{location}: {error}. Correct the tags.") from None
        tagged, reason = [(words, []) for words, _ in sentences], str(error)
    return tagged if needs_tags else _drop_unknown_tags(tagged, location, reason)


def _read_tags(words: list[str], tags: list[Any], names: list[str] | None) -> list[str]:
    """Return the tag names of a sentence from a `datasets` source. Raise `ValueError` if a tag cannot be read."""
    if len(words) != len(tags):
        raise ValueError(f"There must be exactly one tag per word in {' '.join(words)[:60]!r}")
    if names:
        if not all(isinstance(tag, int) and 0 <= tag < len(names) for tag in tags):
            raise ValueError(f"Tags must be numbers from 0 to {len(names) - 1}")
        tags = [names[tag] for tag in tags]
    for word, tag in zip(words, tags, strict=True):
        if not (isinstance(tag, str) and _is_tag(tag)):
            raise ValueError(
                f"Tags must be O, B-... or I-..., or the column must define names for its numbers, got {tag!r} for "
                f"{word!r}"
            )
    return tags


def score_entities(predictions: list[list[str]], references: list[list[str]]) -> dict[str, float]:
    """Compute the precision, recall and F1 for whole entities and the accuracy of the tags with seqeval.

    Args:
        predictions: The predicted tags for each sentence.
        references: The true tags for each sentence. Each sentence must have as many true tags as predicted tags.

    Returns:
        The values by metric name, in the range from 0 to 1.

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


class NerFineTuning(FineTuningTask[NerSettings]):
    """Fine-tuning for named entity recognition (arXiv cs/0306050) or other word-tagging tasks.

    The tag of a word is predicted at the first token of the word.

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
        self.config = models.load_config(settings)
        models.check_trained_head(settings, self.config, "ForTokenClassification", "tags words")
        self.tokenizer = models.load_tokenizer(settings, self.config, is_split_into_words=True)
        models.configure_token_types(self.tokenizer, self.config, pairs=False)
        multiple = settings.pad_to_multiple_of
        models.check_max_length(settings.max_length, self.config, self.tokenizer, pad_to_multiple_of=multiple)
        self.splits = {"train": [], **load_sentences(settings)}
        for name, limit in (("train", settings.max_train_samples), ("validation", settings.max_eval_samples)):
            self.splits[name] = self.splits[name][:limit]
        self.collate = DataCollatorForTokenClassification(self.tokenizer, pad_to_multiple_of=multiple)

    def load_model(self) -> PreTrainedModel:
        labels = {tag for name in ("train", "validation") for _, tags in self.splits[name] for tag in tags}
        id2label: Any = self.config.id2label
        checkpoint_labels = {str(name) for name in id2label.values()}
        if not self.settings.only_evaluates:
            self._warn_about_unseen_tags()
        # A checkpoint may have more tags than these sentences. If it is only evaluated, no tags can be added.
        if self.settings.only_evaluates or labels <= checkpoint_labels:
            labels = checkpoint_labels
        else:
            labels = labels | {"O"}
        model, _ = models.load_classifier(self.settings, self.config, sorted(labels), AutoModelForTokenClassification)
        self.names: Any = model.config.id2label
        self.labels: Any = model.config.label2id
        for split in ("validation", "test"):
            self._check_tags(split)
        self.rows, _ = self._tokenize_sentences("train")
        return model

    def _warn_about_unseen_tags(self) -> None:
        """Warn about tags that occur only in dev sentences, because the model cannot learn these tags."""
        learned = {tag for _, tags in self.splits["train"] for tag in tags}
        for words, tags in self.splits["validation"]:
            for word, tag in zip(words, tags, strict=True):
                if tag not in learned:
                    learned.add(tag)
                    message = "No training sentence contains the tag %r, which the dev set assigns to %r (%.60s)."
                    logger.warning(message, tag, word, " ".join(words))

    def _check_tags(self, split: str) -> None:
        """Check that the model has an output for each tag in a split."""
        name = {"validation": "dev"}.get(split, split)
        for words, tags in self.splits.get(split, ()):
            for word, tag in zip(words, tags, strict=False):  # there is one tag per word, or no tags at all
                if tag not in self.labels:
                    known_tags = ", ".join(sorted(self.labels))
                    raise ValueError(
                        f"The {name} tags must be known to the model ({known_tags}), got {tag!r} for {word!r} "
                        f"({' '.join(words):.60}). Correct the tag."
                    )

    def _tokenize_sentences(self, split: str) -> tuple[list[dict[str, list[int]]], list[dict[int, int]]]:
        """Tokenize the sentences of a split, and return the model inputs and the positions of each sentence's words.

        If words are truncated, a warning is logged.
        """
        length, encoded = self.settings.max_length, list(map(self._encode, self.splits[split]))
        truncated_rows = [
            len(words) - 1 - max(positions, default=-1)
            for (words, _), (row, positions) in zip(self.splits[split], encoded, strict=True)
            if len(row["input_ids"]) == length
        ]
        if any(truncated_rows):
            message = (
                "%s: %d of %d sentences have more than --max_length %d tokens. Their last %d words are truncated."
            )
            logger.warning(
                message, split, len(list(filter(None, truncated_rows))), len(encoded), length, sum(truncated_rows)
            )
        return [row for row, _ in encoded], [positions for _, positions in encoded]

    def _encode(self, sentence: Sentence) -> tuple[dict[str, list[int]], dict[int, int]]:
        """Tokenize a sentence, and return the model inputs with labels and the position of each word's first token.

        Only the first token of a word has a label. All other labels are -100.
        """
        words, tags = sentence
        row, positions = models.tokenize_words(self.tokenizer, words, self.settings.max_length)
        row["labels"] = [IGNORED_LABEL] * len(row["input_ids"])
        for word, position in positions.items() if tags else ():
            row["labels"][position] = self.labels[tags[word]]
        return row, positions

    def make_objective(self) -> Objective:
        return make_cross_entropy_objective(compute_logits)

    def prepare_evaluation(self) -> bool:
        # The batches of each split, and the positions of the words in each sentence.
        self.sets: dict[str, tuple[EvalBatches, list[dict[int, int]]]] = {}
        for split in (name for name in self.splits if name != "train"):
            rows, positions = self._tokenize_sentences(split)
            self.sets[split] = self.make_eval_batches(rows, [len(row["input_ids"]) for row in rows]), positions
        return True

    def evaluate(self) -> dict[str, float]:
        """Tag the dev sentences and compute the metrics."""
        self.dev_tags, loss = self._tag_sentences("validation")
        references = [tags for _, tags in self.splits["validation"]]
        return {**score_entities(self.dev_tags, references), "loss": loss}

    def _tag_sentences(self, split: str) -> tuple[list[list[str]], float]:
        """Predict the tags of each sentence, with "O" for truncated words, and compute the mean loss per word."""

        def compute_outputs(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
            logits = compute_logits(self.model, batch)
            tag_ids = pad(logits.argmax(-1), (0, self.settings.max_length - logits.shape[1]))  # [b, max_length]
            # Sentences without tags have no loss, so the largest logit is returned to check that outputs are finite.
            return tag_ids, *compute_token_cross_entropy(logits, batch["labels"]), logits.amax((1, 2))

        batches, positions = self.sets[split]
        tag_ids, losses, counts, _ = self.run_model_on_rows(batches, compute_outputs, split)
        tags = [
            [self.names[int(row[word_positions[i]])] if i in word_positions else "O" for i in range(len(words))]
            for row, word_positions, (words, _) in zip(tag_ids, positions, self.splits[split], strict=True)
        ]
        return tags, float(losses.sum() / max(counts.sum(), 1))

    def get_fingerprint(self) -> dict[str, Any]:
        return {
            "hash of the training data": _hash_sentences(self.splits["train"]),
            "tags of the model": sorted(self.labels),
        }

    def get_dev_fingerprint(self) -> dict[str, Any]:
        return {"hash of the dev data": _hash_sentences(self.splits["validation"])}

    def get_dev_results(self) -> dict[str, Any]:
        return {"eval_samples": len(self.splits["validation"])}

    def get_prediction_files(self) -> dict[str, str]:
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

    def format_summary(self, results: dict[str, Any]) -> str:
        if "test_f1" not in results:
            return super().format_summary(results)
        scores = ", ".join(f"{name} {results[f'test_{name}']:.4f}" for name in ENTITY_METRICS)
        return f"{super().format_summary(results)}\ntest ({results['test_samples']} sentences): {scores}; "


def _hash_sentences(sentences: list[Sentence]) -> str:
    """Return a hash of the words and tags."""
    return hash_texts([(*words, *tags) for words, tags in sentences])


def _format_conll(sentences: list[Sentence], tags: list[list[str]]) -> str:
    """Format words and tags as the content of a CoNLL file."""
    return "\n".join(
        "".join(map(_format_line, words, sentence_tags))
        for (words, _), sentence_tags in zip(sentences, tags, strict=True)
    )


def _format_line(word: str, tag: str) -> str:
    """Format a word and its tag as a line of a CoNLL file."""
    word = re.sub(r"[\t\r\n]", " ", word)  # words from a `datasets` source may contain separators
    return f"{word}{chr(9) if ' ' in word else ' '}{tag}\n"
