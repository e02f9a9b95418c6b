"""Check which layers `keep_matching_layers` should leave unconverted, on MiniLM and on other encoders.

Two of MiniLM's six layers are token-matching layers, and fine-tuning on pairs needs them. This script converts MiniLM,
a BERT of 12 layers for chemical reactions (PyPI rxnfp, see `reactions.py`) and the encoder of the T5. It leaves no
layer unconverted, each single layer, the two layers that `keep_matching_layers` chooses, or the two layers with the
lowest shares. The models are scored without training. MiniLM and the BERT get hedgehog features, because a conversion
to one head does not change the score of the BERT. The encoder of the T5 gets one of its eight heads. Existing rows of
the JSON file are kept.

Example:
    python -m benchmarks.convert.kept_layers minilm
    python -m benchmarks.convert.kept_layers t5-mini
    python -m benchmarks.convert.kept_layers bert --bert rxnfp-0.1.0-py3-none-any.whl \
        --reactions drfp-0.3.7/data/schneider50k.tsv --work_dir build/reactions
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer

from benchmarks.convert.conversion_subjects import SentenceEncoder, Translator
from benchmarks.convert.reactions import compute_masked_accuracy, read_reactions, unpack
from benchmarks.machine import describe_machine
from benchmarks.run_records import write_rows
from hf_attn_variants.conversion import Calibration, convert_checkpoint
from hf_attn_variants.files import load_json

KEY = ("model", "kept")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SUBJECTS)
    parser.add_argument("--bert", type=Path, help="the wheel of rxnfp")
    parser.add_argument("--reactions", type=Path, help="the file schneider50k.tsv of drfp")
    parser.add_argument("--work_dir", type=Path, help="folder for the unpacked BERT")
    parser.add_argument("--calibration_size", type=int, default=512)
    parser.add_argument("--fit_steps", type=int, default=100)
    parser.add_argument("--test_examples", type=int, default=300)
    parser.add_argument("--data_dir", type=Path, default=Path(__file__).resolve().parents[3] / "shared/data")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/kept_layers.json")
    args = parser.parse_args(arguments)
    if args.model == "bert" and None in (args.bert, args.reactions, args.work_dir):
        parser.error("The model bert requires --bert, --reactions and --work_dir.")
    return args


class ReactionBert:
    """The BERT of rxnfp (12 layers, 4 heads), scored by the share of masked tokens that it predicts."""

    field, new, old, score_name = "attention_kernel", "hedgehog", None, "masked_accuracy"

    def __init__(self, args: argparse.Namespace):
        args.work_dir.mkdir(parents=True, exist_ok=True)
        self.source = unpack("bert", args.bert, args.work_dir / "bert")
        self.layers = load_json(self.source / "config.json")["num_hidden_layers"]
        reactions = read_reactions(args.reactions)
        self.calibration = Calibration(
            reactions["train"][: args.calibration_size],
            tokenizer=AutoTokenizer.from_pretrained(self.source),
            fit_steps=args.fit_steps,
        )
        self.test = reactions["test"][: args.test_examples]

    def score(self, folder: Path) -> float:
        """Return the share of masked tokens that a checkpoint predicts."""
        return compute_masked_accuracy(folder, self.test)


class Sentences:
    """MiniLM (6 layers, 12 heads), scored by the cosine between its embeddings and the original ones on Wikipedia."""

    field, new, old, score_name = "attention_kernel", "hedgehog", None, "cosine"

    def __init__(self, args: argparse.Namespace):
        self.subject = SentenceEncoder(args.data_dir)
        self.source = self.subject.source
        self.layers = load_json(self.source / "config.json")["num_hidden_layers"]
        self.calibration = Calibration(
            self.subject.sample_calibration_lines(0)[: args.calibration_size],
            tokenizer=self.subject.tokenizer,
            fit_steps=args.fit_steps,
        )

    def score(self, folder: Path) -> float:
        """Return the mean cosine between the embeddings of a checkpoint and those of the original model."""
        return self.subject.evaluate(folder)["cosine"]


class TranslatorEncoder:
    """The encoder of the T5 (4 layers, 8 heads), scored by the loss on the validation set (lower is better)."""

    field, new, old, score_name = "encoder_num_key_value_heads", 1, 8, "loss"

    def __init__(self, args: argparse.Namespace):
        self.subject = Translator(args.data_dir)
        self.source = self.subject.source
        self.layers = load_json(self.source / "config.json")["num_layers"]
        pairs = random.Random(0).sample(list(zip(*self.subject.train, strict=True)), args.calibration_size)
        self.calibration = Calibration(
            [source for source, _ in pairs],
            [target for _, target in pairs],
            tokenizer=self.subject.tokenizer,
            fit_steps=args.fit_steps,
        )

    def score(self, folder: Path) -> float:
        """Return the loss of a checkpoint, in nats per token."""
        return self.subject.evaluate(folder)["loss"]


SUBJECTS: dict[str, Any] = {"minilm": Sentences, "bert": ReactionBert, "t5-mini": TranslatorEncoder}


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the missing rows, print each one and add it to the file, and return all rows of the model."""
    transformers.logging.set_verbosity_error()
    runs = load_json(args.output)["runs"] if args.output.is_file() else []
    rows = [row for row in runs if row["model"] == args.model]
    subject = SUBJECTS[args.model](args)
    if not any(row["kept"] == "all" for row in rows):
        row = {"model": args.model, "kept": "all", subject.score_name: subject.score(subject.source)}
        rows.append(row)
        write(row, args)
    chosen = next((row for row in rows if "shares" in row), None)
    if chosen is None:  # measured first, because its shares determine the two layers with the lowest shares
        chosen = measure(
            subject, args, "keep_matching_layers", {subject.field: subject.new, "keep_matching_layers": 2}
        )
        rows.append(chosen)
    least_matching = sorted(range(subject.layers), key=lambda layer: chosen["shares"][layer])[:2]
    unconverted_layers: dict[str, list[int]] = {"none": [], "the two of the least shares": least_matching}
    unconverted_layers |= {f"layer {layer + 1}": [layer] for layer in range(subject.layers)}
    for name, layers in unconverted_layers.items():
        if any(row["kept"] == name for row in rows):
            continue
        values = [subject.old if layer in layers else subject.new for layer in range(subject.layers)]
        fields = {"per_layer_values": {subject.field: values}} if layers else {subject.field: subject.new}
        rows.append(measure(subject, args, name, fields))
    return rows


def measure(subject: Any, args: argparse.Namespace, label: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Convert the original model, score the result, write its row to the file, and return the row."""
    with tempfile.TemporaryDirectory() as folder:
        converted = Path(folder, "converted")
        report = convert_checkpoint(subject.source, converted, calibration=subject.calibration, **fields)
        score = subject.score(converted)
    row = {"model": args.model, "kept": label, subject.score_name: score, "seconds": report.seconds}
    if report.matching_shares is not None:
        row["shares"] = report.matching_shares
    write(row, args)
    return row


def write(row: dict[str, Any], args: argparse.Namespace) -> None:
    """Add a row to the file and print it."""
    settings = {"calibration_size": args.calibration_size, "fit_steps": args.fit_steps}
    write_rows(args.output, {"machine": describe_machine("cpu"), args.model: settings}, [row], KEY)
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(parse_args())
