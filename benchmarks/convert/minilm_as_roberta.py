"""Check that a RoBERTa with the weights of all-MiniLM-L6-v2 gives the same embeddings before and after a conversion.

RoBERTa is BERT with positions that begin after the id of the padding token, so that the weights of MiniLM also fit a
RoBERTa. Both models are converted to fewer heads with the same settings on the same text, and scored by Spearman's
correlation on STS-B dev. Then the original and the converted RoBERTa are trained as masked language models with a new
head on Wikipedia.

Example:
    python -m benchmarks.convert.minilm_as_roberta --num_key_value_heads 4
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, RobertaConfig, RobertaForMaskedLM

from benchmarks.convert.conversion_quality import make_run_record
from benchmarks.convert.conversion_subjects import SentenceEncoder
from hf_attn_variants.commands import convert as command
from hf_attn_variants.commands.training import pretrain
from hf_attn_variants.files import atomic_write
from hf_attn_variants.inspection import sentence_embeddings

ROOT = Path(__file__).resolve().parents[2]
POSITIONS = "embeddings.position_embeddings.weight"
MASKED_LM = "--max_length 64 --max_eval_samples 512 --per_device_train_batch_size 32 --learning_rate 5e-4 "
MASKED_LM += "--warmup_ratio 0.06 --eval_steps 100 --cpu --disable_tqdm"


def convert_to_roberta(bert: Any) -> RobertaForMaskedLM:
    """Return a RoBERTa with the same hidden states as a `BertModel`, and with a new masked-LM head.

    Its positions begin at the id of the padding token + 1.
    """
    values = bert.config.to_dict()
    shift = values["pad_token_id"] + 1
    for name in ("model_type", "architectures", "transformers_version"):
        values.pop(name, None)
    values["max_position_embeddings"] += shift
    torch.manual_seed(0)
    roberta = RobertaForMaskedLM(RobertaConfig(**values))
    weights = {name: weight for name, weight in bert.state_dict().items() if not name.startswith("pooler.")}
    weights[POSITIONS] = torch.cat([torch.zeros_like(weights[POSITIONS][:shift]), weights[POSITIONS]])
    roberta.roberta.load_state_dict(weights)
    return roberta.eval()


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Create the RoBERTa, convert and score both models, write the JSON file, and return its content."""
    transformers.logging.set_verbosity_error()
    subject = SentenceEncoder(args.data_dir)
    bert = AutoModel.from_pretrained(subject.source)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        convert_to_roberta(bert).save_pretrained(folder / "roberta")
        subject.tokenizer.save_pretrained(folder / "roberta")
        flags = subject.write_calibration_texts(folder, args.seed)
        for name, source in (("bert", Path(subject.source)), ("roberta", folder / "roberta")):
            started, output = time.perf_counter(), folder / f"{name}-converted"
            argv = ["--model_name_or_path", str(source), "--output_dir", str(output), "--disable_tqdm", *flags]
            argv += ["--num_key_value_heads", str(args.num_key_value_heads), "--fit_steps", str(args.fit_steps)]
            command.main(command.parse_args([*argv, "--seed", str(args.seed)]))
            plain = sentence_embeddings(AutoModel.from_pretrained(source), subject.tokenizer, subject.lines[:64])
            row = {"model": name, "before": subject.evaluate(source), "after": subject.evaluate(output)}
            row["largest_difference_from_bert"] = (plain - _compute_embeddings(bert, subject)).abs().max().item()
            rows.append(row | {"seconds": round(time.perf_counter() - started, 1)})
            print(rows[-1], flush=True)
        masked = [train_masked_lm(folder / name, args) for name in ("roberta", "roberta-converted") if args.mlm_steps]
    results = {"run": make_run_record(), "arguments": {k: str(v) for k, v in vars(args).items()}, "rows": rows}
    results["masked_lm"] = masked
    atomic_write(args.output, json.dumps(results, indent=1) + "\n")
    return results


def train_masked_lm(checkpoint: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train a checkpoint as a masked language model with `attn-variants pretrain`, and return its scores."""
    text = args.data_dir / "wikipedia"
    argv = ["--model_name_or_path", str(checkpoint), "--output_dir", f"{checkpoint}-masked-lm", *MASKED_LM.split()]
    argv += ["--train_file", *map(str, sorted(text.glob("train-*.txt.gz")))]
    argv += ["--validation_file", str(text / "valid.txt.gz"), "--seed", str(args.seed)]
    pretrain.main(pretrain.parse_args([*argv, "--max_train_steps", str(args.mlm_steps)]))
    results = json.loads(Path(f"{checkpoint}-masked-lm/all_results.json").read_text(encoding="utf-8"))
    log = Path(f"{checkpoint}-masked-lm/train_log.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "model": checkpoint.name,
        **{name: results[name] for name in ("steps", "train_tokens", "train_runtime", "gate_passed")},
        "evaluations": [row for row in map(json.loads, log) if "eval_loss" in row],
    }


def _compute_embeddings(bert: Any, subject: SentenceEncoder) -> torch.Tensor:
    return sentence_embeddings(bert, subject.tokenizer, subject.lines[:64])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num_key_value_heads", type=int, default=4)
    parser.add_argument("--fit_steps", type=int, default=0)
    parser.add_argument(
        "--mlm_steps", type=int, default=300, help="number of masked-LM training steps, or 0 for none (default: 300)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data_dir", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/convert/results/minilm_as_roberta.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
