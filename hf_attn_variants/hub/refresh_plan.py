"""What a repository with our code holds, and what of it today's code changes: read as text, and nothing of it run."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from packaging.version import InvalidVersion, Version

from ..conversion.checkpoint.source import local_folder, read_config, resolve_source
from ..files import CARD_NAME, CONFIG_NAME, PICKLE_SUFFIXES, REFRESH_PREFIX, load_json
from ..modeling.travel import code_files, travelling_names
from ..modeling.variant_names import ATTN_VARIANTS_VERSION
from ..registration import variant_config_class
from .card import refreshed_card
from .refresh_config import with_auto_map

__all__ = ["KINDS", "FileChange", "RefreshPlan", "Repository", "make_plan", "read_repository", "what_changes_meaning"]

VERSION_FILE = "variant_names.py"
# Digests of the files that released versions wrote: {version: {file: the first 16 digits of its sha256}}.
RELEASED = Path(__file__).with_name("released_code.json")
# What is no file of the model: neither read nor copied.
NOT_COPIED = (".git", ".cache", "__pycache__")
# More lines than any file of ours; comparing takes their square.
MOST_COMPARED_LINES = 5000
# Before it, upstream ignored this flag of UMT5.
UMT5_FLAG_READ = Version("5.24")


KINDS = ("changed", "added", "removed")


@dataclass(frozen=True)
class Repository:
    """A repository that this package saved.

    Args:
        name: as it was given.
        folder: where it lies; of a Hub id in the Hub's cache.
        commit: of the Hub that was read; None for a folder.
        version: of the code in it; None where that does not say so, as before 0.1.0.
        config: its config.json.
        files: all regular files with their sizes, by relative path.
        not_downloaded: what stayed on the Hub: pickles, weights in other formats; None where it cannot be asked.
    """

    name: str
    folder: Path
    commit: str | None
    version: str | None
    config: dict[str, Any]
    files: dict[str, int]
    not_downloaded: list[str] | None = field(default_factory=list)

    @property
    def code_files(self) -> list[str]:
        """The Python files beside config.json."""
        return [name for name in self.files if name.endswith(".py") and "/" not in name]


@dataclass(frozen=True)
class FileChange:
    """One file that is not as it was.

    Args:
        name: beside config.json.
        content: the new one; None where the file goes.
        is_new: whether there was none.
        added, removed: lines.
    """

    name: str
    content: bytes | None
    is_new: bool
    added: int
    removed: int

    @property
    def kind(self) -> str:
        """What happens to it."""
        return KINDS[2 if self.content is None else 1 if self.is_new else 0]


@dataclass(frozen=True)
class RefreshPlan:
    """What a refresh does.

    Args:
        repository: as it is.
        changes: the files that change.
        notes: what the user should know, a sentence each.
    """

    repository: Repository
    changes: list[FileChange]
    notes: list[str] = field(default_factory=list)


def read_repository(name: str | os.PathLike, revision: str | None = None, token: str | None = None) -> Repository:
    """Find a repository, and check that this version of the package can refresh it.

    Args:
        name: a folder, or a Hub id, whose files are downloaded but for pickles.
        revision, token: of a Hub id.

    Raises:
        OSError: if there is none, it holds a link that leads outside, or what is neither a file nor a folder.
        ValueError: if it is not this package's, or a newer version saved it.
    """
    given = local_folder(name)
    folder = resolve_source(name, revision, token, weights=False)
    is_cached = given is None
    folder = folder if is_cached else folder.resolve()
    files = _regular_files(folder, is_cached)
    config = read_config(folder)
    version = _code_version(folder, files)
    _check_is_ours(os.fspath(name), config, version)
    if not is_cached:
        return Repository(os.fspath(name), folder, None, version, config, files)
    left = _not_downloaded(os.fspath(name), folder.name, token, files)
    return Repository(os.fspath(name), folder, folder.name, version, config, files, left)


def make_plan(repository: Repository) -> RefreshPlan:
    """Compare a repository with what this version of the package would save; nothing is written.

    Raises:
        ValueError: if a file of somebody else has the name of one that is to be written, or config.json or the card
            cannot be read.
    """
    code, known = travelling_code(repository.config), _known_names()
    others = [name for name in repository.code_files if name not in known]
    ours = _names_of(repository.version) | _reached(repository)
    taken = [name for name in code if name in repository.files and name not in ours]
    taken = [name for name in taken if _read(repository, name) != code[name]]
    if taken:
        raise ValueError(
            f"{repository.name}: {taken[0]} is not of the code of {repository.version or 'its version'}, which does "
            "not import it, so it is somebody's own; today's code has a file of that name. Give it another name."
        )
    changes = [_change(repository, name, content) for name, content in code.items()]
    needed = _imported_by(repository, others)
    changes += [
        _change(repository, name, None)
        for name in repository.code_files
        if name in known and name not in code and name not in needed
    ]
    configuration, own_entries = with_auto_map(
        _read(repository, CONFIG_NAME), variant_config_class(repository.config["model_type"]).own_auto_map(), known
    )
    changes.append(_change(repository, CONFIG_NAME, configuration))
    notes = [f"{name} is not of this package and stays as it is." for name in others]
    notes += [f"`auto_map` keeps its entry {key}: it names code that is not of this package." for key in own_entries]
    notes += _edited(repository)
    card, card_note = _card(repository)
    changes += [] if card is None else [_change(repository, CARD_NAME, card)]
    notes += [card_note] if card_note else []
    pickles = [name for name in repository.files if name.lower().endswith(PICKLE_SUFFIXES)]
    notes += [f"{name} is a pickle: it was not read." for name in pickles]
    if repository.not_downloaded is None:
        notes.append("the Hub cannot be reached: this is what of the repository lies in the cache, perhaps not all.")
    elif repository.not_downloaded:
        notes.append(f"neither read nor copied from the Hub: {', '.join(repository.not_downloaded)}.")
    notes += what_changes_meaning(repository.config)
    return RefreshPlan(repository, [each for each in changes if each is not None], notes)


def what_changes_meaning(config: Mapping[str, Any]) -> list[str]:
    """Return what a config.json means in today's code and would mean otherwise in upstream's, a sentence each."""
    notes = []
    is_untied_umt5 = config["model_type"] == "attn_variant_umt5" and config.get("tie_word_embeddings") is False
    if is_untied_umt5 and _saved_before(config, UMT5_FLAG_READ):
        notes.append(
            "config.json says `tie_word_embeddings: false`. Until transformers 5.23 UMT5 ignored that and multiplied "
            "the decoder's outputs by d_model ** -0.5; from 5.24 on it does not where the flag is false. This model "
            "keeps what it did when it was saved: its outputs are multiplied."
        )
    return notes


def travelling_code(config: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files that a model of this configuration takes along when it is saved, by name."""
    files = code_files(*variant_config_class(config["model_type"]).code_modules())
    return {name: text.encode() for name, text in files.items()}


