"""Measure conversions to fewer heads on chemistry models that were not used for tuning: an ALBERT and a BERT.

The models come from the PyPI packages rxnmapper 0.4.3 (ALBERT, 8 heads) and rxnfp 0.1.0 (BERT, 4 heads). They were
trained on masked tokens of chemical reactions. The 50,000 reactions come from the PyPI package drfp 0.3.7. `convert`
converts the models with its defaults on 2,048 reactions of the training split. The score is the share of masked tokens
that are predicted in 600 reactions of the test split.

Example:
    pip download --no-deps rxnmapper==0.4.3 rxnfp==0.1.0 && pip download --no-deps --no-binary :all: drfp==0.3.7
    python -m benchmarks.convert.reactions --albert rxnmapper-0.4.3-py3-none-any.whl \
        --bert rxnfp-0.1.0-py3-none-any.whl --reactions drfp-0.3.7/data/schneider50k.tsv --work_dir build/reactions
"""

import argparse
import csv
import json
import random
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.convert.conversion_quality import make_run_record
from hf_attn_variants.cli import main as command
from hf_attn_variants.files import atomic_write, load_json

# The folder of each model in its wheel, and the class of the model.
SOURCES = {
    "albert": ("rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k", "AlbertForMaskedLM"),
    "bert": ("rxnfp/models/transformers/bert_pretrained", "BertForMaskedLM"),
}
# A SMILES token is an atom in brackets, a two-letter atom, a two-digit ring number, the arrow, or a character.
TOKEN_PATTERN = r"\[[^\]]+\]|Br|Cl|%\d\d|>>|."
MASKED_SHARE, BATCH, MAX_LENGTH = 0.15, 50, 256


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--albert", type=Path, help="the wheel of rxnmapper")
    parser.add_argument("--bert", type=Path, help="the wheel of rxnfp")
    parser.add_argument("--reactions", type=Path, required=True, help="the file schneider50k.tsv of drfp")
    parser.add_argument("--num_key_value_heads", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--test_reactions", type=int, default=600)
    parser.add_argument("--work_dir", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/reactions.json")
    args = parser.parse_args(arguments)
    if not (args.albert or args.bert):
        parser.error("Give --albert, --bert or both.")
    return args


def unpack(name: str, wheel: Path, folder: Path) -> Path:
    """Write the model of a wheel as a checkpoint with safetensors and a tokenizer.json, unless the folder exists."""
    if folder.is_dir():
        return folder
    inside, head = SOURCES[name]
    with tempfile.TemporaryDirectory(dir=folder.parent) as stage, zipfile.ZipFile(wheel) as archive:
        for file_name in ("pytorch_model.bin", "config.json", "vocab.txt"):
            archive.extract(f"{inside}/{file_name}", stage)
        source, checkpoint = Path(stage) / inside, Path(stage) / "made"
        checkpoint.mkdir()
        state = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
        tensors = {key: tensor.clone().contiguous() for key, tensor in state.items() if "position_ids" not in key}
        save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
        model_type = {"model_type": name, "architectures": [head], "pad_token_id": 0}
        atomic_write(checkpoint / "config.json", json.dumps(load_json(source / "config.json") | model_type))
        make_tokenizer((source / "vocab.txt").read_text(encoding="utf-8").splitlines()).save_pretrained(checkpoint)
        checkpoint.rename(folder)
    return folder


def make_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Return a SMILES tokenizer with a vocabulary in the order of the embedding matrix."""
    numbers: dict[str, int] = {}
    for number, word in enumerate(words):
        numbers.setdefault(word, number)
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex(TOKEN_PATTERN), "isolated")
    special = [(token, numbers[token]) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    names = {f"{token.lower()}_token": f"[{token}]" for token in ("UNK", "SEP", "PAD", "CLS", "MASK")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)


def read_reactions(path: Path) -> dict[str, list[str]]:
    """Return the reactions of each split, shuffled with a fixed seed."""
    splits: dict[str, list[str]] = {"train": [], "test": []}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            splits[row["split"]].append(row["rxn"])
    for reactions in splits.values():
        random.Random(0).shuffle(reactions)
    return splits


@torch.no_grad()
def compute_masked_accuracy(folder: Path, texts: list[str], max_length: int = MAX_LENGTH) -> float:
    """Return the share of masked tokens that a model predicts, with the same masks for each model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    special, generator = torch.tensor(tokenizer.all_special_ids), torch.Generator().manual_seed(5)
    right = total = 0
    for begin in range(0, len(texts), BATCH):
        options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": max_length}
        batch = tokenizer(texts[begin : begin + BATCH], **options)
        ids = batch["input_ids"]
        word = batch["attention_mask"].bool() & ~torch.isin(ids, special)
        masked = word & (torch.rand(word.shape, generator=generator) < MASKED_SHARE)
        masked_ids = ids.masked_fill(masked, tokenizer.mask_token_id)
        logits = model(input_ids=masked_ids, attention_mask=batch["attention_mask"]).logits
        right += int((logits[masked].argmax(-1) == ids[masked]).sum())
        total += int(masked.sum())
    return right / total


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Convert and score the models of the missing rows, write the JSON file after each row, and return all rows."""
    transformers.logging.set_verbosity_error()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    reactions = read_reactions(args.reactions)
    atomic_write(args.work_dir / "train.txt", "\n".join(reactions["train"]) + "\n")
    report = load_json(args.output) if args.output.is_file() else {"runs": [], "rows": []}
    report["runs"].append(make_run_record())
    for name in SOURCES:
        if (wheel := getattr(args, name)) is None:
            continue
        source = unpack(name, wheel, args.work_dir / name)
        query_heads = load_json(source / "config.json")["num_attention_heads"]
        for heads in (None, *(count for count in args.num_key_value_heads if count < query_heads)):
            key = {"model": name, "num_key_value_heads": heads}
            if any(key.items() <= row.items() for row in report["rows"]):
                continue
            folder = source if heads is None else convert(source, heads, args.work_dir)
            quality = None if heads is None else load_json(folder / "conversion_report.json")["quality"]
            accuracy = compute_masked_accuracy(folder, reactions["test"][: args.test_reactions])
            row = {"masked_accuracy": accuracy, "quality": quality, "run": len(report["runs"]) - 1}
            report["rows"].append(key | row)
            atomic_write(args.output, json.dumps(report, indent=1) + "\n")
            print(f"{name}, {heads or 'all'} key/value heads: {accuracy:.4f} of masked tokens", flush=True)
    return report["rows"]


def convert(source: Path, heads: int, work_dir: Path) -> Path:
    """Convert a model with the defaults of `convert`, unless the folder exists."""
    folder = work_dir / f"{source.name}-{heads}"
    argv = ["convert", str(source), "--num_key_value_heads", str(heads), "--output_dir", str(folder)]
    if not folder.is_dir() and command([*argv, "--calibration_file", str(work_dir / "train.txt")]):
        raise SystemExit(f"{source} was not converted to {heads} heads")
    return folder


if __name__ == "__main__":
    main(parse_args())
