"""Compare ways to encode articles of 2,000 to 8,000 tokens with a sentence encoder of 512 positions.

all-MiniLM-L6-v2 encodes Wikipedia articles, which are split in the middle. The first half, or eight passages of 64
tokens of it, must retrieve the second half (at most 4,096 tokens) among all second halves by the cosine of embeddings
(means over tokens). The scores are accuracy at one, the mean reciprocal rank, and Spearman's correlation on the STS-B
dev set, which shows the loss of quality on short text. The articles come from the last three training shards, and all
fitting and training uses the other shards. The commands of this package make the models, which are stored in
--work_dir. Encoding runs in bfloat16 (the rows contain its distance from float32), and STS-B in float32. The script
writes the JSON file after each row and does not measure existing rows again.

Example:
    python -m benchmarks.long.long_inputs --work_dir long --readings truncated chunks window
"""

import argparse
import gzip
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel

from benchmarks.convert.conversion_subjects import SentenceEncoder, sample_lines, write_texts
from benchmarks.machine import describe_machine
from benchmarks.run_records import check_data_dir, write_rows
from hf_attn_variants.commands import convert as convert_command
from hf_attn_variants.commands.training import uptrain as uptrain_command
from hf_attn_variants.inspection import similarity_spearman

ROOT = Path(__file__).resolve().parents[2]
SET_ASIDE = 3  # the number of last shards from which the articles come
SHORTEST, LONGEST = 2_000, 8_000  # tokens of an article
POSITIONS, OLD_POSITIONS = 4_096, 512
PASSAGES, PASSAGE = 8, 64  # the number of passages of a first half, and the tokens of a passage
LEAST_CHARACTERS = 2 * SHORTEST  # shorter articles are not tokenized, as they have too few tokens
COMPARED = 4  # the number of halves that are also encoded in float32
KEY = ("reading", "articles", "seed")

Ids = list[int]
Encode = Callable[[Ids], torch.Tensor]

WINDOW = ("--attention_pattern", "sliding_window", "--attention_window", "256", "--num_global_tokens", "1")
INTERPOLATED = ("--position_extension", "interpolated")
# MiniLM, which reads pieces, is the teacher of the model with windows. The training texts are articles, and single
# lines that preserve the quality on short text.
TRAINING_TEXTS = 320  # the number of articles, and of lines
UPTRAINING = (
    *("--objective", "embedding", "--teacher_max_length", "256", "--max_length", "1024", "--trainable", "all"),
    *("--learning_rate", "1e-4", "--max_train_steps", "300", "--per_device_train_batch_size", "2"),
    *("--group_by_length", "--per_device_eval_batch_size", "2", "--eval_steps", "150", "--mixed_precision", "bf16"),
)
UPTRAINED = ", uptrained"
# Ways to read a text with the original MiniLM: the tokens per piece, and the number of pieces (None for all).
PIECES: dict[str, tuple[int, int | None]] = {
    "truncated": (OLD_POSITIONS, 1),
    "chunks": (OLD_POSITIONS, None),
    "chunks of 256": (256, None),
}
# Ways to read a text at once: the flags of the conversion.
READINGS: dict[str, tuple[str, ...]] = {
    "full": (),
    "full, interpolated": INTERPOLATED,
    "window": WINDOW,
    "window, interpolated": (*WINDOW, *INTERPOLATED),
}
ALL = [*PIECES, *READINGS, f"window{UPTRAINED}"]


def read_articles(shard: Path) -> list[str]:
    """Return the articles of a gzipped shard, which are separated by empty lines."""
    with gzip.open(shard, "rt", encoding="utf-8") as file:
        return file.read().split("\n\n")


def iterate_long_articles(shards: Sequence[Path], tokenizer: Any, count: int, seed: int) -> Iterator[Ids]:
    """Draw articles of `SHORTEST` to `LONGEST` tokens evenly from all shards, and yield their tokens.

    Raises:
        ValueError: if a shard has too few articles of this length.
    """
    for i, shard in enumerate(shards):
        share = count // len(shards) + (i < count % len(shards))
        articles = [article for article in read_articles(shard) if len(article) >= LEAST_CHARACTERS]
        random.Random(seed).shuffle(articles)
        num_articles = 0
        for article in articles:
            if num_articles == share:
                break
            ids = tokenizer(article, add_special_tokens=False, verbose=False)["input_ids"]
            if SHORTEST <= len(ids) <= LONGEST:
                num_articles += 1
                yield ids
        if num_articles < share:
            raise ValueError(
                f"{shard} has {num_articles} articles of {SHORTEST} to {LONGEST} tokens; {share} are needed."
            )


def make_encoder(model: torch.nn.Module, tokenizer: Any, length: int, pieces: int | None = None) -> Encode:
    """Return a function that embeds the tokens of a text as a unit vector [D].

    Args:
        model: the encoder.
        tokenizer: the tokenizer of the encoder.
        length: the number of tokens that the model reads at once, including [CLS] and [SEP].
        pieces: the number of such pieces that are read, or None for all. The embedding of a text is the mean over its
            pieces, weighted by their lengths.
    """
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id

    def encode(ids: Ids) -> torch.Tensor:
        parts = [ids[start : start + length - 2] for start in range(0, len(ids), length - 2)][:pieces]
        rows = [torch.tensor([[first, *part, last]]) for part in parts]
        means = [model(input_ids=row).last_hidden_state.float().mean(1) for row in rows]
        unit = torch.nn.functional.normalize(torch.cat(means), dim=-1)
        weights = torch.tensor([[float(len(part))] for part in parts])
        return torch.nn.functional.normalize((unit * weights).sum(0), dim=0)

    return encode


