"""Check whether CTranslate2 generates the same tokens as `generate` with checkpoints of `attn-variants export`.

Each translation model runs unchanged and with fewer key/value heads (averaged) on 50 sentences of Multi30k's
validation set, in one padded batch, greedily and with 4 beams. Each Whisper model runs greedily on recordings. Whisper
models with fewer heads must be calibrated, because models with averaged heads repeat one token endlessly in every
engine. Beam search is compared with equal scores (a length penalty of 0), and with each library's defaults. The
results do not depend on the speed of the machine.

Example:
    python -m benchmarks.speed.ctranslate2_tokens --model ../shared/data/checkpoints/t5-mini-multi30k-en-de
"""

import argparse
import gzip
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ctranslate2
import torch
import transformers

import hf_attn_variants
from hf_attn_variants.conversion.calibration.examples import AUDIO_FILES, load_audio
from hf_attn_variants.export.ctranslate2 import export_ctranslate2
from hf_attn_variants.files import atomic_write

FOLDER = Path(__file__).resolve().parent
# Key/value heads of the encoder, the decoder and cross-attention; None: as many as query heads.
HEADS = ((None, None), (2, 2), (1, 1), (4, 1), (None, 2))
SENTENCES, NEW_TOKENS, HEARD_TOKENS = 50, 60, 120
# The searches that are compared in each precision. Beam search is compared only in float32.
QUANTIZATIONS = {"float32": ("greedy", "4 beams", "4 beams, defaults"), "int8": ("greedy",), "bfloat16": ("greedy",)}
SEARCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"num_beams": 1}, {"beam_size": 1, "min_decoding_length": 0}),
    "4 beams": (
        {"num_beams": 4, "length_penalty": 0.0, "early_stopping": False},
        {"beam_size": 4, "length_penalty": 0, "min_decoding_length": 0},
    ),
    "4 beams, defaults": ({"num_beams": 4}, {"beam_size": 4}),
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, nargs="*", default=[], help="folders of models that translate English")
    parser.add_argument("--whisper", type=Path, nargs="*", default=[], help="folders of (converted) Whisper models")
    parser.add_argument("--audio_dir", type=Path, help="folder of recordings for the Whisper models")
    parser.add_argument("--recordings", type=int, default=12, help="number of recordings")
    parser.add_argument("--data_dir", type=Path, default=FOLDER.parents[2] / "shared/data")
    parser.add_argument("--output_dir", type=Path, default=FOLDER / "results")
    args = parser.parse_args()
    if args.whisper and args.audio_dir is None:
        parser.error("--whisper requires --audio_dir")
    return args


def main(args: argparse.Namespace) -> None:
    """Convert and export the models, compare their tokens, and write the JSON after each row."""
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, Any]] = []
    versions = {"ctranslate2": ctranslate2.__version__, "transformers": transformers.__version__}
    args.output_dir.mkdir(parents=True, exist_ok=True)
    models = (
        *(measure_translations(path, args) for path in args.model),
        *(measure_transcriptions(path, args) for path in args.whisper),
    )
    for row in itertools.chain(*models):
        rows.append(row)
        print(json.dumps(row), flush=True)
        result = versions | {"torch": torch.__version__, "runs": rows}
        atomic_write(args.output_dir / "ctranslate2_tokens.json", json.dumps(result, indent=1) + "\n")


def convert_heads(source: Path, encoder: int | None, decoder: int | None, folder: Path) -> Path:
    """Return the folder of a checkpoint with fewer heads, or `source` if the numbers of heads are unchanged."""
    fields = {"num_key_value_heads": decoder, "encoder_num_key_value_heads": encoder}
    fields = {name: heads for name, heads in fields.items() if heads is not None}
    if not fields:
        return source
    hf_attn_variants.convert(source, **fields, method="mean", output_dir=folder)
    return folder


