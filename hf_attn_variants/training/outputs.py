"""What a finished run leaves: the model, its predictions, a push to the Hub."""

import argparse
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from accelerate import Accelerator
from huggingface_hub import HfApi
from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_attn_variants.training.checkpoints import BEST_MODEL_FILE, LOG_FILE, NAME_PATTERN, atomic_write

__all__ = ["check_hub_access", "push_folder", "remove_earlier_run", "save_model", "save_predictions"]

RESULTS_FILE = "all_results.json"
CURVES_FILE = "training_curves.png"
PREDICTIONS_PREFIX = "predictions_"
BAD_BATCH_PREFIX = "bad_batch-"
# What an earlier run of ours leaves in its output folder and a new one must not mistake for its own.
STALE_PATTERN = re.compile(
    rf"{NAME_PATTERN.pattern}|\.tmp-.*|{re.escape(PREDICTIONS_PREFIX)}.*\.tsv|{BAD_BATCH_PREFIX}.*\.pt|"
    + "|".join(re.escape(name) for name in (BEST_MODEL_FILE, LOG_FILE, RESULTS_FILE, CURVES_FILE))
)


def remove_earlier_run(output_dir: str | Path) -> None:
    """Removes an earlier run's checkpoints, log, best weights and results; its final model stays until it is replaced.

    Raises:
        OSError: Something could not be removed.
    """
    for entry in Path(output_dir).iterdir():
        if STALE_PATTERN.fullmatch(entry.name):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def save_model(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path
) -> None:
    """Saves model and tokenizer into a folder, each file whole: written under a temporary name and moved into place.

    Called on every process; only the main one writes.

    Raises:
        OSError: The folder cannot be written; what was in it stays.
    """
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        temporary = Path(output_dir) / ".tmp-model"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            accelerator.unwrap_model(model).save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)
        except Exception as error:  # safetensors has its own error for a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            raise OSError(f"could not write the model to {output_dir} ({type(error).__name__}: {error})") from error
        # The config last: a folder with a config but without weights would look like a checkpoint.
        for path in sorted(temporary.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
            os.replace(path, Path(output_dir) / path.name)
        temporary.rmdir()
    accelerator.wait_for_everyone()


def save_predictions(path: str | Path, indices: Iterable[str], predictions: Iterable[str]) -> None:
    """Writes a GLUE submission file: a header and one `index<TAB>prediction` a line."""
    rows = [f"{index}\t{prediction}" for index, prediction in zip(indices, predictions, strict=True)]
    atomic_write(path, "\n".join(["index\tprediction", *rows]) + "\n")


def check_hub_access(args: argparse.Namespace) -> None:
    """Checks before training that the model can be pushed after it.

    Raises:
        ValueError: There is no valid token, or the Hub does not answer.
    """
    if not args.push_to_hub:
        return
    try:
        HfApi(token=args.hub_token).whoami()
    except Exception as error:  # no token, a bad one, no network: three error families of as many libraries
        raise ValueError(
            f"--push_to_hub: the Hub does not accept this session ({type(error).__name__}: {error}); "
            "run `hf auth login` or give --hub_token"
        ) from error


def push_folder(args: argparse.Namespace) -> str:
    """Uploads the output folder without its checkpoints.

    Returns:
        The repository's address.
    """
    api = HfApi(token=args.hub_token)
    repo_id = args.hub_model_id or Path(args.output_dir).resolve().name
    url = api.create_repo(repo_id, private=args.hub_private_repo or None, exist_ok=True)
    api.upload_folder(
        repo_id=url.repo_id,
        folder_path=args.output_dir,
        commit_message="Fine-tuned model",
        ignore_patterns=["checkpoint-*", ".tmp-*", BEST_MODEL_FILE, "hf_attn_variants/*"],
    )
    return str(url)
