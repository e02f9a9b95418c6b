"""Pushes a checkpoint to the Hub in a single commit, with its code and a generated model card."""

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_import_files

from ..conversion.checkpoint.source import (
    check_checkpoint_files,
    check_complete_model,
    get_unsafe_path_reason,
    read_config,
)
from ..conversion.checkpoint.tensor_files import open_checkpoint
from ..files import (
    BEST_MODEL_FILE,
    CARD_NAME,
    HISTORY_NAME,
    LOG_PATTERNS,
    PICKLE_SUFFIXES,
    REPORT_NAME,
    RESULTS_NAME,
    TRACKER_FOLDERS,
    TRAINING_LEFTOVERS,
)
from ..model_folder import read_history
from ..modeling.code_builder import get_file_names
from .card import (
    CardOptions,
    contains_local_path,
    contains_secret,
    generate_model_card,
    is_unedited_card,
    redact_json_file,
    starts_from_model,
)
from .code_repository import (
    CODE_COMMIT,
    build_complete_code,
    find_pinned_commit,
    insert_commits,
    push_code,
    rewrite_configs,
)

__all__ = ["PushPlan", "PushResult", "check_visibility", "plan_push", "push_checkpoint", "resolve_repo_id"]

# Patterns of training files and folders that are not pushed.
TRAINING_FILES = ("checkpoint-*", BEST_MODEL_FILE, *TRACKER_FOLDERS, *TRAINING_LEFTOVERS)
# Reports that contain local paths, which are removed before a push.
REDACTED_FILES = (HISTORY_NAME, REPORT_NAME, RESULTS_NAME)
# Suffixes of text files, which are pushed unchanged. Short files are checked for local paths because they can be
# private notes.
NOTES_SUFFIXES = (".txt", ".md", ".rst", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".sh", ".jsonl", ".csv", ".tsv")
MAX_NOTES_BYTES = 2**20
WEIGHT_FILE = re.compile(r"[^/]*\.safetensors(\.index\.json)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")
# Advice for HTTP status codes for which the messages of the Hub do not contain any.
STATUS_ADVICE = {
    401: "Run `hf auth login` with a token that has write access, or pass --token.",
    403: "Use a token with write access, or a different --repo_id.",
    **dict.fromkeys((409, 412), "Another process is pushing to the repository. Check the repository's content."),
}


@dataclass(frozen=True)
class PushPlan:
    """The files and the model card to push.

    Args:
        folder: The folder of the checkpoint.
        repo_id: The repository as "user/name", or as "name" for the account that the token belongs to.
        files: {file to push: size in bytes}, without the model card.
        left_out: {file or folder that is not pushed: reason}.
        card: The text of README.md.
        warnings: Sentences about problems that do not prevent the push.
        code_repo: The code repository as "owner/name", or None if the code is in the repository of the checkpoint.
        code: {file to push to the code repository: text}.
        contents: {file to push: content that replaces the content of the file in the folder}.
    """

    folder: Path
    repo_id: str
    files: dict[str, int]
    left_out: dict[str, str]
    card: str
    warnings: list[str] = field(default_factory=list)
    code_repo: str | None = None
    code: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[str, bytes] = field(default_factory=dict)

    def summary(self) -> str:
        """Return a human-readable list of files and warnings."""
        total = sum(self.files.values()) + len(self.card.encode())
        lines = [f"{self.folder} -> {self.repo_id}: {len(self.files) + 1} files, {total:,} bytes"]
        lines += [f"  {size:>15,}  {name}" for name, size in self.files.items()]
        lines.append(f"  {len(self.card.encode()):>15,}  {CARD_NAME} (the model card)")
        lines += [f"  left out: {name} ({reason})" for name, reason in self.left_out.items()]
        if self.code_repo is not None:
            sizes = {name: len(text.encode()) for name, text in self.code.items()}
            lines.append(f"code -> {self.code_repo}: {len(sizes)} files, {sum(sizes.values()):,} bytes")
            lines += [f"  {size:>15,}  {name}" for name, size in sizes.items()]
        return "\n".join(lines + [f"  note: {warning}" for warning in self.warnings])


