"""The `attn-variants convert` command, which `scripts/convert_checkpoint.py` also runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_parser import (
    MODEL_NAMES,
    CommandParser,
    Flag,
    add_checkpoint_argument,
    add_flags,
    get_program_name,
    parse_with_checkpoint,
)
from ..conversion.calibration_settings import (
    AUDIO_CALIBRATION_SIZE,
    CALIBRATION_SIZE,
    FIT_DEFAULTS,
    MAX_AUDIO_LENGTH,
    MAX_DEFAULT_LENGTH,
    PASSAGE_LENGTH,
    QUICK_AUDIO_SIZE,
    QUICK_SIZE,
    Calibration,
)
from ..files import CARD_NAME, check_output_dir
from ..modeling.fields.field_table import VARIANT_FIELDS, describe_field
from ..training.engine.settings import parse_json_flag

# Copies of constants in `conversion`, whose modules take several seconds to import. A test compares the copies.
METHOD_NAMES = ("aligned", "calibrated", "first", "mean", "random")
POSITION_EXTENSION_CHOICES = ("tiled", "interpolated")
DTYPE_NAMES = ("bfloat16", "float16", "float32", "float64")

# The fields whose flags are listed first in the help.
MAIN_FIELDS = ("num_key_value_heads", "kv_lora_rank", "cross_kv_lora_rank", "talking_heads")
USAGE = """%(prog)s CHECKPOINT --output_dir FOLDER [--num_key_value_heads N]
       [--kv_lora_rank N] [--cross_kv_lora_rank N] [--talking_heads KIND]
       [--calibration_file FILE] [options]"""
EXAMPLE = """\
examples (a BERT model calibrated on lines of text, and a BERT model fine-tuned
for question answering and calibrated on its text pairs):
  %(prog)s google-bert/bert-base-uncased \\
      --num_key_value_heads 4 --calibration_file wikipedia.txt \\
      --output_dir bert-base-gqa4
  %(prog)s runs/squad --num_key_value_heads 4 \\
      --calibration_file pairs.jsonl --calibration_columns question context \\
      --max_length 256 --output_dir squad-gqa4
a T5 model whose decoder caches 128 values per source token:
  %(prog)s runs/translation \\
      --cross_kv_lora_rank 128 --calibration_file train.en \\
      --calibration_target_file train.de --output_dir translation-r128
a Whisper model that caches 128 values per audio position, calibrated on
recordings:
  %(prog)s openai/whisper-tiny \\
      --cross_kv_lora_rank 128 --calibration_audio_dir recordings \\
      --output_dir whisper-tiny-r128