def _regular_files(folder: Path, is_cached: bool) -> dict[str, int]:
    """List the files; in a folder of the user's, no link may lead out of it. The Hub's cache is made of links."""
    found: dict[str, int] = {}
    for directory, subfolders, names in os.walk(folder):
        subfolders[:] = sorted(
            name for name in subfolders if name not in NOT_COPIED and not name.startswith(REFRESH_PREFIX)
        )
        for name in sorted((*subfolders, *names)):
            path = Path(directory) / name
            relative = path.relative_to(folder).as_posix()
            is_link = path.is_symlink()
            if is_link and not is_cached:
                _check_link(folder, path, relative)
            if name in subfolders and not is_link:
                continue
            kind = os.stat(path).st_mode
            if not stat.S_ISREG(kind):
                what = "a link to a folder" if is_link else "neither a file nor a folder"
                raise OSError(f"{folder}: {relative} is {what}: remove it, or refresh a copy without it.")
            found[relative] = path.stat().st_size
    return found


def _not_downloaded(name: str, commit: str, token: str | None, files: Mapping[str, int]) -> list[str] | None:
    try:
        return sorted({*HfApi().list_repo_files(name, revision=commit, token=token)} - {*files})
    except Exception:  # no network: what is in the cache is all that is known
        return None


def _check_link(folder: Path, path: Path, relative: str) -> None:
    target = Path(os.path.realpath(path))
    if not target.exists():
        raise OSError(f"{folder}: {relative} is a link that leads nowhere: mend or remove it.")
    if not target.is_relative_to(folder):
        raise OSError(
            f"{folder}: {relative} is a link that leads out of the folder, to {target}: it is not followed. Put the "
            "file itself there; for a repository in the Hub's cache, give its Hub id."
        )


def _code_version(folder: Path, files: Mapping[str, int]) -> str | None:
    """Return the version that the code says it is of; before 0.1.0 another file said it."""
    names = [VERSION_FILE, *(name for name in files if name.endswith(".py") and "/" not in name)]
    for name in (each for each in names if each in files):
        text = (folder / name).read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"""^ATTN_VARIANTS_VERSION = ["']([^"'\n]{1,40})["']""", text, re.MULTILINE):
            return match[1]
    return None


