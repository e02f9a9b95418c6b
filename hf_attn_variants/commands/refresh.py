"""The command `attn-variants refresh`."""

import argparse
from collections.abc import Sequence
from typing import Any

from ..command_line import CommandParser, add_checkpoint_argument, parse_with_checkpoint
from ..files import check_output_dir

__all__ = ["main", "parse_args"]

EXAMPLE = """\
examples (what would change; in place, with a backup; a repository on the Hub,
in one commit):
  attn-variants refresh bert-gqa4 --dry_run
  attn-variants refresh bert-gqa4
  attn-variants refresh me/bert-gqa4 --push_to_hub

Weights, tokenizer and the fields of config.json stay to the byte. They are checked by the classes of this package; the
repository's own code is not run unless --trust_remote_code is given."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line, or `argv`.

    Raises:
        OSError: where the output folder cannot be made; before imports that take seconds.
    """
    parser = CommandParser(
        prog="attn-variants refresh",
        description="Put today's code into a repository that an older version of this package saved, so that it loads "
        "under newer transformers.",
        epilog=EXAMPLE,
    )
    add_checkpoint_argument(parser, "the repository: a folder or a Hub id")
    parser.add_argument("--output_dir", help="a new or empty folder (default: in place, with a backup, for a folder)")
    parser.add_argument("--dry_run", action="store_true", help="check, say what would change, and write nothing")
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run the repository's old code too, in a process of its own, and refuse where outputs differ",
    )
    parser.add_argument("--revision", help="of a Hub id: branch, which is pushed to as well, tag or commit")
    parser.add_argument("--token", help="Hub token (default: the stored login)")
    push = parser.add_argument_group("push", "of a Hub id one commit of what changes; of a folder as `push` does")
    push.add_argument("--push_to_hub", action="store_true", help="push what was refreshed")
    push.add_argument(
        "--hub_model_id", help="user/name (default: the Hub id, or the folder's name under your account)"
    )
    visibility = push.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", help="the repository must be, or is made, private")
    visibility.add_argument("--public", action="store_true", help="the repository must be, or is made, public")
    push.add_argument("--commit_message", help="of the one commit (default: the version of the code)")
    args = parse_with_checkpoint(parser, argv)
    if args.output_dir is not None:
        check_output_dir(args.output_dir)
    return args


def main(args: argparse.Namespace) -> Any:
    """Refresh, print a summary and return the `RefreshResult`.

    Raises:
        ValueError, OSError: as for `refresh_repository`.
    """
    from ..hub.refresh import COMMIT_MESSAGE, refresh_repository

    result = refresh_repository(
        args.model_name_or_path,
        args.output_dir,
        dry_run=args.dry_run,
        trust_remote_code=args.trust_remote_code,
        push_to_hub=args.push_to_hub,
        hub_model_id=args.hub_model_id,
        private=True if args.private else False if args.public else None,
        commit_message=args.commit_message or COMMIT_MESSAGE,
        revision=args.revision,
        token=args.token,
    )
    print(result.summary())
    return result
