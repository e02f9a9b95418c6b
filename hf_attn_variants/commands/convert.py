"""The command `attn-variants convert`, and `scripts/convert_checkpoint.py`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_line import (
    HOSTS,
    CommandParser,
    add_checkpoint_argument,
    parse_with_checkpoint,
    program_name,
)
from ..conversion.calibration_settings import (
    AUDIO_CALIBRATION_SIZE,
    CALIBRATION_SIZE,
    FIT_DEFAULTS,
    LONGEST,
    MAX_AUDIO_LENGTH,
    PASSAGE_LENGTH,
    QUICK_AUDIO_SIZE,
    QUICK_SIZE,
    Calibration,
)
from ..files import CARD_NAME, check_output_dir
from ..modeling.fields.field_table import FIELDS
from ..training.engine.options import parse_json_flag

__all__ = [
    "CALIBRATION_OPTIONS",
    "add_audio_argument",
    "add_calibration_arguments",
    "check_convertible",
    "main",
    "make_parser",
    "parse_args",
    "read_calibration_arguments",
]

# As in the modules of `conversion`, which take seconds to import; a test compares them.
METHODS = ("aligned", "calibrated", "first", "mean", "random")
POSITION_EXTENSIONS = ("tiled", "interpolated")
DTYPES = ("bfloat16", "float16", "float32", "float64")

EXAMPLE = """\
examples (a BERT calibrated on lines of text; one that was fine-tuned to answer
questions, on its pairs):
  %(prog)s google-bert/bert-base-uncased \\
      --num_key_value_heads 4 --calibration_file wikipedia.txt \\
      --output_dir bert-base-gqa4
  %(prog)s runs/squad --num_key_value_heads 4 \\
      --calibration_file pairs.jsonl --calibration_columns question context \\
      --max_length 256 --output_dir squad-gqa4
a T5 whose decoder keeps 128 numbers a token of the source:
  %(prog)s runs/translation \\
      --cross_kv_lora_rank 128 --calibration_file train.en \\
      --calibration_target_file train.de --output_dir translation-r128
a Whisper that keeps 128 numbers a position of audio, calibrated on recordings:
  %(prog)s openai/whisper-tiny \\
      --cross_kv_lora_rank 128 --calibration_audio_dir recordings \\
      --output_dir whisper-tiny-r128