def measure_translations(source: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each conversion of a translation model, each precision and each search."""
    with gzip.open(args.data_dir / "multi30k/val.en.gz", "rt", encoding="utf-8") as file:
        lines = [line.strip() for line in itertools.islice(file, SENTENCES)]
    for encoder, decoder in HEADS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = convert_heads(source, encoder, decoder, Path(scratch) / "model")
            model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
            end = model.generation_config.eos_token_id
            for quantization, searches in QUANTIZATIONS.items():
                target = Path(scratch) / quantization
                written = export_ctranslate2(folder, target, quantization=quantization)
                tokenizer: Any = transformers.AutoTokenizer.from_pretrained(target)
                translator = ctranslate2.Translator(str(target), intra_threads=torch.get_num_threads())
                batch = tokenizer(lines, padding=True, return_tensors="pt", return_token_type_ids=False)
                texts = [tokenizer.convert_ids_to_tokens(tokenizer(line).input_ids) for line in lines]
                for search in searches:
                    generate_options, translator_options = SEARCHES[search]
                    tokens = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False, **generate_options)
                    expected = [cut_at_end_token(row[1:], end) for row in tokens.tolist()]
                    outputs = translator.translate_batch(texts, max_decoding_length=NEW_TOKENS, **translator_options)
                    numbers = [tokenizer.convert_tokens_to_ids(output.hypotheses[0]) for output in outputs]
                    yield make_result_row(source, written, search, expected, numbers, target)


@torch.no_grad()
def measure_transcriptions(source: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each precision of a Whisper model, which transcribes greedily."""
    files = sorted(path for path in args.audio_dir.iterdir() if path.suffix in AUDIO_FILES)[: args.recordings]
    model: Any = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(source).eval()
    processor: Any = transformers.AutoProcessor.from_pretrained(source)
    samples = [load_audio(path)[0] for path in files]
    rate = processor.feature_extractor.sampling_rate
    features = [processor(sample, sampling_rate=rate, return_tensors="pt").input_features for sample in samples]
    batch = torch.cat(features)
    options = {"language": "en", "task": "transcribe", "num_beams": 1, "max_new_tokens": HEARD_TOKENS}
    tokens = model.generate(batch, attention_mask=torch.ones_like(batch[:, 0], dtype=torch.long), **options)
    end, start = model.generation_config.eos_token_id, model.generation_config.no_timestamps_token_id
    expected = [cut_at_end_token(row[row.index(start) + 1 if start in row else 0 :], end) for row in tokens.tolist()]
    names = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    prompt = processor.tokenizer.convert_tokens_to_ids(names)
    for quantization in QUANTIZATIONS:
        with tempfile.TemporaryDirectory() as scratch:
            target = Path(scratch) / quantization
            written = export_ctranslate2(source, target, quantization=quantization)
            whisper = ctranslate2.models.Whisper(str(target), intra_threads=torch.get_num_threads())
            storage = ctranslate2.StorageView.from_array(batch.numpy())
            outputs = whisper.generate(storage, [prompt] * len(files), beam_size=1, max_length=2 * HEARD_TOKENS)
            yield make_result_row(source, written, "greedy", expected, [f.sequences_ids[0] for f in outputs], target)


def cut_at_end_token(row: list[int], end: int) -> list[int]:
    """Return the tokens before the end token, or all tokens if it does not occur."""
    return row[: row.index(end)] if end in row else row


def make_result_row(
    source: Path, written: Any, search: str, expected: list[list[int]], actual: list[list[int]], target: Path
) -> dict[str, Any]:
    """Return a row of the JSON report."""
    return {
        "model": source.name,
        "encoder_heads": written.heads["encoder_num_key_value_heads"][1],
        "decoder_heads": written.heads["num_key_value_heads"][1],
        "quantization": written.quantization,
        "search": search,
        "same": sum(map(list.__eq__, expected, actual)),
        "of": len(expected),
        "megabytes": round((target / "model.bin").stat().st_size / 1e6, 1),
    }


if __name__ == "__main__":
    main(parse_args())