@dataclass(frozen=True)
class PushResult:
    """The result of a push.

    Args:
        repo_id: The repository as "user/name".
        url: The URL of the repository.
        commit: The id of the commit, which can be used as `revision`.
        changed: Whether the push changed the repository.
        removed: Files from an earlier push that the commit removed.
        code_commit: The commit of the code repository, which can be used as `code_revision`, or None if there is no
            code repository.
    """

    repo_id: str
    url: str
    commit: str
    changed: bool
    removed: list[str]
    code_commit: str | None = None


def plan_push(
    folder: str | Path,
    repo_id: str,
    card_options: CardOptions | None = None,
    card: str | None = None,
    allow_pickle: bool = False,
    code_repo: str | None = None,
) -> PushPlan:
    """Check a checkpoint folder and return the files to push, without pushing anything.

    Args:
        folder: The folder with config.json, safetensors weights, the code files that config.json refers to, and other
            files.
        repo_id: "user/name", or "name".
        card_options: Values for the generated card that are not contained in the folder.
        card: The text of a card that replaces the generated card.
        allow_pickle: Whether to push pickle files, which can run code when they are loaded.
        code_repo: "owner/name" of a repository for the code of several checkpoints. Defaults to the repository of the
            checkpoint.

    Raises:
        OSError: if weights or code files are missing or incomplete.
        ValueError: if the configuration or the name of a repository is invalid.

    Example:
        >>> print(plan_push("bert-gqa4", "user/bert-gqa4").summary())
    """
    folder = Path(folder).expanduser()
    validate_repo_id(repo_id)
    if code_repo is not None:
        _check_code_repo(code_repo, repo_id)
    check_checkpoint_files(folder)
    check_complete_model(folder, allow_pickle)
    with open_checkpoint(folder, allow_pickle):
        pass  # opening the checkpoint checks the headers and sizes of all weight files
    files, left_out = list_folder_files(folder, allow_pickle)
    code = {} if code_repo is None else build_complete_code()
    if code_repo is None:
        _check_code_files(folder, read_config(folder).get("auto_map"))
    contents = rewrite_configs(folder, code_repo, code)
    left_out |= {name: f"the code is in {code_repo}" for name in files if name in code}
    files = {name: size for name, size in files.items() if name not in code}
    files |= {name: len(content) for name, content in contents.items()}
    if (folder / CARD_NAME).is_file():
        left_out[CARD_NAME] = "replaced by the generated model card unless --card is set"
    warnings = [] if any(name in files for name in _TOKENIZER_FILES) else ["The folder contains no tokenizer."]
    notes = {name: _read_short_text(folder / name) for name in files if not name.startswith(("vocab", "merges"))}
    with_paths = (name for name, text in notes.items() if contains_local_path(text))
    warnings += [f"{name} contains local paths and is pushed unchanged." for name in with_paths]
    if card is None:
        card, card_warnings = _generate_card(folder, repo_id, card_options, code_repo)
        warnings += card_warnings
    if code_repo is not None:
        warnings.append(f"Without `code_revision`, `from_pretrained` runs the newest commit of {code_repo}.")
    return PushPlan(folder, repo_id, files, left_out, card, warnings, code_repo, code, contents)


def _check_code_repo(code_repo: str, repo_id: str) -> None:
    validate_repo_id(code_repo)
    if "/" not in code_repo or code_repo == repo_id:
        raise ValueError(
            f"`code_repo` must be owner/name of another repository than the checkpoint's, got {code_repo!r}. By "
            "default, the code is in the repository of the checkpoint."
        )


def _generate_card(
    folder: Path, repo_id: str, options: CardOptions | None, code_repo: str | None
) -> tuple[str, list[str]]:
    """Return the text of the generated model card, and warnings about missing information."""
    history = read_history(folder)
    card = generate_model_card(folder, repo_id, options, history, code_repo)
    data = card.data.to_dict()
    warnings = [f"{problem} The card does not contain it." for problem in history.problems]
    if data.get("base_model") is None and any(starts_from_model(step) for step in history.steps):
        warnings.append("The card has no base model. Set --base_model.")
    if data.get("license") is None:
        warnings.append("The card has no license. Set --license.")
    if "/" not in repo_id:
        warnings.append(f"The example on the card loads {repo_id!r} without a user name. Pass user/{repo_id}.")
    return str(card), warnings


