"""Today's code into a repository that an older version of this package saved; weights and tokenizer stay as they are.

`refresh_plan` says what changes, `refresh_check` whether that is right for the weights, and `refresh_write` writes.
"""

import logging
import os
import re
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

from ..conversion.checkpoint.source import local_folder
from ..files import CARD_NAME, UNFINISHED_REFRESH, check_output_dir
from ..modeling.variant_names import ATTN_VARIANTS_VERSION
from .push import PushResult, check_visibility, explained, full_repo_id, plan_push, push_checkpoint
from .refresh_check import check_weights, compare_with_old_code
from .refresh_plan import KINDS, FileChange, RefreshPlan, Repository, make_plan, read_repository
from .refresh_write import end_interrupted, held, write_folder, write_in_place

__all__ = ["RefreshResult", "refresh_repository"]

logger = logging.getLogger(__name__)
COMMIT_MESSAGE = f"Code of hf_attn_variants {ATTN_VARIANTS_VERSION}"


@dataclass(frozen=True)
class RefreshResult:
    """What a refresh did, or with `dry_run` would do.

    Args:
        name: the repository, as it was given.
        version_before: of its code; None where that does not say so.
        version: of the code that it has now.
        changes: the files that are not as they were; none where the repository was up to date.
        unchanged: how many are.
        checks: what was found right, a sentence each.
        notes: what the user should know, a sentence each.
        is_dry_run: whether nothing was written.
        output_dir: the folder with today's code; None where only the Hub has it.
        backup: the folder in it that keeps the old files; None for a new folder.
        pushed: where it is on the Hub.
    """

    name: str
    version_before: str | None
    version: str
    changes: list[FileChange]
    unchanged: int
    checks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_dry_run: bool = False
    output_dir: Path | None = None
    backup: str | None = None
    pushed: PushResult | None = None

    def summary(self) -> str:
        """Return a few lines for people; of a dry run a line for each file."""
        versions = f"hf_attn_variants {self.version_before or 'of an unknown version'} -> {self.version}"
        lines = [f"{self.name}: {versions}" if self.changes else f"{self.name} is up to date ({self.version})"]
        if self.changes:
            counts = {kind: sum(each.kind == kind for each in self.changes) for kind in KINDS}
            counts |= {"as they were": self.unchanged}
            lines.append("  files: " + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
        if self.is_dry_run:
            lines += [f"  {e.kind:<8} {f'+{e.added}':>6} {f'-{e.removed}':>6}  {e.name}" for e in self.changes]
        lines += [f"  checked: {each}" for each in self.checks]
        lines += [f"  note: {each}" for each in self.notes]
        if self.output_dir is not None and self.changes:
            kept = f"; {self.backup} in it keeps the old files" if self.backup else ""
            lines.append(f"Wrote {self.output_dir}{kept}")
        if self.pushed is not None:
            done = "Pushed to" if self.pushed.changed else "Nothing new for"
            lines.append(f"{done} {self.pushed.url}, commit {self.pushed.commit}")
        if self.is_dry_run:
            lines.append("Dry run: nothing was written.")
        return "\n".join(lines)


def refresh_repository(
    model_name_or_path: str | os.PathLike,
    output_dir: str | os.PathLike | None = None,
    *,
    dry_run: bool = False,
    trust_remote_code: bool = False,
    push_to_hub: bool = False,
    hub_model_id: str | None = None,
    private: bool | None = None,
    commit_message: str = COMMIT_MESSAGE,
    revision: str | None = None,
    token: str | None = None,
    api: HfApi | None = None,
) -> RefreshResult:
    """Put today's code into a repository that this package saved; weights, tokenizer and fields stay to the byte.

    What changes are the Python files that travel with a model, the `auto_map` of config.json and, where nobody edited
    the model card, its paragraph on the code. Before anything is written, the weights are checked by today's classes;
    nothing that lies in the repository is run, no pickle is read, and no link is followed out of it.

    Args:
        model_name_or_path: a folder, or a Hub id.
        output_dir: a new or empty folder; None = in place, with a backup, for a folder.
        dry_run: check, say what would change, and write nothing.
        trust_remote_code: run the repository's old code too, and compare what it and today's give.
        push_to_hub: push the result: of a Hub id one commit of what changes, on the commit that was read.
        hub_model_id: where to; None = the Hub id, or the folder's name under the account of the token.
        private: make a new repository private or public; an existing one must be what is asked for.
        commit_message: of the commit.
        revision: of a Hub id: branch (which is pushed to as well), tag or commit.
        token: the Hub token; None = the stored login.
        api: the client, with its endpoint and token; None = one with `token`.

    Raises:
        ValueError: if the repository is not this package's, was saved by a newer version, does not fit today's
            classes, or (with `trust_remote_code`) gives other outputs by them.
        OSError: if a file is missing, truncated or cannot be written, or the Hub does not take the push.
    """
    output, name = None if output_dir is None else check_output_dir(output_dir), os.fspath(model_name_or_path)
    folder = local_folder(model_name_or_path)
    _check_request(name, folder, output, dry_run, push_to_hub, hub_model_id, private, revision)
    in_place = folder is not None and output is None and not dry_run
    with held(folder) if folder is not None and in_place else nullcontext():
        ended = _end_interrupted(name, folder, in_place)
        repository = read_repository(model_name_or_path, revision, token)
        if output is not None:
            check_output_dir(output, source=repository.folder)
        plan = make_plan(repository)
        checks = _checks(plan, trust_remote_code) if plan.changes else []
        result = _result(plan, [*ended, *checks], dry_run)
        if plan.changes and not dry_run:
            result = _written(plan, result, output, in_place)
    if push_to_hub and not dry_run:
        api = api or HfApi(token=token)
        result = replace(result, pushed=_push(plan, result, hub_model_id, private, revision, commit_message, api))
    return result


def _check_request(
    name: str, folder: Path | None, output: Path | None, dry_run: bool, push: bool, hub_model_id: str | None,
    private: bool | None, revision: str | None,
) -> None:  # fmt: skip
    if folder is None and output is None and not (push or dry_run):
        raise ValueError(
            f"{name} is a Hub id, whose copy in the cache is not written to: give output_dir (--output_dir), "
            "push_to_hub (--push_to_hub), or dry_run (--dry_run)."
        )
    if (hub_model_id, private) != (None, None) and not push:
        given = "private (--private, --public)" if hub_model_id is None else "hub_model_id (--hub_model_id)"
        raise ValueError(f"{given} is of a push: give push_to_hub (--push_to_hub) too.")
    if push and revision is not None and re.fullmatch("[0-9a-f]{40}", revision) and hub_model_id in (None, name):
        raise ValueError(f"a push goes onto a branch, and `revision` is a commit ({revision}): give a branch.")


def _end_interrupted(name: str, folder: Path | None, in_place: bool) -> list[str]:
    """End a refresh that was killed in the middle; return what to say of it."""
    if folder is None or not (folder / UNFINISHED_REFRESH).is_dir():
        return []
    if not in_place:
        raise ValueError(
            f"{name}: a refresh of it was interrupted, and it does not load as it is: `attn-variants refresh {name}` "
            "without other options ends that first."
        )
    end_interrupted(folder)
    logger.warning("%s: a refresh that was interrupted is ended.", name)
    return ["an earlier refresh was interrupted, and is ended"]


def _checks(plan: RefreshPlan, trust_remote_code: bool) -> list[str]:
    found, inputs = check_weights(plan)
    if not trust_remote_code:
        return [found, "the old code was not run (--trust_remote_code runs it, and compares what it gives)"]
    return [found, compare_with_old_code(plan, inputs)]


def _result(plan: RefreshPlan, checks: list[str], dry_run: bool) -> RefreshResult:
    repository = plan.repository
    there = sum(not each.is_new for each in plan.changes)
    return RefreshResult(
        repository.name,
        repository.version,
        ATTN_VARIANTS_VERSION,
        plan.changes,
        len(repository.files) - there,
        checks,
        plan.notes,
        dry_run,
    )


def _written(plan: RefreshPlan, result: RefreshResult, output: Path | None, in_place: bool) -> RefreshResult:
    """Write a new folder, or in place; of a Hub id that is only pushed, nothing."""
    if output is not None:
        write_folder(plan, output)
        return replace(result, output_dir=output)
    if in_place:
        return replace(result, output_dir=plan.repository.folder, backup=write_in_place(plan))
    return result


def _push(
    plan: RefreshPlan, result: RefreshResult, hub_model_id: str | None, private: bool | None, revision: str | None,
    commit_message: str, api: HfApi,
) -> PushResult:  # fmt: skip
    """Push a refreshed repository: onto itself what changes, elsewhere the whole folder as `push_checkpoint` does."""
    repository = plan.repository
    if repository.commit is not None and hub_model_id in (None, repository.name):
        return _push_changes(plan, private, revision, commit_message, api)
    repo_id = hub_model_id or repository.folder.name
    with explained(repo_id):
        repo_id = full_repo_id(repo_id, api)
    with tempfile.TemporaryDirectory() as work:
        folder = result.output_dir or repository.folder
        if plan.changes and result.output_dir is None:
            folder = Path(work) / "repository"
            write_folder(plan, folder)
        card = folder / CARD_NAME
        text = card.read_text(encoding="utf-8") if card.is_file() else None
        whole = plan_push(folder, repo_id, card=text)
        branch = revision if repository.commit is None else None
        return push_checkpoint(whole, private, branch, commit_message, api=api)


def _push_changes(
    plan: RefreshPlan, private: bool | None, revision: str | None, commit_message: str, api: HfApi
) -> PushResult:
    """Push onto the repository that was read, in one commit on the commit that was read."""
    repository: Repository = plan.repository
    operations: list[Any] = []
    for each in plan.changes:
        content = each.content
        operations.append(
            CommitOperationDelete(each.name) if content is None else CommitOperationAdd(each.name, content)
        )
    url, gone = f"{api.endpoint}/{repository.name}", [each.name for each in plan.changes if each.kind == "removed"]
    with explained(repository.name):
        check_visibility(api, repository.name, private)
        if not operations:
            return PushResult(repository.name, url, str(repository.commit), False, [])
        commit = api.create_commit(
            repository.name,
            operations,
            commit_message=commit_message,
            revision=revision,
            parent_commit=repository.commit,
        )
    return PushResult(repository.name, url, commit.oid, commit.oid != repository.commit, gone)
