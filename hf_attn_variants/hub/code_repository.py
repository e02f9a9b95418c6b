"""A code repository on the Hub, which several checkpoints share.

The `auto_map` of such a checkpoint contains entries of the form "OWNER/NAME--file.Class". The code repository includes
all architectures and all mechanisms, because files with the same name differ between checkpoints with their own code.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi

from ..conversion.checkpoint.source import read_config
from ..errors import convert_to_value_error
from ..files import CARD_NAME, CONFIG_NAME, GENERATED_CARD, SENTENCE_MODULES_NAME
from ..modeling.code_builder import build_code
from ..modeling.remote_code import CONFIGURATION_MODULE
from ..modeling.variant_names import ATTN_VARIANTS_VERSION
from ..registration import ARCHITECTURES
from .card import add_digest_mark, is_unedited_card, redact_json_file

__all__ = ["build_complete_code", "find_pinned_commit", "insert_commits", "push_code", "rewrite_configs"]

# The values on a card and in `SENTENCE_CONFIG` before the push.
COMMIT, CODE_COMMIT = '"COMMIT"', '"COMMIT OF THE CODE"'
# The file with the arguments that sentence-transformers passes to `from_pretrained`, with their current and former
# names. `SentenceTransformer(..., model_kwargs={"code_revision": ...})` does not pin the model's code (6.2).
SENTENCE_CONFIG = "sentence_bert_config.json"
SENTENCE_ARGUMENTS = (
    ("model_kwargs", "model_args"),
    ("processor_kwargs", "tokenizer_args"),
    ("config_kwargs", "config_args"),
)

CODE_REPO_CARD = """\
---
license: apache-2.0
tags:
- attn-variants
---

# Code of hf_attn_variants

This repository contains the attention code of models that were made with hf_attn_variants.
The `auto_map` in their `config.json` refers to it, and `trust_remote_code=True` runs it.
Read the `.py` files, and pin the commit that you read with `code_revision=`.
"""


def build_complete_code() -> Mapping[str, str]:
    """Return the code files of all architectures with all mechanisms: {file name: text}."""
    modules = [CONFIGURATION_MODULE, *(config_class.modeling_file for config_class in ARCHITECTURES)]
    return build_code(tuple((module, "*") for module in modules), None)


def rewrite_configs(folder: Path, code_repo: str | None, code: Mapping[str, str]) -> dict[str, bytes]:
    """Return the configuration files that must be changed for a code repository: {file name: content}.

    Args:
        folder: The checkpoint folder.
        code_repo: The code repository as "owner/name", or None if the code is in the repository of the checkpoint.
        code: The files of the code repository.

    Raises:
        ValueError: if the code repository does not contain a class in `auto_map`, or if a file is invalid.
    """
    contents = {}
    if code_repo is not None:
        config = read_config(folder)
        auto_map = config.get("auto_map")
        names = _check_references(folder, auto_map if isinstance(auto_map, dict) else {"AutoConfig": auto_map}, code)
        config = _read_json_without_paths(folder / CONFIG_NAME)
        config["auto_map"] = {auto: f"{code_repo}--{name}" for auto, name in names.items()}
        contents[CONFIG_NAME] = _dump_json(config)
    path = folder / SENTENCE_CONFIG
    if (folder / SENTENCE_MODULES_NAME).is_file():
        config = _read_json_without_paths(path) if path.is_file() else {}
        with convert_to_value_error(f"{path} must contain the arguments of a sentence-transformers module"):
            changed = _set_code_revision(config, None if code_repo is None else json.loads(CODE_COMMIT))
        if changed != config:
            contents[SENTENCE_CONFIG] = _dump_json(changed)
    return contents


def _check_references(folder: Path, auto_map: Mapping[str, Any], code: Mapping[str, str]) -> dict[str, str]:
    """Return `auto_map` without repositories, and check that the code contains its classes."""
    names = {auto: str(reference).split("--")[-1] for auto, reference in auto_map.items()}
    for name in names.values():
        file, _, class_name = name.partition(".")
        if f"\nclass {class_name}(" not in code.get(f"{file}.py", ""):
            raise ValueError(
                f"{folder}: `auto_map` must only refer to classes of hf_attn_variants, got {name!r}. Push the "
                "checkpoint without a code repository."
            )
    return names


def _set_code_revision(config: Mapping[str, Any], code_revision: str | None) -> dict[str, Any]:
    """Set `code_revision` in the configuration of a sentence-transformers module, or remove it if it is None."""
    changed = dict(config)
    for name, former_name in SENTENCE_ARGUMENTS:
        name = name if name in config else former_name
        arguments = {**config.get(name, {}), "code_revision": code_revision}
        if code_revision is None:
            del arguments["code_revision"]
        if arguments or name in config:
            changed[name] = arguments
    return changed


def _read_json_without_paths(path: Path) -> Any:
    """Return the values of a JSON file, in which local paths are removed."""
    return json.loads(redact_json_file(path, False) or path.read_bytes())


def _dump_json(value: Any) -> bytes:
    return f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode()


def push_code(api: HfApi, code_repo: str, code: Mapping[str, str]) -> str:
    """Push the files of a code repository in a single commit, unless they are already there.

    Args:
        api: The Hub client.
        code_repo: The existing repository as "owner/name".
        code: The files.

    Returns:
        The commit that contains the files.
    """
    info = api.model_info(code_repo)
    operations = [CommitOperationAdd(name, text.encode()) for name, text in code.items()]
    if all(sibling.rfilename != CARD_NAME for sibling in info.siblings or []):
        operations.append(CommitOperationAdd(CARD_NAME, CODE_REPO_CARD.encode()))
    message = f"Upload the code of hf_attn_variants {ATTN_VARIANTS_VERSION}"
    return api.create_commit(code_repo, operations, commit_message=message, parent_commit=info.sha).oid


def insert_commits(text: str, commit: str, code_commit: str) -> str:
    """Insert the commits of the model and of its code into the example on a generated card."""
    if not is_unedited_card(text):
        return text
    body = text[: text.rindex(GENERATED_CARD)]
    return add_digest_mark(body.replace(COMMIT, f'"{commit}"').replace(CODE_COMMIT, f'"{code_commit}"'))


def find_pinned_commit(text: str) -> str | None:
    """Return the commit of the model in the example on a card, or None if the card does not pin a commit."""
    match = re.search(r'\n    revision="(\w+)",', text)
    return None if match is None else match[1]
