"""Compare two orders of fitting layers: all layers at once, or one layer after the other.

The first run fits all layers to the original model at once, like `convert`. The second run converts one layer after
the other. The source of each step is the model whose earlier layers are already converted, so that the inputs and
target outputs come from this model. Both runs use the same texts and the same seed.

Example:
    python -m benchmarks.convert.fit_order --data_dir ../shared/data --subject minilm --num_key_value_heads 4 1
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForSeq2SeqLM

from benchmarks.convert.conversion_subjects import SUBJECTS
from benchmarks.machine import describe_machine
from hf_attn_variants.commands import convert as command
from hf_attn_variants.conversion import Calibration, convert
from hf_attn_variants.files import atomic_write

FIELD = "num_key_value_heads"


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--subject", choices=["minilm", "t5-mini"], default="minilm")
    parser.add_argument("--num_key_value_heads", type=int, nargs="+", default=[4])
    parser.add_argument(
        "--fit_steps", type=int, nargs="+", default=[0], help="numbers of fitting steps; 0 uses only the closed form"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--texts", type=int, help="number of calibration texts (default: all texts of the subject)")
    parser.add_argument("--output", type=Path, help="a JSON file, written after each row; its existing rows are kept")
    return parser.parse_args(argv)


def convert_at_once(model: Any, heads: int, calibration: Calibration, seed: int) -> Any:
    """Convert all layers at once, and fit each layer to its inputs in the original model."""
    return convert(model, heads, calibration=calibration, seed=seed)


def convert_in_order(model: Any, heads: int, calibration: Calibration, seed: int) -> Any:
    """Convert one layer after the other, and fit each layer to its inputs after the converted layers."""
    all_heads = model.config.num_attention_heads
    layers = getattr(model.config, "num_decoder_layers", model.config.num_hidden_layers)
    for layer in range(1, layers + 1):
        values = [heads] * layer + [all_heads] * (layers - layer)
        model = convert(model, calibration=calibration, seed=seed, per_layer_values={FIELD: values})
    return model


ORDERS = {"at once": convert_at_once, "in order": convert_in_order}


def main(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Convert in both orders, score the models, and print and return the rows."""
    subject: Any = SUBJECTS[args.subject](args.data_dir)
    auto: Any = AutoModelForSeq2SeqLM if args.subject == "t5-mini" else AutoModel
    report = json.loads(args.output.read_text()) if args.output and args.output.exists() else {"rows": []}
    rows = report["rows"]
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--model_name_or_path", str(subject.source), "--output_dir", "x", "--seed", str(seed)]
            calibration_data: Any = command.read_calibration_from_args(
                command.parse_args([*flags, *subject.write_calibration_texts(Path(folder), seed)])
            )
        calibration_data = replace(calibration_data, tokenizer=subject.tokenizer)
        if args.texts:
            targets = calibration_data.target_texts and calibration_data.target_texts[: args.texts]
            calibration_data = replace(
                calibration_data, texts=calibration_data.texts[: args.texts], target_texts=targets
            )
        for heads in args.num_key_value_heads:
            for steps in args.fit_steps:
                for name, order in ORDERS.items():
                    model = auto.from_pretrained(subject.source).eval()
                    converted_model = order(model, heads, replace(calibration_data, fit_steps=steps), seed).eval()
                    row = {"subject": subject.name, "order": name, FIELD: heads, "fit_steps": steps, "seed": seed}
                    row |= {"texts": len(calibration_data.texts), **_compute_scores(subject, converted_model)}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    if args.output:
                        atomic_write(
                            args.output,
                            json.dumps({"machine": describe_machine("cpu"), "rows": rows}, indent=1) + "\n",
                        )
    return rows


def _compute_scores(subject: Any, model: torch.nn.Module) -> dict[str, float]:
    if hasattr(subject, "compute_scores"):
        return {name: round(value, 4) for name, value in subject.compute_scores(model).items()}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: round(value, 4) for name, value in subject.evaluate(Path(folder)).items()}


if __name__ == "__main__":
    main(parse_args())