def list_folder_files(folder: Path, allow_pickle: bool = False) -> tuple[dict[str, int], dict[str, str]]:
    """Return {file to push: size in bytes} and {file or folder to leave out: reason}."""
    files: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        first = name.split("/")[0]
        if any(part.startswith(".") or part == "__pycache__" for part in name.split("/")):
            if "/" not in name:
                left_out[name] = "hidden"
        elif any(name.startswith(f"{folder_name}/") for folder_name in left_out):
            continue
        elif reason := get_unsafe_path_reason(path, folder):
            left_out[name] = reason.split(",")[0]
        elif any(fnmatchcase(first, pattern) for pattern in TRAINING_FILES):
            left_out[first] = "a training file"
        elif path.is_file() and name.lower().endswith(PICKLE_SUFFIXES) and not allow_pickle:
            left_out[name] = "a pickle file, which requires --allow_pickle"
        elif any(fnmatchcase(path.name.lower(), pattern) for pattern in LOG_PATTERNS):
            left_out[name] = "a log file"
        elif path.is_file() and contains_secret(_read_short_text(path)):
            left_out[name] = "contains a token, or an address with a password"
        elif path.is_file() and name != CARD_NAME:
            try:
                content = redact_json_file(path, name in REDACTED_FILES)
                files[name] = path.stat().st_size if content is None else len(content)
            except (ValueError, OSError, RecursionError):  # local paths cannot be removed from it
                left_out[name] = "cannot be read"
    return files, left_out


def resolve_repo_id(repo_id: str, api: HfApi) -> str:
    """Return a repository id as "user/name". If it has no user, the name of the token's user is added.

    Raises:
        OSError: if the user must be requested but the Hub rejects the token or cannot be reached.

    Example:
        >>> resolve_repo_id("user/bert-gqa4", HfApi())
        'user/bert-gqa4'
    """
    if "/" in repo_id:
        return repo_id
    with convert_hub_errors(repo_id):
        return f"{api.whoami()['name']}/{repo_id}"