"""

CALIBRATION_OPTIONS = (
    "calibration_file",
    "calibration_audio_dir",
    "calibration_columns",
    "calibration_target_file",
    "calibration_target_column",
    "calibration_size",
    "source_lang",
    "target_lang",
    "max_length",
    "calibration_passages",
    "fit_steps",
)

# Those that are fields of a `Calibration`.
AUDIO_OPTIONS = ("calibration_audio_dir", "calibration_size", "max_length", "fit_steps")
TEXT_SETTINGS = ("source_lang", "target_lang", "max_length", "calibration_passages", "fit_steps")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`.

    Raises:
        OSError: where the output folder cannot be made; before imports that take seconds.
    """
    parser = make_parser()
    args = parse_with_checkpoint(parser, argv)
    check_output_dir(args.output_dir)
    return args


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; `parse_args` reads it."""
    parser = CommandParser(
        prog=program_name("convert_checkpoint.py"),
        description="Convert a multi-head checkpoint into a grouped-query, multi-query, latent-attention or "
        "talking-heads one, in little memory. A grouped checkpoint can be grouped further, or expanded back without "
        f"loss; so can one with latents. Checkpoints: {HOSTS}.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder or Hub id")
    parser.add_argument("--output_dir", required=True, help="a new or empty folder")
    _add_variant_arguments(parser)
    patterns = parser.add_argument_group("windows", "which tokens a token reads, and how many there are")
    _add_field_arguments(patterns, "pattern")
    _add_position_arguments(patterns)
    kernels = parser.add_argument_group("kernels", "linear attention; fitted with --calibration_file")
    _add_field_arguments(kernels, "kernel")
    parser.add_argument(
        "--method",
        choices=METHODS,
        help="how heads are merged (default: calibrated with --calibration_file, else mean; a decoder's heads are "
        "averaged only if you name the method)",
    )
    calibration = parser.add_argument_group("calibration", "text or audio for the methods that fit new heads to it")
    add_calibration_arguments(calibration)
    add_audio_argument(calibration)
    calibration.add_argument(
        "--quick",
        action="store_true",
        help=f"fewer examples ({QUICK_SIZE}, of audio {QUICK_AUDIO_SIZE}) and no fit after the closed form: a first "
        "look, in a fraction of the time",
    )
    calibration.add_argument(
        "--strict",
        action="store_true",
        help="a conversion that is not within tolerance on held-out examples is an error: status 1 and no folder, "
        "only the report beside it",
    )
    calibration.add_argument(
        "--attention_errors", action="store_true", help="print what the attentions lose, too, each alone"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the floating-point tensors (default: as stored)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--allow_pickle", action="store_true", help="read pytorch_model.bin, with weights_only=True")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub id")
    parser.add_argument("--token", help="Hub token, for private and gated repositories (default: the stored login)")
    parser.add_argument("--disable_tqdm", action="store_true", help="no progress bars")
    return parser


def _add_variant_arguments(parser: argparse.ArgumentParser) -> None:
    _add_field_arguments(parser, None)
    parser.add_argument(
        "--kv_cache_bytes",
        type=int,
        nargs=2,
        metavar=("SOURCE", "GENERATED"),
        help="encoder-decoders: what the decoder's cache may take, in bytes a source token and bytes a generated "
        "token over all layers; ranks that lose least are chosen, those of self-attention by layer",
    )
    parser.add_argument(
        "--keep_matching_layers",
        type=int,
        metavar="N",
        help="encoders: leave N layers as they are, those whose heads look most for the same word elsewhere, by which "
        "texts are compared; for models that are fine-tuned on pairs",
    )


def _add_field_arguments(group: argparse._ActionsContainer, kind: str | None) -> None:
    """Add the flags of the fields that a conversion gives a checkpoint, as the table has them.

    Args:
        group: of the flags.
        kind: "pattern" or "kernel"; None = the others.
    """
    for row in FIELDS:
        own = next((fact for fact in ("pattern", "kernel") if fact in row.facts), None)
        if own != kind or "from_scratch" in row.facts:
            continue
        for prefix in row.prefixes:
            unsaid, choices = row.default_of(prefix), row.choices_of(prefix)
            default = f" (default: {unsaid})" if unsaid not in (None, (), False) else ""
            options: dict[str, Any] = {"help": row.described(prefix) + default}
            if choices:
                options["choices"] = list(choices)
            if row.kind is bool:
                options |= {"action": "store_true", "default": None}
            elif row.kind is list:
                options["nargs"] = "*" if prefix and row.inherits else "+"
            else:
                options["type"] = parse_json_flag if row.kind is dict else row.kind
            group.add_argument(f"--{prefix}{row.name}", **options)


def _add_position_arguments(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--max_position_embeddings",
        type=int,
        help="BERT and its relatives: positions afterwards; the tokenizer's model_max_length with them",
    )
    group.add_argument(
        "--position_extension",
        choices=POSITION_EXTENSIONS,
        help="how the learned positions become more: repeated, which leaves short texts as they are, or stretched "
        "(default: tiled)",
    )


def add_calibration_arguments(group: argparse._ActionsContainer, fit_steps: int = FIT_DEFAULTS["fit_steps"]) -> None:
    """Add the flags of calibration text and of how closely it is fitted to; the default steps are for the help."""
    group.add_argument(
        "--calibration_file",
        help="examples of the kind of text the model is for: one a line, or a table (.csv, .tsv, .json, .jsonl); "
        ".gz too",
    )
    group.add_argument(
        "--calibration_columns",
        nargs="+",
        metavar="COLUMN",
        help="the table's column of texts, or two columns of texts that the model reads as pairs (default: text)",
    )
    group.add_argument(
        "--calibration_target_file",
        help="encoder-decoders: the target of each line (default: the model's own greedy outputs)",
    )
    group.add_argument("--calibration_target_column", help="encoder-decoders: the table's column of targets")
    group.add_argument(
        "--calibration_size",
        type=int,
        help=f"examples drawn from the file by --seed (default: {CALIBRATION_SIZE})",
    )
    for side in ("source", "target"):
        group.add_argument(
            f"--{side}_lang", help=f"mBART, M2M100, NLLB: the {side}s' language, as the tokenizer calls it"
        )
    group.add_argument(
        "--max_length",
        type=int,
        help="tokens at which an example is cut while heads are fitted (default: the longest example, up to the "
        f"model's positions, or {LONGEST} tokens if it has no limit; passages {PASSAGE_LENGTH})",
    )
    group.add_argument(
        "--calibration_passages",
        action=argparse.BooleanOptionalAction,
        help="encoders: join half of the examples to those that follow, to passages of 16 tokens and more, because "
        "the new heads fit long text only if they are fitted to some (default: yes, for single texts)",
    )
    group.add_argument(
        "--fit_steps",
        type=int,
        help="method calibrated: Adam steps for each attention after the closed form; 0 = the closed form alone "
        f"(default: {fit_steps})",
    )


def add_audio_argument(group: argparse._ActionsContainer) -> None:
    """Add the flag of a calibration on audio."""
    group.add_argument(
        "--calibration_audio_dir",
        metavar="FOLDER",
        help="Whisper: recordings of the kind that the model is for, in this folder and those below it: PCM wav, and "
        "with the package soundfile flac, mp3 and ogg; of each the first window counts (30 s), and what the decoder "
        f"reads is the model's own greedy output (--calibration_size is {AUDIO_CALIBRATION_SIZE} then, --max_length "
        f"{MAX_AUDIO_LENGTH})",
    )


def main(args: argparse.Namespace) -> Any:
    """Convert, print a summary, and return the `ConversionReport`.

    Raises:
        ValueError, OSError: as for `convert_checkpoint`.
    """
    from ..conversion.conversions import convert_checkpoint
    from ..hub.card import write_card
    from ..progress import no_progress_bars

    options = _conversion_options(args)
    with no_progress_bars(args.disable_tqdm):
        report = convert_checkpoint(**options)
    print(report.summary(args.attention_errors))
    if write_card(Path(args.output_dir).expanduser()):
        print(f"{CARD_NAME} is its model card; `attn-variants push` makes it anew, with the repository's name.")
    print("To load it: from_pretrained(..., trust_remote_code=True), or `import hf_attn_variants` before it.")
    return report


def check_convertible(args: argparse.Namespace) -> None:
    """Check what `main` would check before it reads a weight.

    Raises:
        ValueError, OSError: as for `main`.
    """
    from ..conversion.conversions import check_conversion

    options = _conversion_options(args)
    options.pop("output_dir")
    check_conversion(**options)


def _conversion_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `convert_checkpoint`, with the examples that the command line names."""
    if args.quick:
        _be_quick(args)
    options = vars(args).copy()
    for name in (*CALIBRATION_OPTIONS, "quick", "attention_errors", "disable_tqdm"):
        options.pop(name)
    return options | {"calibration": read_calibration_arguments(args), "needs_method": True}