"""

CALIBRATION_OPTIONS = """calibration_file calibration_audio_dir calibration_columns calibration_target_file
calibration_target_column calibration_size source_lang target_lang max_length calibration_passages fit_steps""".split()

# Options that become fields of `Calibration`.
AUDIO_OPTIONS = ("calibration_audio_dir", "calibration_size", "max_length", "fit_steps")
TEXT_SETTINGS = ("source_lang", "target_lang", "max_length", "calibration_passages", "fit_steps")


METHOD_FLAG = {
    Flag("method", METHOD_NAMES): "method for merging heads (default: calibrated with --calibration_file, otherwise "
    "mean, which must be set explicitly for the heads of a decoder)"
}
CALIBRATION_RESULT_FLAGS = {
    Flag("quick", bool): f"use fewer examples ({QUICK_SIZE} texts or {QUICK_AUDIO_SIZE} recordings) and no fitting "
    "steps, for a first result in a fraction of the time",
    Flag("strict", bool): "exit with status 1 if the conversion is not within tolerance on held-out examples, and "
    "write the report instead of the model",
    Flag("attention_errors", bool): "also print the error of each attention module",
}
KV_CACHE_BYTES_HELP = (
    "for encoder-decoder models: limits for the decoder cache over all layers, in bytes per source token and in bytes "
    "per generated token. The ranks with the smallest error are chosen, separately for each self-attention layer"
)
MATCHING_FLAG = {
    Flag("keep_matching_layers", int, metavar="N"): "for encoders: do not convert the N token-matching layers, whose "
    "heads attend most to other occurrences of the same word (recommended for models fine-tuned on text pairs)"
}
POSITION_FLAGS = {
    Flag("max_position_embeddings", int): "for BERT and similar models: number of positions in the variant, and "
    "model_max_length of its tokenizer",
    Flag("position_extension", POSITION_EXTENSION_CHOICES): "method for adding learned positions. tiled repeats "
    "them, which does not change the outputs for short texts. interpolated stretches them (default: tiled)",
}
DTYPE_FLAG = {Flag("dtype", DTYPE_NAMES): "data type of the floating-point tensors (default: as in the checkpoint)"}
TEXT_FLAGS = {
    Flag("calibration_file"): "file with examples of the kind of text that the model is used for: one per line, or a "
    "table (.csv, .tsv, .json or .jsonl), optionally with .gz",
    Flag("calibration_columns", nargs="+", metavar="COLUMN"): "table column with texts, or two columns for models "
    "that read text pairs (default: text)",
    Flag("calibration_target_file"): "for encoder-decoder models: file with the target for each line (default: the "
    "greedy outputs of the model)",
    Flag("calibration_target_column"): "for encoder-decoder models: table column with targets",
    Flag("calibration_size", int): f"number of examples to draw from the file at random (default: {CALIBRATION_SIZE})",
    Flag("source_lang"): "for mBART, M2M100 and NLLB: source language, named as in the tokenizer",
    Flag("target_lang"): "for mBART, M2M100 and NLLB: target language, named as in the tokenizer",
    Flag("max_length", int): "maximum number of tokens, to which examples are truncated (default: the length of the "
    f"longest example, up to the number of positions in the model or, if unlimited, {MAX_DEFAULT_LENGTH}; "
    f"{PASSAGE_LENGTH} for passages)",
}
PASSAGES_HELP = (
    "for encoders: join half of the examples with the examples that follow them, to form passages of at least 16 "
    "tokens, so that the heads are also fitted to long texts (default: yes, for single texts)"
)
AUDIO_FLAG = {
    Flag("calibration_audio_dir", metavar="FOLDER"): "for Whisper: folder with recordings of the kind that the model "
    "is used for, optionally in subfolders (PCM wav, or flac, mp3 and ogg if soundfile is installed). Only the first "
    "window of each recording (30 s) is used. The decoder reads the greedy output of the model. The defaults are "
    f"--calibration_size {AUDIO_CALIBRATION_SIZE} and --max_length {MAX_AUDIO_LENGTH}",
}


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments.

    Raises:
        OSError: if the output folder cannot be created. This is checked before slow imports.
    """
    parser = make_parser()
    args = parse_with_checkpoint(parser, argv)
    check_output_dir(args.output_dir)
    return args


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser that `parse_args` uses."""
    parser = CommandParser(
        prog=get_program_name("convert_checkpoint.py"),
        usage=USAGE,
        description="Convert a checkpoint with multi-head attention to grouped-query, multi-query, latent, sparse, "
        "linear or talking-heads attention without loading the whole model. Checkpoints with grouped heads or "
        "latents can be converted further, or back to multi-head attention without loss. Supported models: "
        f"{MODEL_NAMES}.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument("--output_dir", required=True, help="new or empty output folder")
    _add_field_arguments(parser, None, main=True)
    add_flags(parser, METHOD_FLAG)
    calibration = parser.add_argument_group(
        "calibration", "text or audio on which the calibrated methods fit the new attention"
    )
    add_calibration_arguments(calibration)
    add_flags(calibration, CALIBRATION_RESULT_FLAGS)
    heads = parser.add_argument_group(
        "heads, latents and cache", "settings for individual places or layers, and cache limits"
    )
    _add_field_arguments(heads, None, main=False)
    heads.add_argument(
        "--kv_cache_bytes", type=int, nargs=2, metavar=("SOURCE", "GENERATED"), help=KV_CACHE_BYTES_HELP
    )
    add_flags(heads, MATCHING_FLAG)
    patterns = parser.add_argument_group("windows", "range of tokens that a token attends to, and number of positions")
    _add_field_arguments(patterns, "pattern")
    add_flags(patterns, POSITION_FLAGS)
    kernels = parser.add_argument_group("kernels", "linear attention, fitted to the text in --calibration_file")
    _add_field_arguments(kernels, "kernel")
    files = parser.add_argument_group("loading and saving")
    add_flags(files, DTYPE_FLAG, "seed", "allow_pickle", "revision", "token", "disable_tqdm")
    return parser


def _add_field_arguments(group: argparse._ActionsContainer, kind: str | None, main: bool | None = None) -> None:
    """Add a flag for each variant field that a conversion can set.

    Args:
        group: the argument group.
        kind: "pattern" or "kernel", to add the fields of this kind. If None, all other fields are added.
        main: whether to add only the flags in `MAIN_FIELDS`, or only the other flags. If None, both are added.
    """
    for row in VARIANT_FIELDS:
        row_kind = next((tag for tag in ("pattern", "kernel") if tag in row.tags), None)
        if row_kind != kind or "from_scratch" in row.tags:
            continue
        for prefix in row.prefixes:
            if main is not None and (prefix + row.name in MAIN_FIELDS) != main:
                continue
            default_value, choices = row.get_default(prefix), row.get_choices(prefix)
            default = f" (default: {default_value})" if default_value not in (None, (), False) else ""
            options: dict[str, Any] = {"help": describe_field(prefix + row.name) + default}
            if choices:
                options["choices"] = list(choices)
            if row.kind is bool:
                options |= {"action": "store_true", "default": None}
            elif row.kind is list:
                options["nargs"] = "*" if prefix and row.inherits else "+"
            elif row.kind is tuple:
                options |= {"nargs": 2, "type": float, "metavar": "NUMBER"}
            else:
                options["type"] = parse_json_flag if row.kind is dict else row.kind
            group.add_argument(f"--{prefix}{row.name}", **options)


def add_calibration_arguments(group: argparse._ActionsContainer, fit_steps: int = FIT_DEFAULTS["fit_steps"]) -> None:
    """Add the flags for calibration text or audio and for fitting.

    Args:
        group: the argument group.
        fit_steps: the default for --fit_steps that the help shows.
    """
    add_flags(group, TEXT_FLAGS)
    group.add_argument("--calibration_passages", action=argparse.BooleanOptionalAction, help=PASSAGES_HELP)
    steps = "for the calibrated method: number of Adam steps per attention module after the closed form. 0 uses only "
    add_flags(group, {Flag("fit_steps", int): f"{steps}the closed form (default: {fit_steps})", **AUDIO_FLAG})


def main(args: argparse.Namespace) -> Any:
    """Convert the checkpoint, print a summary and return the `ConversionReport`.

    Raises:
        ValueError: if the arguments or the checkpoint are not valid (see `convert_checkpoint`).
        OSError: if a file cannot be read or written.
    """
    from ..conversion.conversions import convert_checkpoint
    from ..hub.card import write_model_card
    from ..progress import disable_progress_bars
    from ..registration import PREFIX

    options = _get_conversion_options(args)
    with disable_progress_bars(args.disable_tqdm):
        report = convert_checkpoint(**options)
    print(report.summary(args.attention_errors))
    if write_model_card(Path(args.output_dir).expanduser()):
        print(f"{CARD_NAME} is the model card. `attn-variants push` adds the name of the repository to it.")
    if report.architecture.startswith(PREFIX):
        print("To load the model, use from_pretrained(..., trust_remote_code=True), or import hf_attn_variants first.")
    else:
        print("The checkpoint needs no remote code. To load the model, use from_pretrained.")
    return report


def check_convertible(args: argparse.Namespace) -> None:
    """Run those checks in `main` that do not need the weights, and raise the same errors as `main`."""
    from ..conversion.conversions import check_conversion

    options = _get_conversion_options(args)
    options.pop("output_dir")
    check_conversion(**options)


def _get_conversion_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments for `convert_checkpoint`, including the calibration examples."""
    if args.quick:
        _set_quick_defaults(args)
    options = vars(args).copy()
    for name in (*CALIBRATION_OPTIONS, "quick", "attention_errors", "disable_tqdm"):
        options.pop(name)
    return options | {"calibration": read_calibration_from_args(args), "needs_method": True}


