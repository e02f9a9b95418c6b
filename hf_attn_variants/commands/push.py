"""The command `attn-variants push`, and `scripts/push_to_hub.py`."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_line import CommandParser, add_checkpoint_argument, parse_with_checkpoint, program_name

__all__ = ["main", "parse_args"]

EXAMPLE = """\
example (--dry_run lists what would go up, and shows the card):
  %(prog)s bert-gqa4 --repo_id me/bert-gqa4 --private \\
      --base_model google-bert/bert-base-uncased --license apache-2.0 --dry_run

Everything goes up in one commit, or nothing does. A repeated push changes nothing."""

MOST_TEXT_BYTES = 2**24  # of a card, or of notes for a card
# The fields of `CardOptions`: what a generated card says.
CARD_FLAGS = ("title", "base_model", "license", "language", "datasets", "pipeline_tag", "notes", "evaluations")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`."""
    parser = CommandParser(
        prog=program_name("push_to_hub.py"),
        description="Push a checkpoint folder to the Hub: model, tokenizer, code files, generation config and a model "
        "card that is filled from what was really run.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "the checkpoint folder")
    parser.add_argument("--repo_id", help="user/name (default: the folder's name under your account)")
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", help="the repository must be, or is made, private")
    visibility.add_argument("--public", action="store_true", help="the repository must be, or is made, public")
    parser.add_argument("--revision", help="branch, made where there is none (default: main)")
    parser.add_argument(
        "--commit_message", default="Upload model, tokenizer, code and model card", help="of the one commit"
    )
    parser.add_argument("--dry_run", action="store_true", help="list what would go up, with the card, and stop")
    parser.add_argument("--allow_pickle", action="store_true", help="upload pickled files too")
    parser.add_argument("--token", help="Hub token (default: the stored login)")
    card = parser.add_argument_group("model card", "what it says beyond what lies in the folder")
    card.add_argument("--card", help="a Markdown file to use as the card instead of a generated one")
    card.add_argument("--save_card", help="write the card to this file as well")
    card.add_argument("--overwrite_card", action="store_true", help="replace a README.md that was edited on the Hub")
    card.add_argument("--title", help="the heading (default: the repository's name)")
    card.add_argument("--base_model", help="Hub id of the model that it was made from")
    card.add_argument("--license", help="the licence's id on the Hub (default: the source's)")
    card.add_argument("--language", nargs="+", help="language codes (default: the source's)")
    card.add_argument("--datasets", nargs="+", help="Hub ids of the training data")
    card.add_argument("--pipeline_tag", help="the task on the Hub (default: the architecture's)")
    card.add_argument("--notes", help='a Markdown file for the section "Notes" of the card')
    card.add_argument(
        "--evaluations", help="JSON list of further scores, each with the fields of huggingface_hub.EvalResult"
    )
    return parse_with_checkpoint(parser, argv)


def main(args: argparse.Namespace) -> Any:
    """Push, or with --dry_run say what would be pushed.

    Returns:
        The `PushResult`, or with --dry_run the `PushPlan`.

    Raises:
        ValueError, OSError: as for `plan_push` and `push_checkpoint`.
    """
    from huggingface_hub import HfApi

    from ..files import atomic_write, load_json
    from ..hub.card import CardOptions
    from ..hub.push import full_repo_id, plan_push, push_checkpoint

    evaluations = [] if args.evaluations is None else load_json(Path(args.evaluations).expanduser())
    read: dict[str, Any] = {"notes": _read_text(args.notes), "evaluations": evaluations}
    options = CardOptions(**{name: read.get(name, getattr(args, name)) for name in CARD_FLAGS})
    folder = Path(args.model_name_or_path).expanduser()
    if not folder.is_dir():  # before the Hub is asked for an account
        raise FileNotFoundError(f"there is no checkpoint folder {args.model_name_or_path!r}.")
    api = HfApi(token=args.token)
    repo_id = args.repo_id or folder.resolve().name
    if not args.dry_run:
        repo_id = full_repo_id(repo_id, api)
    plan = plan_push(folder, repo_id, options, _read_text(args.card), args.allow_pickle)
    if args.save_card:
        atomic_write(Path(args.save_card).expanduser(), plan.card)
    print(plan.summary())
    if args.dry_run:
        print(f"\n{plan.card}\nDry run: nothing was sent.")
        return plan
    private = True if args.private else False if args.public else None
    result = push_checkpoint(plan, private, args.revision, args.commit_message, args.overwrite_card, api)
    for name in result.removed:
        print(f"removed {name}, of an earlier push")
    print(f"{'Pushed to' if result.changed else 'Nothing new for'} {result.url}, commit {result.commit}")
    print(f'Load it by from_pretrained("{result.repo_id}", revision="{result.commit}", trust_remote_code=True)')
    return result


def _read_text(path: str | None) -> str | None:
    from ..input_files import read_file

    if path is None:
        return None
    try:
        return read_file(Path(path).expanduser(), MOST_TEXT_BYTES).decode("utf-8").strip() + "\n"
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text, got {error}.") from error
