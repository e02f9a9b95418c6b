"""Check `scripts/push_to_hub.py` like a user, and load the pushed model in a process without this package."""

import json
import textwrap
from pathlib import Path

import pytest
import torch
from fixtures.commands import run_command
from fixtures.elsewhere import WITHOUT_PACKAGE, run_elsewhere
from safetensors.torch import save_file

from hf_attn_variants import AttnVariantBertModel
from hf_attn_variants.commands import push
from hf_attn_variants.errors import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "push_to_hub.py"

# A process with another home and working directory that cannot import the package, like that of another user.
ELSEWHERE = WITHOUT_PACKAGE + textwrap.dedent(
    """
    import torch, transformers
    from safetensors.torch import load_file

    repo_id, revision, tensors = sys.argv[1:]
    saved = load_file(tensors)
    remote = {"trust_remote_code": True, "revision": revision}
    model = transformers.AutoModel.from_pretrained(repo_id, **remote).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    assert revision in type(model).__module__, type(model)
    with torch.no_grad():
        result = model(input_ids=saved["input_ids"]).last_hidden_state
    torch.testing.assert_close(result, saved["expected"], atol=1e-6, rtol=0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(repo_id, **remote)
    print(tokenizer("two dogs").input_ids)
    """
)


@pytest.mark.thorough
def test_pushed_model_loads_without_this_package_at_a_pinned_revision(converted, hub, tmp_path):
    flags = ["--model_name_or_path", converted, "--repo_id", "me/bert-gqa2", "--private"]
    printed = run_elsewhere(SCRIPT, *flags, cwd=tmp_path, hub=hub, has_package=True)
    pinned = hub.head("me/bert-gqa2")
    assert pinned in printed and hub.repositories["me/bert-gqa2"].private
    # Commits after the pinned one have no effect.
    repository = hub.repositories["me/bert-gqa2"]
    repository.commit("main", {**hub.files("me/bert-gqa2"), "config.json": b"{}"}, "broken")
    ids = torch.tensor([[2, 7, 8, 9, 3]])
    with torch.no_grad():
        expected = AttnVariantBertModel.from_pretrained(converted).eval()(ids).last_hidden_state
    save_file({"input_ids": ids, "expected": expected}, tmp_path / "tensors.safetensors")
    arguments = ["me/bert-gqa2", pinned, tmp_path / "tensors.safetensors"]
    printed = run_elsewhere("-c", ELSEWHERE, *arguments, cwd=tmp_path / "other", hub=hub)
    from transformers import AutoTokenizer

    assert json.loads(printed.splitlines()[-1]) == AutoTokenizer.from_pretrained(converted)("two dogs").input_ids


def test_dry_run_lists_all_files_without_requests(converted, hub, api, tmp_path, capsys):
    card = tmp_path / "card.md"
    arguments = ["--model_name_or_path", str(converted), "--repo_id", "me/x", "--dry_run", "--save_card", str(card)]
    assert run_script(lambda: run_command(push, *arguments)) == 0
    printed = capsys.readouterr().out
    for path in converted.iterdir():
        assert path.name in printed
    assert "## Heads" in printed and "Dry run: nothing was pushed." in printed
    assert card.read_text() in printed
    assert not hub.requests


def test_notes_and_evaluations_are_read_from_files(converted, tmp_path, capsys):
    (tmp_path / "notes.md").write_text("Made on a **Sunday**.\n")
    rows = [{"task_type": "t", "dataset_type": "d", "dataset_name": "D", "metric_type": "m", "metric_value": 0.25}]
    (tmp_path / "scores.json").write_text(json.dumps(rows))
    arguments = ["--model_name_or_path", str(converted), "--dry_run", "--title", "My model"]
    arguments += ["--notes", str(tmp_path / "notes.md"), "--evaluations", str(tmp_path / "scores.json")]
    plan = run_command(push, *arguments)
    assert plan.repo_id == converted.name and "# My model" in plan.card
    assert "Made on a **Sunday**." in plan.card and "| D |  | m | 0.25 |" in plan.card


@pytest.mark.parametrize(
    "more, message",
    [
        (["nowhere"], "The checkpoint folder 'nowhere' does not exist"),
        (["CONVERTED", "--evaluations", "missing.json"], "missing.json"),
        (["CONVERTED", "--card", "missing.md"], "missing.md"),
        (["CONVERTED", "--repo_id", "a/b/c"], "Repo id"),
    ],
)
def test_push_user_error_is_one_line_with_status_2(converted, capsys, more, message):
    arguments = [str(converted) if item == "CONVERTED" else item for item in more]
    assert run_script(lambda: run_command(push, *arguments, "--dry_run")) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and "Traceback" not in error
