"""Pushing a checkpoint to the Hub in one commit, also at the end of a training."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers.dynamic_module_utils import get_relative_import_files

from ..conversion.checkpoint.source import check_files, check_whole_model, explain_unsafe_path, read_config
from ..conversion.checkpoint.tensor_files import open_checkpoint
from ..files import (
    BEST_MODEL_FILE,
    CARD_NAME,
    HISTORY_NAME,
    LOGS,
    PICKLE_SUFFIXES,
    REPORT_NAME,
    RESULTS_NAME,
    TRACKER_FOLDERS,
    TRAINING_LEFTOVERS,
)
from ..model_history import read_history
from .card import CardOptions, begins_with_model, holds_secret, is_untouched, model_card, names_places, shared_content

__all__ = [
    "PushPlan",
    "PushResult",
    "check_hub_access",
    "check_visibility",
    "explained",
    "folder_files",
    "full_repo_id",
    "plan_push",
    "push_checkpoint",
    "push_trained",
]

# What training leaves beside the model, by name or by the first folder of the path.
TRAINING_FILES = ("checkpoint-*", BEST_MODEL_FILE, *TRACKER_FOLDERS, *TRAINING_LEFTOVERS)
# They name folders of the machine they were written on.
WITHOUT_PATHS = (HISTORY_NAME, REPORT_NAME, RESULTS_NAME)
# Text that is uploaded as it is, if it is shorter: whoever wrote it may have written more than is meant for others.
NOTES = (".txt", ".md", ".rst", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".sh", ".jsonl", ".csv", ".tsv")
MOST_NOTES_BYTES = 2**20
WEIGHT_FILE = re.compile(r"[^/]*\.safetensors(\.index\.json)?")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")
# What to do about an answer of the Hub whose message does not say it.
ADVICE = {
    401: "Run `hf auth login` with a token that may write, or give --token.",
    403: "Give a token with write access, or another --repo_id.",
    409: "Somebody else is pushing to it at the same time: look at what is there now.",
    412: "Somebody else is pushing to it at the same time: look at what is there now.",
}
AGAIN = "Then repeat the command: it sends only files that are missing, and makes no commit twice."


@dataclass(frozen=True)
class PushPlan:
    """The files and the card that a push would upload.

    Args:
        folder: the checkpoint.
        repo_id: "user/name", or "name" for the account of the token.
        files: each file to upload with its size in bytes, the card apart.
        left_out: each file or folder that stays, with the reason.
        card: the text of README.md.
        warnings: what is missing without being an error.
    """

    folder: Path
    repo_id: str
    files: dict[str, int]
    left_out: dict[str, str]
    card: str
    warnings: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """Return the plan in lines for people."""
        total = sum(self.files.values()) + len(self.card.encode())
        lines = [f"{self.folder} -> {self.repo_id}: {len(self.files) + 1} files, {total:,} bytes"]
        lines += [f"  {size:>15,}  {name}" for name, size in self.files.items()]
        lines.append(f"  {len(self.card.encode()):>15,}  {CARD_NAME} (the model card)")
        lines += [f"  stays: {name} ({reason})" for name, reason in self.left_out.items()]
        return "\n".join(lines + [f"  note: {warning}" for warning in self.warnings])


@dataclass(frozen=True)
class PushResult:
    """Where a checkpoint is now.

    Args:
        repo_id: the repository with its namespace.
        url: its address.
        commit: the commit's id, for `revision=`.
        changed: whether the push changed anything; a repeated one does not.
        removed: stale files of an earlier push that the commit removed.
    """

    repo_id: str
    url: str
    commit: str
    changed: bool
    removed: list[str]


def plan_push(
    folder: str | Path,
    repo_id: str,
    card_options: CardOptions | None = None,
    card: str | None = None,
    allow_pickle: bool = False,
) -> PushPlan:
    """Check a checkpoint folder and say what of it would go up; nothing is sent.

    Args:
        folder: config.json, safetensors weights, the code files that it names, and further files.
        repo_id: "user/name", or "name".
        card_options: what the generated card says beyond the folder.
        card: the text of a card to use instead of a generated one.
        allow_pickle: upload pickled files too, which can run code when they are loaded.

    Raises:
        OSError: if weights or code files are missing or truncated.
        ValueError: if the configuration or the repository's name is wrong.
    """
    folder = Path(folder).expanduser()
    validate_repo_id(repo_id)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint folder {str(folder)!r}.")
    check_files(folder)
    check_whole_model(folder, allow_pickle)
    with open_checkpoint(folder, allow_pickle):
        pass  # headers and sizes of all weight files are right
    _check_code(folder, read_config(folder).get("auto_map"))
    files, left_out = folder_files(folder, allow_pickle)
    if (folder / CARD_NAME).is_file():
        left_out[CARD_NAME] = "the model card takes its place; --card uploads it"
    warnings = [] if any(name in files for name in TOKENIZER_FILES) else ["the folder has no tokenizer"]
    notes = [name for name in files if not name.startswith(("vocab", "merges")) and names_places(_note(folder / name))]
    warnings += [f"{name} names folders of a machine, and goes up as it is" for name in notes]
    if card is None:
        history = read_history(folder)
        made = model_card(folder, repo_id, card_options, history)
        card, data = str(made), made.data.to_dict()
        warnings += [f"{problem} The card is without it." for problem in history.problems]
        if data.get("base_model") is None and any(begins_with_model(step) for step in history.steps):
            warnings.append("the card names no model that this one was made from: give --base_model")
        if data.get("license") is None:
            warnings.append("the card states no licence: give --license")
        if "/" not in repo_id:
            warnings.append(f"the card's example loads {repo_id!r}, without an account: give user/{repo_id}")
    return PushPlan(folder, repo_id, files, left_out, card, warnings)


def folder_files(folder: Path, allow_pickle: bool = False) -> tuple[dict[str, int], dict[str, str]]:
    """List a checkpoint folder, the card apart: what goes up with its size in bytes, what stays with the reason."""
    files: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        first = name.split("/")[0]
        if any(part.startswith(".") or part == "__pycache__" for part in name.split("/")):
            if "/" not in name:
                left_out[name] = "hidden"
        elif any(name.startswith(f"{each}/") for each in left_out):
            continue
        elif reason := explain_unsafe_path(path, folder):
            left_out[name] = reason.split(",")[0]
        elif any(fnmatchcase(first, pattern) for pattern in TRAINING_FILES):
            left_out[first] = "of the training run"
        elif path.is_file() and name.lower().endswith(PICKLE_SUFFIXES) and not allow_pickle:
            left_out[name] = "a pickle; --allow_pickle uploads it"
        elif any(fnmatchcase(path.name.lower(), pattern) for pattern in LOGS):
            left_out[name] = "a log"
        elif path.is_file() and holds_secret(_note(path)):
            left_out[name] = "it holds a token, or an address with a password"
        elif path.is_file() and name != CARD_NAME:
            try:
                content = shared_content(path, name in WITHOUT_PATHS)
                files[name] = path.stat().st_size if content is None else len(content)
            except (ValueError, OSError, RecursionError):  # folders of this machine cannot be taken out of it
                left_out[name] = "cannot be read"
    return files, left_out


def full_repo_id(repo_id: str, api: HfApi) -> str:
    """Return "user/name"; a name without an account gets that of the client's token.

    Raises:
        OSError: if the Hub has to be asked and does not accept the token, or cannot be reached.
    """
    if "/" in repo_id:
        return repo_id
    with explained(repo_id):
        return f"{api.whoami()['name']}/{repo_id}"


def push_checkpoint(
    plan: PushPlan,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model, tokenizer, code and model card",
    overwrite_card: bool = False,
    api: HfApi | None = None,
) -> PushResult:
    """Upload a plan in one commit, on top of what is in the repository; create repository and branch where needed.

    The same commit removes weight files and reports of an earlier push that this one does not have: two sets of
    weights would be two models, and an earlier report would count as a further step.

    Args:
        plan: of `plan_push`.
        private: make a new repository private or public; an existing one must already be what is asked for.
        revision: a branch; None = main.
        commit_message: of the commit.
        overwrite_card: replace a README.md on the Hub that somebody edited.
        api: the client with its endpoint and token; None = the stored login.

    Raises:
        OSError: if it was not pushed, with what to do; then no file of the repository has changed.
        ValueError: if the repository is public and `private` is true, or the reverse, or holds a README.md that
            somebody wrote.
    """
    api = api or HfApi()
    with explained(plan.repo_id):
        repo_id = full_repo_id(plan.repo_id, api)
        if not check_visibility(api, repo_id, private):
            api.create_repo(repo_id, private=private)
        if revision not in (None, "main"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        info = api.model_info(repo_id, revision=revision)
        existing = [each.rfilename for each in info.siblings or []]
        if CARD_NAME in existing and not overwrite_card:
            _check_remote_card(api, repo_id, str(info.sha), plan.card)
        weights_and_reports = (name for name in existing if WEIGHT_FILE.fullmatch(name) or name in WITHOUT_PATHS)
        stale = sorted(name for name in weights_and_reports if name not in plan.files)
        operations: list[Any] = [CommitOperationDelete(name) for name in stale]
        operations += [CommitOperationAdd(name, _payload(plan.folder, name)) for name in plan.files]
        operations.append(CommitOperationAdd(CARD_NAME, plan.card.encode()))
        commit = api.create_commit(
            repo_id, operations, commit_message=commit_message, revision=revision, parent_commit=info.sha
        )
    return PushResult(repo_id, f"{api.endpoint}/{repo_id}", commit.oid, commit.oid != info.sha, stale)


def _check_code(folder: Path, auto_map: Any) -> None:
    """Check that the code files which `auto_map` names, and those which they import, are in the folder."""
    values = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    references = [each for value in values for each in (value if isinstance(value, list) else [value])]
    for reference in (each for each in references if each is not None):
        if not re.fullmatch(r"\w+\.\w+", str(reference)):
            raise ValueError(
                f"{folder}: `auto_map` names {reference!r}, which is not in the folder; save the model again by "
                "`save_pretrained`, which also saves its code."
            )
        get_relative_import_files(folder / f"{reference.split('.')[0]}.py")  # raises FileNotFoundError


def check_visibility(api: HfApi, repo_id: str, private: bool | None) -> bool:
    """Return whether a repository exists.

    Raises:
        ValueError: if it is public and `private` is true, or the reverse.
    """
    try:
        found = api.model_info(repo_id).private
    except RepositoryNotFoundError:
        return False
    if private is not None and found is not None and private != found:
        there, asked = ("private", "public") if found else ("public", "private")
        raise ValueError(
            f"{repo_id} exists and is {there}, a {asked} one was asked for: change it in its settings on the Hub, or "
            "name another one."
        )
    return True


def _check_remote_card(api: HfApi, repo_id: str, commit: str, card: str) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the cache may lie where nothing can be written
        path = api.hf_hub_download(repo_id, CARD_NAME, revision=commit, local_dir=folder)
        text = Path(path).read_text(encoding="utf-8")
    if text != card and not is_untouched(text):
        raise ValueError(
            f"{repo_id} has a README.md that was written or edited by hand: keep it by --card with a copy of it, or "
            "replace it by --overwrite_card."
        )


def _payload(folder: Path, name: str) -> str | bytes:
    return shared_content(folder / name, name in WITHOUT_PATHS) or str((folder / name).resolve())


def _note(path: Path) -> str:
    """Return what a file of text says; nothing of another kind of file."""
    if path.suffix.lower() not in NOTES or path.stat().st_size > MOST_NOTES_BYTES:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


@contextmanager
def explained(repo_id: str) -> Iterator[None]:
    """Turn what the client raises in a push into an OSError that says what to do; other errors of values stay."""
    try:
        yield
    except Exception as error:  # of the connection: three HTTP libraries of as many releases have errors of their own
        if isinstance(error, ValueError) and not isinstance(error, HfHubHTTPError):
            raise
        cause: BaseException = error
        while not isinstance(cause, HfHubHTTPError) and cause.__cause__ is not None:
            cause = cause.__cause__
        advice = ADVICE.get(cause.response.status_code, "") if isinstance(cause, HfHubHTTPError) else ""
        text = f"{repo_id} was not pushed: {type(cause).__name__}: {' '.join(str(cause).split())[:300]} {advice}"
        raise OSError(f"{text.rstrip()} {AGAIN}") from error


def check_hub_access(output_dir: str, hub_model_id: str | None, private: bool, token: str | None) -> None:
    """Check before a training that its model can be pushed after it.

    Args:
        output_dir: the folder for the model; its name is the default of the repository's.
        hub_model_id: the repository, user/name.
        private: whether it is to be private.
        token: instead of the stored one.

    Raises:
        ValueError: if the repository's name is wrong, or it is public and `private` is true.
        OSError: if there is no valid token, or the Hub does not answer.
    """
    repo_id, api = _repo_id(output_dir, hub_model_id), HfApi(token=token)
    validate_repo_id(repo_id)
    with explained(repo_id):
        api.whoami()
        check_visibility(api, full_repo_id(repo_id, api), private or None)


def push_trained(output_dir: str, hub_model_id: str | None, private: bool, token: str | None) -> str:
    """Upload a trained model without its checkpoints, with a model card of the run, in one commit.

    Args: as of `check_hub_access`.

    Returns:
        Where it is on the Hub.

    Raises:
        OSError: if it was not pushed; the model is in the folder, and the message says what to do.
    """
    repo_id, api = _repo_id(output_dir, hub_model_id), HfApi(token=token)
    try:
        plan = plan_push(output_dir, full_repo_id(repo_id, api))
        return push_checkpoint(plan, private=private or None, commit_message="Fine-tuned model", api=api).url
    except (ValueError, OSError) as error:
        raise OSError(
            f"{error} The trained model is in {output_dir}; `attn-variants push --model_name_or_path {output_dir} "
            f"--repo_id {repo_id}` pushes it without training again."
        ) from error


def _repo_id(output_dir: str, hub_model_id: str | None) -> str:
    return hub_model_id or Path(output_dir).resolve().name
