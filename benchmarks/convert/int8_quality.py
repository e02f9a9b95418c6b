"""Measure the quality of real models in int8: a T5 and a Marian on Multi30k, MiniLM on STS-B, a Whisper on recordings.

Each model runs in float32, with `quantize`, and with `quantize_dynamic` of PyTorch. Models with `share_memory` and
variants run only with `quantize`, because their float32 outputs are equal to those of the original model. "agree" is
the share of tokens in the float32 output that are also the most likely ones for the quantized model after the same
preceding tokens. The script does not measure speed. It writes the JSON file after each row and keeps existing rows.

Example:
    python -m benchmarks.convert.int8_quality --data_dir ../shared/data
    python -m benchmarks.convert.int8_quality --data_dir ../shared/data --marian MARIAN --whisper WHISPER \\
        --audio_dir recordings --texts recordings.tsv
"""

import argparse
import copy
import csv
import io
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sacrebleu
import torch
import transformers
from transformers import (
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
)

from benchmarks.convert.conversion_subjects import SentenceEncoder, read_lines
from benchmarks.convert.word_errors import compute_word_error_rate
from benchmarks.machine import describe_machine
from hf_attn_variants import quantize, share_memory
from hf_attn_variants.conversion.calibration.examples import AUDIO_FILES, load_audio
from hf_attn_variants.files import atomic_write
from hf_attn_variants.inspection import similarity_spearman
from hf_attn_variants.registration import get_variant_model_class

