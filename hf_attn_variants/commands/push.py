"""The `attn-variants push` command, which `scripts/push_to_hub.py` also runs."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..command_parser import CommandParser, add_checkpoint_argument, get_program_name, parse_with_checkpoint

EXAMPLE = """\
example (--dry_run only lists the files and prints the model card):
  %(prog)s bert-gqa4 --repo_id me/bert-gqa4 --private \\
      --base_model google-bert/bert-base-uncased --license apache-2.0 --dry_run

All files are pushed in a single commit. With --code_repo, the model card is pushed in a second commit, because it
contains the first one. If nothing has changed since the last push, no commit is created."""

MAX_TEXT_BYTES = 2**24  # the limit for model cards and their notes
# The flags that correspond to fields of `CardOptions`.
CARD_FLAGS = ("title", "base_model", "license", "language", "datasets", "pipeline_tag", "notes", "evaluations")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line arguments."""
    parser = CommandParser(
        prog=get_program_name("push_to_hub.py"),
        description="Push a checkpoint folder to the Hub: the model, tokenizer, code files, generation configuration "
        "and a model card, which is generated from conversion and training reports.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "checkpoint folder")
    parser.add_argument(
        "--repo_id", help="repository as user/name (default: the name of the folder, under your account)"
    )
    parser.add_argument(
        "--code_repo",
        metavar="OWNER/NAME",
        help="repository for the code of several checkpoints, which is created or updated (default: the code is "
        "pushed to the repository of the checkpoint)",
    )
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", help="create or require a private repository")
    visibility.add_argument("--public", action="store_true", help="create or require a public repository")
    parser.add_argument("--revision", help="branch to push to, which is created if it does not exist (default: main)")
    parser.add_argument(
        "--commit_message", default="Upload model, tokenizer, code and model card", help="commit message"
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="list the files and print the model card without pushing anything"
    )
    parser.add_argument("--allow_pickle", action="store_true", help="also push pickle files")
    parser.add_argument("--token", help="Hub token (default: the stored login)")
    card = parser.add_argument_group("model card", "information that the files in the folder do not contain")
    card.add_argument("--card", help="Markdown file to use as the model card instead of generating one")
    card.add_argument("--save_card", help="file to which the model card is also written")
    card.add_argument(
        "--overwrite_card", action="store_true", help="replace the README.md on the Hub even if it was edited there"
    )
    card.add_argument("--title", help="title of the model card (default: the name of the repository)")
    card.add_argument("--base_model", help="Hub id of the base model")
    card.add_argument("--license", help="license id used on the Hub (default: the license of the base model)")
    card.add_argument("--language", nargs="+", help="language codes (default: the languages of the base model)")
    card.add_argument("--datasets", nargs="+", help="Hub ids of the training datasets")
    card.add_argument("--pipeline_tag", help="task shown on the Hub (default: the task of the architecture)")
    card.add_argument("--notes", help='Markdown file for the "Notes" section of the model card')
    card.add_argument(
        "--evaluations",
        help="JSON file with a list of additional scores, each with the fields of huggingface_hub.EvalResult",
    )
    return parse_with_checkpoint(parser, argv)


def main(args: argparse.Namespace) -> Any:
    """Push the checkpoint, or print the plan with --dry_run.

    Returns:
        The `PushResult`, or the `PushPlan` with --dry_run.

    Raises:
        ValueError: if the folder, the model card or the repository is not valid (see `plan_push` and
            `push_checkpoint`).
        OSError: if a file cannot be read, or the push fails.
    """
    from huggingface_hub import HfApi

    from ..files import atomic_write, load_json
    from ..hub.card import CardOptions
    from ..hub.push import plan_push, push_checkpoint, resolve_repo_id

    evaluations = [] if args.evaluations is None else load_json(Path(args.evaluations).expanduser())
    file_values: dict[str, Any] = {"notes": _read_text(args.notes), "evaluations": evaluations}
    options = CardOptions(**{name: file_values.get(name, getattr(args, name)) for name in CARD_FLAGS})
    folder = Path(args.model_name_or_path).expanduser()
    if not folder.is_dir():  # checked before any requests to the Hub
        raise FileNotFoundError(f"The checkpoint folder {args.model_name_or_path!r} does not exist.")
    api = HfApi(token=args.token)
    repo_id = args.repo_id or folder.resolve().name
    if not args.dry_run:
        repo_id = resolve_repo_id(repo_id, api)
    plan = plan_push(folder, repo_id, options, _read_text(args.card), args.allow_pickle, args.code_repo)
    if args.save_card:
        atomic_write(Path(args.save_card).expanduser(), plan.card)
    print(plan.summary())
    if args.dry_run:
        print(f"\n{plan.card}\nDry run: nothing was pushed.")
        return plan
    private = True if args.private else False if args.public else None
    result = push_checkpoint(plan, private, args.revision, args.commit_message, args.overwrite_card, api)
    for name in result.removed:
        print(f"Removed {name}, which was added by an earlier push")
    print(f"{'Pushed to' if result.changed else 'No changes in'} {result.url}, commit {result.commit}")
    code_revision = "" if result.code_commit is None else f'code_revision="{result.code_commit}", '
    print(
        f'Load the model with from_pretrained("{result.repo_id}", revision="{result.commit}", {code_revision}'
        "trust_remote_code=True)"
    )
    return result


def _read_text(path: str | None) -> str | None:
    from ..files import read_file

    if path is None:
        return None
    try:
        return read_file(Path(path).expanduser(), MAX_TEXT_BYTES).decode("utf-8").strip() + "\n"
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text ({error}). Save the file as UTF-8.") from error
