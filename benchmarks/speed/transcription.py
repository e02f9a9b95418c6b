"""Measure how fast a trained Whisper model transcribes recordings with Transformers, `share_memory` and CTranslate2.

`serving.py` uses random weights and fixed lengths. In this script, a trained model transcribes speech and ends each
text itself, so the longest text determines the time of a batch. The engines take turns in one run, in float32 and
int8. A time is the median over rounds, and the report also contains the time of each round. It counts the recordings
whose text equals that of Transformers.

Example:
    python -m benchmarks.speed.transcription --checkpoint build/whisper-base --audio_dir build/speech/calibration
"""

import argparse
import copy
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.kept_memory import run
from benchmarks.page_faults import UsageRecorder, summarize_usages
from benchmarks.speed.timed_sizes import measure_sizes, parse_sizes
from hf_attn_variants import quantize, share_memory
from hf_attn_variants.conversion.calibration.examples import AUDIO_FILES, load_audio
from hf_attn_variants.export.ctranslate2 import export_ctranslate2
from hf_attn_variants.inspection.speed import get_round_order

UPSTREAM = "transformers"
# The torch engines, with the functions that are applied to the model in this order.
IN_TORCH: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "share_memory": (share_memory,),
    "int8": (quantize,),
    "share_memory, int8": (share_memory, quantize),
}
COMPUTE_TYPES = {"CTranslate2": "float32", "CTranslate2, int8": "int8_float32"}
Transcribe = Callable[[torch.Tensor, int], list[list[int]]]


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of a Whisper model")
    parser.add_argument("--audio_dir", type=Path, required=True, help="folder of recordings of up to 30 seconds")
    parser.add_argument("--batch_size", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--engines", nargs="*", help="engines in addition to Transformers; default: all")
    parser.add_argument("--language", default="en", help="language of the recordings, for multilingual models")
    return parse_sizes(parser, arguments, num_beams=[1, 5], max_new_tokens=120)


def list_recordings(args: argparse.Namespace) -> list[Path]:
    """Return as many audio files as the largest batch needs, in alphabetical order.

    Raises:
        SystemExit: if there are too few audio files or the checkpoint does not exist.
    """
    if not (args.checkpoint / "config.json").is_file():
        sys.exit(f"error: --checkpoint {args.checkpoint} has no config.json")
    audio_files = sorted(path for path in args.audio_dir.glob("*") if path.suffix.lower() in AUDIO_FILES)
    if len(audio_files) < (needed := max(args.batch_size)):
        sys.exit(f"error: --audio_dir {args.audio_dir} has {len(audio_files)} recordings, but a batch needs {needed}")
    return audio_files[:needed]


def get_engine_names(args: argparse.Namespace) -> list[str]:
    """Return the engines other than Transformers.

    Raises:
        SystemExit: if an engine does not exist or is not installed.
    """
    available = [*IN_TORCH, *(COMPUTE_TYPES if importlib.util.find_spec("ctranslate2") else ())]
    if unknown := [name for name in args.engines or () if name not in available]:
        sys.exit(f"error: --engines {unknown[0]!r} is not available; choose from {'; '.join(available)}")
    return available if args.engines is None else args.engines


class Engines:
    """The engines of a checkpoint.

    `by_name` has a function for each engine, which returns the token ids of a batch without prompt and end token.

    Args:
        args: The arguments of the command line.
        names: The engines other than Transformers.
        folder: The folder for the exported CTranslate2 model.
    """

    def __init__(self, args: argparse.Namespace, names: Sequence[str], folder: Path) -> None:
        self.processor: Any = transformers.AutoProcessor.from_pretrained(args.checkpoint)
        model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(args.checkpoint).eval()
        settings = model.generation_config
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        prompt = ["<|startoftranscript|>", "<|notimestamps|>"]
        if getattr(settings, "is_multilingual", False):
            options |= {"language": args.language, "task": "transcribe"}
            prompt[1:1] = [f"<|{args.language}|>", "<|transcribe|>"]
        self.options, self.prompt = options, self.processor.tokenizer.convert_tokens_to_ids(prompt)
        self.end = settings.eos_token_id
        self.by_name: dict[str, Transcribe] = {UPSTREAM: self.of_torch(model)}
        for name in names:
            if name in COMPUTE_TYPES:
                self.by_name[name] = self.of_ctranslate2(folder / "exported", COMPUTE_TYPES[name], args)
                continue
            engine_model = copy.deepcopy(model)
            for change in IN_TORCH[name]:
                change(engine_model)
            self.by_name[name] = self.of_torch(engine_model)

    def of_torch(self, model: Any) -> Transcribe:
        """Return a function that transcribes with a model's `generate`."""

        @torch.no_grad()
        def transcribe(features: torch.Tensor, beams: int) -> list[list[int]]:
            frame_mask = torch.ones_like(features[:, 0], dtype=torch.long)
            rows = model.generate(features, attention_mask=frame_mask, num_beams=beams, **self.options)
            return [self.text_of(row) for row in rows.tolist()]

        return transcribe

    def of_ctranslate2(self, exported: Path, compute_type: str, args: argparse.Namespace) -> Transcribe:
        """Return a function that transcribes with CTranslate2, after exporting the model if necessary."""
        import ctranslate2

        if not exported.exists():
            export_ctranslate2(args.checkpoint, exported)
        options = {"compute_type": compute_type, "intra_threads": args.num_threads}
        whisper = ctranslate2.models.Whisper(str(exported), **options)

        def transcribe(features: torch.Tensor, beams: int) -> list[list[int]]:
            storage, prompts = ctranslate2.StorageView.from_array(features.numpy()), [self.prompt] * len(features)
            # CTranslate2 generates at most half as many tokens as `max_length`.
            outputs = whisper.generate(storage, prompts, beam_size=beams, max_length=2 * args.max_new_tokens)
            return [self.text_of(output.sequences_ids[0]) for output in outputs]

        return transcribe

    def text_of(self, row: list[int]) -> list[int]:
        """Return the tokens of a row without the prompt and the end token, if it contains them."""
        start = len(self.prompt) if row[: len(self.prompt)] == self.prompt else 0
        return row[start : row.index(self.end) if self.end in row else None]


def extract_features(paths: Sequence[Path], processor: Any) -> torch.Tensor:
    """Return the input features [b, mel bins, frames] of recordings."""
    parts = []
    for path in paths:
        samples, rate = load_audio(path)
        parts.append(processor(samples, sampling_rate=rate, return_tensors="pt").input_features)
    return torch.cat(parts)


def measure(engines: Engines, features: torch.Tensor, rounds: int, batch_size: int, length: int, beams: int) -> dict:
    """Return a row for one size: the times in milliseconds, and how many texts equal those of Transformers."""
    batch = features[:batch_size]
    texts = {name: run(batch, beams) for name, run in engines.by_name.items()}  # this is also the warm-up
    usages: dict[str, list[Any]] = {name: [] for name in engines.by_name}
    for number in range(rounds):
        for name in get_round_order(list(engines.by_name), number):
            with UsageRecorder() as watch:
                engines.by_name[name](batch, beams)
            usages[name].append(watch.usage)
    times = {name: [1e3 * usage.seconds for usage in engine_usages] for name, engine_usages in usages.items()}
    return {
        "batch_size": batch_size,
        "source_length": length,
        "num_beams": beams,
        "tokens": [len(text) for text in texts[UPSTREAM]],
        "same_texts": {
            name: sum(map(list.__eq__, texts[UPSTREAM], engine_usages)) for name, engine_usages in texts.items()
        },
        "milliseconds": {name: statistics.median(engine_usages) for name, engine_usages in times.items()},
        "all_milliseconds": times,
        "usage": {"milliseconds": {name: summarize_usages(engine_usages) for name, engine_usages in usages.items()}},
    }


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Measure each size, write the JSON and print the figures after it, and return the report."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.num_threads)
    paths, names = list_recordings(args), get_engine_names(args)
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(args, names, Path(folder))
        features = extract_features(paths, engines.processor)
        args.source_length = [features.shape[-1] // 2]  # the encoder halves the number of frames
        name = f"transcription_{args.checkpoint.name}_cpu"
        return measure_sizes(args, name, lambda *size: measure(engines, features, args.rounds, *size), format_row)


def format_row(row: dict[str, Any]) -> str:
    """Return the text to print for a row."""
    times, of = row["milliseconds"], row["batch_size"]
    cells = []
    for name, time in times.items():
        ratio, same = times[UPSTREAM] / time, row["same_texts"][name]
        cells.append(f"{name} {time / 1000:.1f} s ({ratio:.2f}x, {same} of {of} texts equal)")
    return ", ".join(cells)


if __name__ == "__main__":
    run(main, parse_args)