FLOAT32, INT8, TORCHS, BFLOAT16 = "float32", "int8", "torch's dynamic int8", "bfloat16"
T5 = "checkpoints/t5-mini-multi30k-en-de"
Row = dict[str, Any]


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse `arguments`, or the command line if it is None."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True, help=f"folder with multi30k, glue/STS-B and {T5}")
    parser.add_argument(
        "--marian", type=Path, help="folder of a Marian model trained on Multi30k (see `train_marian.py`)"
    )
    parser.add_argument("--whisper", type=Path, help="folder of a Whisper model")
    parser.add_argument("--audio_dir", type=Path, help="folder of recordings for --whisper")
    parser.add_argument(
        "--texts", type=Path, help="a TSV file with the texts of the recordings, in the columns file and text"
    )
    parser.add_argument("--sentences", type=int, default=1000, help="number of sentences of the Multi30k test set")
    parser.add_argument("--recordings", type=int, default=10)
    parser.add_argument("--only", nargs="+", help="measure only models whose names begin with one of these")
    parser.add_argument(
        "--bfloat16", action="store_true", help="also measure bfloat16, which is slow on a CPU without it"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/int8_quality.json")
    args = parser.parse_args(arguments)
    if args.whisper and not (args.audio_dir and args.texts):
        parser.error("--whisper requires --audio_dir and --texts.")
    return args


def quantize_with_torch(model: Any) -> Any:
    """Return a copy that `torch.ao.quantization.quantize_dynamic` quantized."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.ao.quantization is deprecated", category=DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def list_quantizations(args: argparse.Namespace) -> dict[str, Callable[[Any], Any]]:
    """Return a function for each data type that is measured."""
    functions = {
        FLOAT32: lambda model: model,
        INT8: lambda model: quantize(copy.deepcopy(model)),
        TORCHS: quantize_with_torch,
    }
    return functions | ({BFLOAT16: lambda model: quantize(copy.deepcopy(model), "bfloat16")} if args.bfloat16 else {})


def measure_megabytes(model: Any) -> float:
    """Return the size of a model's saved state dict in megabytes."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return round(file.tell() / 1e6, 2)


class Translation:
    """A translation model on Multi30k, unchanged and with other forms of cross-attention."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace) -> None:
        self.name, self.folder = name, folder
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        lines = [read_lines(args.data_dir / f"multi30k/test_2016_flickr.{language}.gz") for language in ("en", "de")]
        self.sources, self.targets = (language[: args.sentences] for language in lines)
        self.batches = [
            {name: language for name, language in batch.items() if name in ("input_ids", "attention_mask")}
            for batch in (
                self.tokenizer(self.sources[start : start + 64], padding=True, return_tensors="pt")
                for start in range(0, len(self.sources), 64)
            )
        ]
        self.written: list[torch.Tensor] = []

    def iterate_models(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and the model of each form, beginning with the unchanged model."""
        upstream = AutoModelForSeq2SeqLM.from_pretrained(self.folder).eval()
        yield self.name, upstream
        yield f"{self.name}, shared", share_memory(copy.deepcopy(upstream))
        cls, width = get_variant_model_class(type(upstream).__name__), upstream.config.d_model
        for label, fields in (
            ("exact", {"cross_kv_lora_rank": width}),
            ("talking heads", {"talking_heads": "both"}),
        ):
            yield f"{self.name}, {label}", cls.from_pretrained(self.folder, **fields).eval()

    @torch.inference_mode()
    def compute_scores(self, model: Any, float32: Any) -> Row:
        """Return BLEU with greedy search, and the share of tokens that agree with the output of `float32`."""
        if not self.written:
            self.written = [
                float32.generate(**batch, max_new_tokens=64, do_sample=False, num_beams=1) for batch in self.batches
            ]
        end, agreeing, total, translations = float32.generation_config.eos_token_id, 0, 0, []
        for batch, written in zip(self.batches, self.written, strict=True):
            ids = model.generate(**batch, max_new_tokens=64, do_sample=False, num_beams=1)
            translations += self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            likeliest = model(**batch, decoder_input_ids=written[:, :-1]).logits.argmax(-1)
            is_end = written[:, 1:] == end
            real = is_end.cumsum(1) - is_end.long() == 0  # up to and including the first end token
            agreeing += int((likeliest == written[:, 1:])[real].sum())
            total += int(real.sum())
        bleu = sacrebleu.corpus_bleu(translations, [self.targets]).score
        return {
            "sentences": len(translations),
            "bleu": round(bleu, 2),
            "agree": round(agreeing / total, 4),
            "tokens": total,
        }


class Similarity:
    """MiniLM on the pairs of the STS-B dev set."""

    name = "MiniLM"

    def __init__(self, args: argparse.Namespace) -> None:
        self.subject = SentenceEncoder(args.data_dir)

    def iterate_models(self) -> Iterator[tuple[str, Any]]:
        """Yield the model, and its variant with talking heads that are initialized to the identity."""
        upstream = AutoModel.from_pretrained(self.subject.source).eval()
        yield self.name, upstream
        cls = get_variant_model_class(type(upstream).__name__)
        yield f"{self.name}, talking heads", cls.from_pretrained(self.subject.source, talking_heads="both").eval()

    def compute_scores(self, model: Any, float32: Any) -> Row:
        """Return Spearman's correlation with the human scores."""
        subject = self.subject
        return {
            "spearman": round(similarity_spearman(model, subject.tokenizer, subject.pairs, subject.scores), 4),
            "pairs": len(subject.pairs),
        }


class Speech:
    """A Whisper model on recordings with known texts."""

    name = "Whisper"

    def __init__(self, args: argparse.Namespace) -> None:
        self.folder = args.whisper
        self.tokenizer = AutoTokenizer.from_pretrained(args.whisper)
        with open(args.texts, encoding="utf-8", newline="") as file:
            texts = {row["file"]: row["text"] for row in csv.DictReader(file, delimiter="\t")}
        files = sorted(path for path in args.audio_dir.iterdir() if path.suffix in AUDIO_FILES and path.name in texts)
        files = files[: args.recordings]
        self.texts = [texts[path.name] for path in files]
        extractor = AutoFeatureExtractor.from_pretrained(args.whisper)
        rate = extractor.sampling_rate
        self.features = [
            extractor(load_audio(path)[0], sampling_rate=rate, return_tensors="pt").input_features for path in files
        ]
        self.source: list[str] | None = None

    def iterate_models(self) -> Iterator[tuple[str, Any]]:
        """Yield the unchanged model, and a copy with `share_memory`."""
        upstream = AutoModelForSpeechSeq2Seq.from_pretrained(self.folder).eval()
        yield self.name, upstream
        yield f"{self.name}, shared", share_memory(copy.deepcopy(upstream))

    @torch.inference_mode()
    def transcribe(self, model: Any) -> list[str]:
        """Return the greedy transcript of each recording."""
        texts: list[str] = []
        for features in self.features:
            features = features.to(model.dtype)
            mask = torch.ones_like(features[:, 0], dtype=torch.long)
            ids = model.generate(features, attention_mask=mask, do_sample=False, num_beams=1, max_new_tokens=120)
            texts += self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts

    def compute_scores(self, model: Any, float32: Any) -> Row:
        """Return the word error rates against the texts, and against the transcripts of `float32`."""
        self.source = self.source or self.transcribe(float32)
        transcripts = self.source if model is float32 else self.transcribe(model)
        return {
            "against_texts": compute_word_error_rate(self.texts, transcripts),
            "against_float32": compute_word_error_rate(self.source, transcripts),
        }


def make_subjects(args: argparse.Namespace) -> Iterator[Any]:
    """Yield the models to measure with their data."""
    yield Translation("T5", args.data_dir / T5, args)
    if args.marian:
        yield Translation("Marian", args.marian, args)
    yield Similarity(args)
    if args.whisper:
        yield Speech(args)


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the missing rows, write the JSON file after each row, and return its content."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    report = json.loads(args.output.read_text()) if args.output.is_file() else {"rows": []}
    done = {(row["model"], row["way"]) for row in report["rows"]}
    for subject in make_subjects(args):
        for name, float32 in subject.iterate_models():
            if args.only and not name.startswith(tuple(args.only)):
                continue
            for quantization, change in list_quantizations(args).items():
                if (name, quantization) in done or (quantization != INT8 and name != subject.name):
                    continue
                model = change(float32)
                row = {
                    "model": name,
                    "way": quantization,
                    "megabytes": measure_megabytes(model),
                    **subject.compute_scores(model, float32),
                }
                report["rows"].append(row)
                report["machine"] = describe_machine("cpu")
                atomic_write(args.output, json.dumps(report, indent=1) + "\n")
                print(json.dumps(row), flush=True)
    return report


if __name__ == "__main__":
    main(parse_args())