def _be_quick(args: argparse.Namespace) -> None:
    """Set what a quick conversion takes less of, where it is not given."""
    from ..conversion.request import METHODS

    hears = args.calibration_audio_dir is not None
    if not hears and args.calibration_file is None:
        raise ValueError("--quick is of a calibration: give --calibration_file, or --calibration_audio_dir.")
    if args.calibration_size is None:
        args.calibration_size = QUICK_AUDIO_SIZE if hears else QUICK_SIZE
    if args.fit_steps is None and (
        args.method is None or "fit_steps" in getattr(METHODS[args.method](), "options", ())
    ):
        args.fit_steps = 0


def read_calibration_arguments(args: argparse.Namespace) -> Calibration | None:
    """Read the calibration text, or find its audio, and draw the examples."""
    from ..conversion.calibration.examples import read_audio_calibration, read_calibration
    from ..conversion.methods import CalibratedMethod
    from ..conversion.request import METHODS

    given = [name for name in CALIBRATION_OPTIONS if getattr(args, name) is not None]
    method = None if args.method is None else METHODS[args.method]()
    if given and method is not None and not isinstance(method, CalibratedMethod):
        raise ValueError(f"--method {args.method} looks at no text: leave --{given[0]} out, or the method.")
    settings = {name.removeprefix("calibration_"): getattr(args, name) for name in TEXT_SETTINGS if name in given}
    if args.calibration_audio_dir is not None:
        if of_text := [name for name in given if name not in AUDIO_OPTIONS]:
            raise ValueError(f"--{of_text[0]} is for text, --calibration_audio_dir for audio: leave one out.")
        return read_audio_calibration(
            args.calibration_audio_dir, size=args.calibration_size, seed=args.seed, **settings
        )
    if args.calibration_file is None:
        if given:
            raise ValueError(f"--{given[0]} needs --calibration_file.")
        return None
    return read_calibration(
        args.calibration_file,
        columns=args.calibration_columns,
        target_file=args.calibration_target_file,
        target_column=args.calibration_target_column,
        size=args.calibration_size,
        seed=args.seed,
        **settings,
    )