def encode_all(encode: Encode, texts: Sequence[Ids], autocast: bool = True) -> torch.Tensor:
    """Return the embeddings of texts, [texts, D], computed in bfloat16 or, without autocast, in float32."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return torch.stack([encode(ids) for ids in texts])


def split_into_passages(ids: Ids) -> list[Ids]:
    """Return `PASSAGES` evenly spaced passages of a text."""
    step = (len(ids) - PASSAGE) / (PASSAGES - 1)
    return [ids[round(i * step) : round(i * step) + PASSAGE] for i in range(PASSAGES)]


def compute_retrieval_scores(queries: torch.Tensor, documents: torch.Tensor) -> dict[str, float]:
    """Return the accuracy at one and the mean reciprocal rank with which queries retrieve their own documents.

    Args:
        queries: the embeddings of the queries, [q * n, D], with q consecutive queries per document.
        documents: the embeddings of the documents, [n, D].
    """
    own_indices = torch.arange(len(queries)) // (len(queries) // len(documents))
    cosines = queries @ documents.T
    ranks = (cosines > cosines.gather(1, own_indices[:, None])).sum(1) + 1
    return {
        "accuracy": round((ranks == 1).float().mean().item(), 4),
        "reciprocal_rank": round((1 / ranks).mean().item(), 4),
    }


def draw_training_texts(shards: Sequence[Path], seed: int) -> list[str]:
    """Draw articles of about `SHORTEST` tokens or more, and as many lines, from shards. Each text is on one line."""
    generator = random.Random(seed)
    articles = [article for shard in shards for article in read_articles(shard) if len(article) >= 4 * SHORTEST]
    texts = [" ".join(article.split()) for article in generator.sample(articles, TRAINING_TEXTS)]
    texts += sample_lines(shards, TRAINING_TEXTS, seed)
    generator.shuffle(texts)
    return texts


def make_model(reading: str, subject: SentenceEncoder, work_dir: Path, seed: int) -> Path:
    """Return the folder of the model for a way of reading. Make the model if it does not exist."""
    if reading in PIECES:
        return subject.source
    folder = work_dir / reading.replace(", ", "-").replace(" ", "_")
    if reading.endswith(UPTRAINED):
        if not (folder / "all_results.json").is_file():
            start = make_model(reading.removesuffix(UPTRAINED), subject, work_dir, seed)
            flags = write_texts(work_dir, {"train_file": draw_training_texts(subject.shards[:-SET_ASIDE], seed)})
            argv = ["--model_name_or_path", str(start), "--teacher", str(subject.source), *UPTRAINING, *flags]
            argv += ["--seed", str(seed), "--disable_tqdm", "--overwrite_output_dir", "--output_dir", str(folder)]
            uptrain_command.main(uptrain_command.parse_args(argv))
    elif not folder.is_dir():
        argv = ["--model_name_or_path", str(subject.source), "--output_dir", str(folder), "--disable_tqdm"]
        argv += ["--max_position_embeddings", str(POSITIONS), *READINGS[reading]]
        convert_command.main(convert_command.parse_args(argv))
    return folder


def measure(reading: str, subject: SentenceEncoder, halves: Sequence[tuple[Ids, Ids]], model: Any) -> dict[str, Any]:
    """Score the model for a way of reading. Seconds are CPU times."""
    encode = make_encoder(model, subject.tokenizer, *PIECES.get(reading, (POSITIONS,)))
    started = time.process_time()
    first, second = (encode_all(encode, half) for half in zip(*halves, strict=True))
    seconds = time.process_time() - started
    exact = encode_all(encode, [half for half, _ in halves[:COMPARED]], autocast=False)
    short = encode_all(encode, [passage for half, _ in halves for passage in split_into_passages(half)])
    return {
        "by_halves": compute_retrieval_scores(first, second),
        "by_passages": compute_retrieval_scores(short, second),
        "spearman": similarity_spearman(model, subject.tokenizer, subject.pairs, subject.scores),
        "bfloat16_cosine": round((first[:COMPARED] * exact).sum(-1).min().item(), 6),
        "encoding_seconds": round(seconds, 1),
    }


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the rows that are not in the output file, write and print each new row, and return all rows."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.num_threads)
    check_data_dir(args.data_dir, *SentenceEncoder.reads)
    subject = SentenceEncoder(args.data_dir)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    shards = subject.shards[-SET_ASIDE:]
    tokens = list(iterate_long_articles(shards, subject.tokenizer, args.articles, args.seed))
    halves = [tuple(part[: POSITIONS - 2] for part in (ids[: len(ids) // 2], ids[len(ids) // 2 :])) for ids in tokens]
    head = {"machine": describe_machine("cpu"), "set_aside": [shard.name for shard in shards]}
    head["tokens"] = {str(args.articles): sum(map(len, tokens))}
    rows = json.loads(args.output.read_text())["runs"] if args.output.is_file() else []
    for reading in args.readings:
        key = dict(zip(KEY, (reading, args.articles, args.seed), strict=True))
        if any(key.items() <= row.items() for row in rows):
            continue
        started = time.process_time()
        model = AutoModel.from_pretrained(make_model(reading, subject, args.work_dir, args.seed)).eval()
        timing = {"making_seconds": round(time.process_time() - started, 1)}
        rows.append(key | measure(reading, subject, halves, model) | timing)
        write_rows(args.output, head, rows, KEY)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readings", nargs="+", choices=ALL, default=ALL, metavar="READING", help=f"from {ALL}")
    parser.add_argument("--articles", type=int, default=200, help="number of articles (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn articles (default: %(default)s)")
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--work_dir", type=Path, required=True, help="folder of the models; existing ones are reused")
    parser.add_argument("--data_dir", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/long/results/long_inputs.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