def _check_is_ours(name: str, config: Mapping[str, Any], version: str | None) -> None:
    model_type = config["model_type"]
    if not model_type.startswith("attn_variant_"):
        raise ValueError(
            f"{name} is a checkpoint of model type {model_type!r} that this package did not save: there is no code of "
            "ours in it to refresh. `attn-variants convert` makes a variant of a plain checkpoint."
        )
    if not isinstance(config.get("auto_map"), dict) or not config["auto_map"]:
        raise ValueError(
            f"{name} is of this package but carries no code (its config.json has no `auto_map`), so there is none to "
            "refresh: with the package installed it loads as it is, and `save_pretrained` saves it with its code."
        )
    if version is not None and _is_newer(version, name):
        raise ValueError(
            f"{name} has the code of hf_attn_variants {version}; this is {ATTN_VARIANTS_VERSION}, which is older: "
            f"install {version} or newer."
        )
    variant_config_class(model_type)


def _is_newer(version: str, name: str) -> bool:
    try:
        return Version(version) > Version(ATTN_VARIANTS_VERSION)
    except InvalidVersion as error:
        raise ValueError(f"{name}: {VERSION_FILE} says that it is of version {version!r}, which is none.") from error


def _saved_before(config: Mapping[str, Any], version: Version) -> bool:
    try:
        return Version(str(config.get("transformers_version"))) < version
    except InvalidVersion:
        return True


def _known_names() -> set[str]:
    """Return the names of all files that today's code or a released version has."""
    released = (name for files in load_json(RELEASED).values() for name in files)
    return {*released, *travelling_names()}


def _names_of(version: str | None) -> set[str]:
    """Return the names of the files that a version may have written."""
    if version == ATTN_VARIANTS_VERSION:
        return _known_names()
    released = load_json(RELEASED)
    return {name for key, files in released.items() if key == version or version not in released for name in files}


def _edited(repository: Repository) -> list[str]:
    """Say which files are not as the version that they say they are of wrote them."""
    released = load_json(RELEASED).get(repository.version or "", {})
    names = [name for name in repository.code_files if name in released]
    edited = [name for name in names if _digest(_read(repository, name)) != released[name]]
    if not edited:
        return []
    return [
        f"not as {repository.version} wrote them: {', '.join(edited)}. What somebody changed there is not in today's "
        "code."
    ]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _reached(repository: Repository) -> set[str]:
    """Return the files that the repository's `auto_map` names, and those that they import."""
    values = (each for value in repository.config["auto_map"].values() for each in _as_list(value))
    modules = (each.split("--")[-1].rpartition(".")[0] for each in values if isinstance(each, str))
    return _imported_by(repository, [f"{module}.py" for module in modules])


def _imported_by(repository: Repository, names: list[str]) -> set[str]:
    """Return these code files and all that they import of the repository."""
    wanted, seen = list(names), set()
    while wanted:
        name = wanted.pop()
        if name in seen or name not in repository.files:
            continue
        seen.add(name)
        text = _read(repository, name).decode("utf-8", errors="replace")
        wanted += [f"{each}.py" for each in re.findall(r"^\s*from\s+\.(\w+)\s+import", text, re.MULTILINE)]
    return seen


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _read(repository: Repository, name: str) -> bytes:
    return (repository.folder / name).read_bytes()


def _change(repository: Repository, name: str, content: bytes | None) -> FileChange | None:
    """Return what becomes of a file; None where nothing does."""
    is_new = name not in repository.files
    before = b"" if is_new else _read(repository, name)
    if not is_new and before == content:
        return None
    old, new = before.splitlines(), (content or b"").splitlines()
    is_long = max(len(old), len(new)) > MOST_COMPARED_LINES
    blocks = [] if is_long else SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    same = sum(block.size for block in blocks)
    return FileChange(name, content, is_new, len(new) - same, len(old) - same)


def _card(repository: Repository) -> tuple[bytes | None, str | None]:
    """Return the new model card, if one of ours is there, and what to say of another."""
    if CARD_NAME not in repository.files:
        return None, None
    try:
        text = _read(repository, CARD_NAME).decode()
    except UnicodeDecodeError:
        return None, f"{CARD_NAME} is not UTF-8 and stays as it is."
    card = refreshed_card(text)
    if card is None:
        return None, f"{CARD_NAME} was written or edited by hand and stays as it is: see what it says of versions."
    return card.encode(), None


def released_digests(folder: Path) -> dict[str, str]:
    """Return what `released_code.json` says of a version, from repositories that it saved."""
    paths = {path.name: path for path in sorted(folder.glob("*/*.py"))}
    return {name: _digest(paths[name].read_bytes()) for name in sorted(paths)}


def plan_json(values: Any) -> str:
    """Return JSON as this package writes it."""
    return json.dumps(values, indent=2) + "\n"