def _set_quick_defaults(args: argparse.Namespace) -> None:
    """Reduce the number of examples and disable the fitting steps, unless the command line sets these values."""
    from ..conversion.conversions import METHODS

    is_audio = args.calibration_audio_dir is not None
    if not is_audio and args.calibration_file is None:
        raise ValueError("--quick requires calibration. Set --calibration_file or --calibration_audio_dir.")
    if args.calibration_size is None:
        args.calibration_size = QUICK_AUDIO_SIZE if is_audio else QUICK_SIZE
    has_fit_steps = args.method is None or "fit_steps" in getattr(METHODS[args.method](), "options", ())
    if args.fit_steps is None and has_fit_steps:
        args.fit_steps = 0


def read_calibration_from_args(args: argparse.Namespace) -> Calibration | None:
    """Draw the calibration examples from the text or recordings specified on the command line.

    Returns:
        The calibration, or None if neither text nor audio is specified.

    Raises:
        ValueError: if options cannot be combined.
        OSError: if a file cannot be read.
    """
    from ..conversion.calibration.examples import read_audio_calibration, read_calibration

    option_names = [name for name in CALIBRATION_OPTIONS if getattr(args, name) is not None]
    setting_names = [name for name in TEXT_SETTINGS if name in option_names]
    settings = {name.removeprefix("calibration_"): getattr(args, name) for name in setting_names}
    settings |= {"size": args.calibration_size, "seed": args.seed}
    if args.calibration_audio_dir is not None:
        if text_options := [name for name in option_names if name not in AUDIO_OPTIONS]:
            raise ValueError(
                f"--{text_options[0]} applies to text and cannot be combined with --calibration_audio_dir."
            )
        return read_audio_calibration(args.calibration_audio_dir, **settings)
    if args.calibration_file is None:
        if option_names:
            raise ValueError(f"--{option_names[0]} requires --calibration_file.")
        return None
    settings |= {name: getattr(args, f"calibration_{name}") for name in ("columns", "target_file", "target_column")}
    return read_calibration(args.calibration_file, **settings)
