"""Learn a small vocabulary and run scripts, for the benchmarks that pretrain a small model.

The command of this module learns such a vocabulary. With thousands of subwords, a small model predicts only word
frequencies for hours. With little more than the alphabet, it learns to use its context within minutes on one CPU core,
because the neighbors of a character predict it well.
"""

import argparse
import shlex
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from hf_attn_variants.training.pretraining.text_stream import TextFile

__all__ = [
    "ROOT",
    "format_command",
    "get_gate_scores",
    "main",
    "make_script_command",
    "make_vocabulary",
    "parse_args",
    "run_script",
]

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY_CHARACTERS = 3_000_000
# Other characters would fill the vocabulary. They are replaced by spaces when it is learned.
ALPHABET = frozenset(string.ascii_letters + string.digits + " \n.,;:()-'\"/%&")
EPILOG = """example:
  python -m benchmarks.train.small_pretraining --tokenizer google-t5/t5-small --text wikipedia/train-00000.txt.gz \\
      --size 256 --output_dir vocabulary-256"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description="Learn a small vocabulary from text.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokenizer", required=True, help="A tokenizer, for its normalization and special tokens.")
    parser.add_argument("--text", required=True, help="A text file, .txt or .gz, whose beginning is read.")
    parser.add_argument("--size", type=int, required=True, help="Size, including the special tokens.")
    parser.add_argument("--output_dir", required=True, help="Folder for the tokenizer.")
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """Learn the vocabulary and save the tokenizer."""
    make_vocabulary(args.tokenizer, Path(args.text), Path(args.output_dir), args.size)


def make_vocabulary(tokenizer: str, shard: Path, folder: Path, size: int) -> None:
    """Learn a vocabulary from the beginning of a shard, and save the tokenizer.

    Args:
        tokenizer: The folder or Hub id of a tokenizer. The new one has the same algorithm, normalization and special
            tokens.
        shard: The text file.
        folder: The folder for the tokenizer.
        size: The size of the vocabulary, including the special tokens.
    """

    def texts():
        read = 0
        for _, text in TextFile(shard).read_articles():
            yield "".join(letter if letter in ALPHABET else " " for letter in text)
            read += len(text)
            if read > VOCABULARY_CHARACTERS:
                return

    base = AutoTokenizer.from_pretrained(tokenizer)
    base.train_new_from_iterator(texts(), vocab_size=size).save_pretrained(folder)


def make_script_command(name: str, *flags: Any) -> list[str]:
    """Return the command that runs a script of this repository."""
    return [sys.executable, str(ROOT / "scripts" / name), *map(str, flags)]


def run_script(command: list[str], folder: Path, done: str = "all_results.json") -> None:
    """Run a command unless its folder already contains the file `done`.

    Raises:
        SystemExit: If the command fails, with its exit status.
    """
    if (folder / done).is_file():
        return
    # An interrupted training run continues. If the folder contains other files, the scripts raise an error.
    resumed = ["--resume_from_checkpoint", "latest"] if any(folder.glob("checkpoint-*")) else []
    print(shlex.join(command + resumed), flush=True)
    if status := subprocess.run(command + resumed).returncode:
        raise SystemExit(status)


def format_command(command: list[str], names: dict[str, str]) -> str:
    """Return a command as text, with this machine's paths replaced by `names`."""
    text = shlex.join(command)
    for path, name in names.items():
        text = text.replace(path, name)
    return text


def get_gate_scores(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results of the context check from the results of a run."""
    return {key: value for key, value in results.items() if key.startswith("gate_")}


if __name__ == "__main__":
    main(parse_args())