def push_checkpoint(
    plan: PushPlan,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model, tokenizer, code and model card",
    overwrite_card: bool = False,
    api: HfApi | None = None,
) -> PushResult:
    """Push the files in a plan in a single commit. The repository and the branch are created if they do not exist.

    The commit also removes weight files and reports from an earlier push that are not in the plan. Otherwise, the
    repository could contain two models, or an old report would be read as an additional step.

    With a code repository, the code is pushed first, and the commit also removes code files. A second commit contains
    the model card, which names the commit of the code and the commit of the other files.

    Args:
        plan: The result of `plan_push`.
        private: Whether a new repository is private. An existing repository must have the same
            visibility, unless this is None.
        revision: The branch to push to. Defaults to "main".
        commit_message: The commit message.
        overwrite_card: Whether to replace a README.md that was edited on the Hub.
        api: The client with its endpoint and token. Defaults to a client with the stored login.

    Returns:
        A description of the push, with the repository and the commit.

    Raises:
        OSError: if the push fails. The message explains what to do. Without a code repository, nothing has changed on
            the Hub in this case.
        ValueError: if the visibility of the repository does not match `private`, or if its README.md was edited by
            hand.

    Example:
        >>> push_checkpoint(plan_push("bert-gqa4", "user/bert-gqa4"), private=True).url
    """
    api = api or HfApi()
    with convert_hub_errors(plan.repo_id):
        repo_id = resolve_repo_id(plan.repo_id, api)
        if not check_visibility(api, repo_id, private):
            api.create_repo(repo_id, private=private)
        if revision not in (None, "main"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        info = api.model_info(repo_id, revision=revision)
        existing = [sibling.rfilename for sibling in info.siblings or []]
        remote_card = _read_remote_card(api, repo_id, str(info.sha)) if CARD_NAME in existing else None
        if remote_card is not None and not overwrite_card:
            _check_remote_card(repo_id, remote_card, plan.card)
        code_commit = None if plan.code_repo is None else _push_code(api, plan.code_repo, plan.code, private)
        stale = [name for name in existing if WEIGHT_FILE.fullmatch(name) or name in REDACTED_FILES]
        stale += [name for name in existing if plan.code_repo is not None and name in get_file_names()]
        stale = sorted(name for name in stale if name not in plan.files)
        operations: list[Any] = [CommitOperationDelete(name) for name in stale]
        operations += [CommitOperationAdd(name, _get_planned_payload(plan, name, code_commit)) for name in plan.files]
        card = CommitOperationAdd(CARD_NAME, plan.card.encode())
        operations += [card] if code_commit is None else []
        options: dict[str, Any] = {"commit_message": commit_message, "revision": revision}
        head = pinned = api.create_commit(repo_id, operations, parent_commit=info.sha, **options).oid
        if code_commit is not None:
            pinned = _find_same_commit(api, repo_id, head, find_pinned_commit(remote_card or ""))
            card = CommitOperationAdd(CARD_NAME, insert_commits(plan.card, pinned, code_commit).encode())
            head = api.create_commit(repo_id, [card], parent_commit=head, **options).oid
    return PushResult(repo_id, f"{api.endpoint}/{repo_id}", pinned, head != info.sha, stale, code_commit)


def _push_code(api: HfApi, code_repo: str, code: Mapping[str, str], private: bool | None) -> str:
    """Push the code to its repository, which is created if it does not exist, and return the commit."""
    # A private checkpoint may use public code, but a public checkpoint needs public code.
    if not check_visibility(api, code_repo, None if private else private):
        api.create_repo(code_repo, private=private)
    return push_code(api, code_repo, code)


def _find_same_commit(api: HfApi, repo_id: str, head: str, commit: str | None) -> str:
    """Return an earlier commit if its files are the same as those of `head` except for the card, or `head`."""
    if commit is None:
        return head
    try:
        return commit if _list_blobs(api, repo_id, commit) == _list_blobs(api, repo_id, head) else head
    except RevisionNotFoundError:
        return head


def _list_blobs(api: HfApi, repo_id: str, commit: str) -> dict[str, str]:
    """Return the content id of each file in a commit, except for the model card."""
    files = api.list_repo_tree(repo_id, recursive=True, revision=commit)
    return {file.path: file.blob_id for file in files if isinstance(file, RepoFile) and file.path != CARD_NAME}


def _check_code_files(folder: Path, auto_map: Any) -> None:
    """Check that the folder contains the code files in `auto_map` and the files that they import."""
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    references = [entry for value in values for entry in (value if isinstance(value, list) else [value])]
    for reference in (entry for entry in references if entry is not None):
        if not re.fullmatch(r"\w+\.\w+", str(reference)):
            raise ValueError(
                f"{folder}: `auto_map` must refer to code in the folder, got {reference!r}. Save the model again with "
                "`save_pretrained`, which also saves its code."
            )
        get_relative_import_files(folder / f"{reference.split('.')[0]}.py")  # raises FileNotFoundError


def check_visibility(api: HfApi, repo_id: str, private: bool | None) -> bool:
    """Return whether a repository exists. If it does, check that its visibility matches `private`.

    Args:
        api: The Hub client.
        repo_id: The repository as "user/name".
        private: Whether the repository must be private. If None, the visibility is not checked.

    Raises:
        ValueError: if the repository is public but `private` is True, or private but `private` is False.

    Example:
        >>> check_visibility(HfApi(), "user/bert-gqa4", private=True)
    """
    try:
        is_private = api.model_info(repo_id).private
    except RepositoryNotFoundError:
        return False
    if private is not None and is_private is not None and private != is_private:
        current, requested = ("private", "public") if is_private else ("public", "private")
        raise ValueError(
            f"{repo_id} must be {requested}, but it exists and is {current}. Change its settings on the Hub, or use "
            "another repository."
        )
    return True


def _read_remote_card(api: HfApi, repo_id: str, commit: str) -> str:
    with tempfile.TemporaryDirectory() as folder:  # the cache may be read-only
        path = api.hf_hub_download(repo_id, CARD_NAME, revision=commit, local_dir=folder)
        return Path(path).read_text(encoding="utf-8")


def _check_remote_card(repo_id: str, text: str, card: str) -> None:
    """Check that the README.md in a repository was not edited by hand, unless it is the same as the card."""
    if text != card and not is_unedited_card(text):
        raise ValueError(
            f"{repo_id} has a README.md that was edited by hand. Pass a copy of it as --card to keep it, or "
            "--overwrite_card to replace it."
        )


def _get_planned_payload(plan: PushPlan, name: str, code_commit: str | None) -> str | bytes:
    """Return the path of a planned file, or its new content if the plan changes the file."""
    if name in plan.contents:
        return plan.contents[name].replace(CODE_COMMIT.encode(), f'"{code_commit}"'.encode())
    return _get_payload(plan.folder, name)


def _get_payload(folder: Path, name: str) -> str | bytes:
    """Return the path of a file to upload, or its content if private data must be removed."""
    return redact_json_file(folder / name, name in REDACTED_FILES) or str((folder / name).resolve())


def _read_short_text(path: Path) -> str:
    """Return the content of a short text file, or an empty string for all other files."""
    if path.suffix.lower() not in NOTES_SUFFIXES or path.stat().st_size > MAX_NOTES_BYTES:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


@contextmanager
def convert_hub_errors(repo_id: str) -> Iterator[None]:
    """Convert Hub client errors to an `OSError` that explains what to do. Other `ValueError`s are not changed."""
    try:
        yield
    except Exception as error:  # each HTTP library has its own types of connection errors
        if isinstance(error, ValueError) and not isinstance(error, HfHubHTTPError):
            raise
        cause: BaseException = error
        while not isinstance(cause, HfHubHTTPError) and cause.__cause__ is not None:
            cause = cause.__cause__
        advice = STATUS_ADVICE.get(cause.response.status_code, "") if isinstance(cause, HfHubHTTPError) else ""
        text = f"{repo_id} was not pushed: {type(cause).__name__}: {' '.join(str(cause).split())[:300]}"
        advice = f"{advice} Then run" if advice else "Run"
        raise OSError(
            f"{text} {advice} the command again. It only uploads missing files and creates a single commit."
        ) from error


def check_hub_access(output_dir: str, hub_model_id: str | None, private: bool, token: str | None) -> None:
    """Check, before training, that the trained model can be pushed to the Hub.

    Args:
        output_dir: The folder of the model.
        hub_model_id: The repository, for example "user/name". Defaults to the name of the folder.
        private: Whether the repository must be private.
        token: The access token for the Hub. Defaults to the stored login.

    Raises:
        ValueError: if the name of the repository is invalid, or if the repository is public but `private` is True.
        OSError: if there is no valid token, or the Hub cannot be reached.
    """
    repo_id, api = _get_repo_id(output_dir, hub_model_id), HfApi(token=token)
    validate_repo_id(repo_id)
    with convert_hub_errors(repo_id):
        api.whoami()
        check_visibility(api, resolve_repo_id(repo_id, api), private or None)


def push_trained_model(output_dir: str, hub_model_id: str | None, private: bool, token: str | None) -> str:
    """Push a trained model with a generated model card in a single commit, without training checkpoints.

    Args:
        output_dir: The folder of the model.
        hub_model_id: The repository, for example "user/name". Defaults to the name of the folder.
        private: Whether the repository must be private.
        token: The access token for the Hub. Defaults to the stored login.

    Returns:
        The URL of the repository.

    Raises:
        OSError: if the push fails. The model stays in the folder, and the message explains how to push it.
    """
    repo_id, api = _get_repo_id(output_dir, hub_model_id), HfApi(token=token)
    try:
        plan = plan_push(output_dir, resolve_repo_id(repo_id, api))
        return push_checkpoint(plan, private=private or None, commit_message="Fine-tuned model", api=api).url
    except (ValueError, OSError) as error:
        raise OSError(
            f"{error} The trained model is in {output_dir}. Push it without retraining: `attn-variants push "
            f"--model_name_or_path {output_dir} --repo_id {repo_id}`."
        ) from error


def _get_repo_id(output_dir: str, hub_model_id: str | None) -> str:
    return hub_model_id or Path(output_dir).resolve().name
