"""The `attn-variants refresh` command."""

import argparse
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_parser import CommandParser, add_checkpoint_argument, parse_with_checkpoint
from ..files import CARD_NAME, CONFIG_NAME, check_disk_space, check_output_dir, staged_folder

EXAMPLE = """\
examples (writing a new folder, and also pushing it to the Hub in one commit):
  attn-variants refresh bert-gqa4 --output_dir bert-gqa4-new
  attn-variants refresh me/bert-gqa4 --output_dir bert-gqa4 --push_to_hub

The command loads the model with the classes in the installed package and saves it together with their code. It then
compares the outputs before and after saving, using random inputs. The old code is not run."""
NUM_RANDOM_TOKENS = 8
_MAX_DIFFERENCE = 1e-4  # relative to the largest output


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments.

    Raises:
        OSError: if the output folder cannot be created.
    """
    parser = CommandParser(
        prog="attn-variants refresh",
        description="Update the code in a repository created with this package to the installed version, so that "
        "newer Transformers versions can load the model. The weights, the tokenizer and all other files are left "
        "unchanged.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "folder or Hub id of the repository")
    parser.add_argument("--output_dir", required=True, help="new or empty output folder")
    parser.add_argument("--revision", help="branch, tag or commit to read from the Hub")
    parser.add_argument("--token", help="Hub token (default: the stored login)")
    push = parser.add_argument_group(
        "push", "pushing to the main branch of a repository on the Hub in a single commit"
    )
    push.add_argument("--push_to_hub", action="store_true", help="push the new folder")
    push.add_argument(
        "--hub_model_id", help="repository as user/name (default: the original Hub id, or the name of the new folder)"
    )
    visibility = push.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", help="create or require a private repository")
    visibility.add_argument("--public", action="store_true", help="create or require a public repository")
    args = parse_with_checkpoint(parser, argv)
    check_output_dir(args.output_dir)
    return args


def main(args: argparse.Namespace) -> Any:
    """Refresh the repository and push it if requested.

    Returns:
        The `PushResult`, or the path of the new folder if it was not pushed.

    Raises:
        ValueError: if the repository was not created with this package, or the outputs of the model change.
        OSError: if a file is missing or cannot be written, or the push fails.
    """
    from ..conversion.checkpoint.source import find_local_folder, resolve_checkpoint_folder

    output, folder = Path(args.output_dir).expanduser(), find_local_folder(args.model_name_or_path)
    source = resolve_checkpoint_folder(args.model_name_or_path, args.revision, args.token)
    difference = _refresh(source, check_output_dir(output, source=source))
    print(f"Wrote {output}\nThe largest difference between the outputs before and after saving is {difference:.1g}.")
    if not args.push_to_hub:
        return output
    from huggingface_hub import HfApi

    from ..hub.push import plan_push, push_checkpoint, resolve_repo_id

    api, card = HfApi(token=args.token), output / CARD_NAME
    name = args.hub_model_id or (args.model_name_or_path if folder is None else output.resolve().name)
    text = card.read_text(encoding="utf-8") if card.is_file() else None
    plan = plan_push(output, resolve_repo_id(name, api), card=text)
    private = True if args.private else False if args.public else None
    result = push_checkpoint(plan, private, commit_message="Refresh the code of hf_attn_variants", api=api)
    print(f"{'Pushed to' if result.changed else 'No changes in'} {result.url}, commit {result.commit}")
    return result


def _refresh(source: Path, output: Path) -> float:
    """Write the repository with the current code, and return the largest relative change in the model's outputs."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    from ..conversion.checkpoint.source import copy_auxiliary_files, read_config
    from ..conversion.checkpoint.tensor_files import open_checkpoint
    from ..hub.card import refresh_card
    from ..hub.push import list_folder_files
    from ..modeling.code_builder import get_file_names
    from ..registration import get_variant_model_class

    config = read_config(source)
    if not config["model_type"].startswith("attn_variant_") or not config.get("architectures"):
        raise ValueError(
            f"{source} must be a repository created with this package, got model type {config['model_type']!r}. "
            "Convert the checkpoint first."
        )
    model_class = get_variant_model_class(config["architectures"][0])
    model = _load_model(model_class, source)
    with open_checkpoint(source) as reader:
        written = {CONFIG_NAME, CARD_NAME, *reader.files, *get_file_names()}
    names = [name for name in list_folder_files(source)[0] if name not in written and "safetensors.index" not in name]
    check_disk_space(output, model.get_memory_footprint() + sum((source / name).stat().st_size for name in names))
    with staged_folder(output) as stage:
        copy_auxiliary_files(source, stage, names)
        model.save_pretrained(stage)
        if (source / CARD_NAME).is_file():
            text = (source / CARD_NAME).read_text(encoding="utf-8")
            (stage / CARD_NAME).write_text(refresh_card(text) or text, encoding="utf-8")
        remote = f"{type(model.config).modeling_file}.{model_class.__name__}"
        refreshed_model = _load_model(get_class_from_dynamic_module(remote, str(stage)), stage)
        difference = _measure_difference(model, refreshed_model)
        if not difference <= _MAX_DIFFERENCE:
            raise ValueError(
                f"{source}: the outputs differ by {difference:.1g} after the refresh. The new folder was not written."
            )
    return difference


def _load_model(model_class: Any, folder: Path) -> Any:
    from ..conversion.checkpoint.models import convert_loading_errors

    with convert_loading_errors(folder) as path:
        options = {"dtype": "auto", "local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        model, info = model_class.from_pretrained(path, **options)
    if mismatched_keys := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise ValueError(
            f"The weights in {folder} must match {model_class.__name__}, but {mismatched_keys[0]} is missing or "
            "unexpected."
        )
    return model.eval()


def _measure_difference(model: Any, other_model: Any) -> float:
    """Return the largest difference between two models' outputs on random inputs, relative to the largest output."""
    import torch

    config, name, generator = model.config, type(model).__name__, torch.Generator().manual_seed(0)
    count = min(config.vocab_size, getattr(config, "decoder_vocab_size", None) or config.vocab_size)
    special_ids = (config.pad_token_id, config.eos_token_id)
    words = torch.tensor([token_id for token_id in range(count) if token_id not in special_ids])
    ids = words[torch.randint(len(words), (2, NUM_RANDOM_TOKENS), generator=generator)]
    if isinstance(config.eos_token_id, int):
        ids[:, -1] = config.eos_token_id  # BART classifies by the end-of-sequence token, which must occur once
    inputs = {"input_ids": ids[None] if name.endswith("ForMultipleChoice") else ids}
    if model.main_input_name == "input_features":
        shape = (2, config.num_mel_bins, 2 * config.max_source_positions)
        inputs = {"input_features": torch.randn(shape, generator=generator).to(model.dtype)}
    takes_target = "decoder_input_ids" in inspect.signature(model.forward).parameters
    if takes_target and not name.endswith(("ForSequenceClassification", "ForQuestionAnswering")):
        inputs["decoder_input_ids"] = ids
    with torch.no_grad():
        outputs = zip(model(**inputs).to_tuple(), other_model(**inputs).to_tuple(), strict=True)
    pairs = [(a.float(), b.float()) for a, b in outputs if isinstance(a, torch.Tensor)]
    return max(float((a - b).abs().max() / a.abs().max().clamp_min(1)) for a, b in pairs)
