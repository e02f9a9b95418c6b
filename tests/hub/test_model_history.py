"""Check that a card describes all steps that made a model, whatever folders it passed through."""

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
from architectures import BERT
from fixtures.commands import run_command
from fixtures.data_files import edit_json, write_lines
from fixtures.elsewhere import run_elsewhere
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert
from fixtures.uptraining import make_t5, make_text
from hub.test_card import read_front_matter

from hf_attn_variants import cli, convert
from hf_attn_variants.commands import push
from hf_attn_variants.glue_tasks import TASKS
from hf_attn_variants.hub import CardOptions, generate_model_card, plan_push
from hf_attn_variants.hub.card import is_unedited_card, write_model_card
from hf_attn_variants.hub.push import list_folder_files
from hf_attn_variants.model_folder import (
    REPORT_FIELDS,
    STAGE_FOLDER,
    read_history,
    read_source_history,
    replace_model,
    write_history,
)
from hf_attn_variants.training.engine import finetune

README = """---
license: mit
language:
- en
base_model: big/tiny
tags:
- captions
- onnx
- fill-mask
---
# Tiny
"""
GLUE = ["--task_name", "stsb", "--data_dir", str(FIXTURES / "STS-B"), "--max_length", "48", "--max_train_steps", "2"]
QUIET = ["--cpu", "--disable_tqdm"]


def run(*argv):
    assert cli.main([str(item) for item in argv]) == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A plain BERT whose README.md has a license."""
    folder = make_tiny_bert(tmp_path_factory.mktemp("source") / "tiny")
    (folder / "README.md").write_text(README)
    return folder


@pytest.fixture(scope="module")
def tuned(tiny, tmp_path_factory):
    """A model made like in the README: converted on text of the task, distilled and fine-tuned."""
    home = tmp_path_factory.mktemp("chain")
    verbs = ("playing", "eating", "holding", "seeing", "hearing", "buying", "selling", "dropping")
    things = ("a guitar", "snow", "a ball", "bread", "a car", "a horse", "water", "an egg")
    rows = [
        {"sentence1": f"a man is {verb} {thing}", "sentence2": f"two dogs are {verb} {thing}"}
        for verb in verbs
        for thing in things
    ]
    text = home / "pairs.jsonl"
    write_lines(text, rows)
    columns = ["sentence1", "sentence2"]
    run("convert", "--model_name_or_path", tiny, "--num_key_value_heads", "2", "--output_dir", home / "gqa2",
        "--calibration_file", text, "--max_length", "32", "--fit_steps", "2",
        "--calibration_columns", *columns)  # fmt: skip
    run("uptrain", "--model_name_or_path", home / "gqa2", "--teacher", tiny, "--objective", "distill", *QUIET,
        "--train_file", text, "--max_train_steps", "3", "--max_length", "32", "--output_dir", home / "distilled",
        "--text_columns", *columns)  # fmt: skip
    run("glue", "--model_name_or_path", home / "distilled", "--output_dir", home / "tuned", *GLUE, *QUIET)
    return home / "tuned"


def test_card_describes_all_steps_of_the_readme(tuned):
    plan = run_command(push, "--model_name_or_path", tuned, "--repo_id", "me/tuned", "--dry_run")
    card, data = plan.card, read_front_matter(plan.card)
    # Three steps of a tiny model may or may not lower the loss.
    chain = r"converted, then distilled \(3 steps(, without a lower held-out loss)?\), then fine-tuned \(2 steps\)"
    assert re.search(chain, card)
    assert "1. `tiny` was converted with `--method calibrated` and calibrated on 64 pairs.\n" in card
    assert "2. The model was distilled on pairs.jsonl with the teacher `tiny` for 3 steps (61 examples)." in card
    assert "3. The model was fine-tuned on GLUE STSB for 2 steps (32 examples).\n" in card
    assert re.findall(r"^## (Conv.*|.*raining.*)$", card, re.MULTILINE) == ["Conversion", "Uptraining", "Training"]
    assert "| teacher | tiny |" in card and "| num_key_value_heads | 4 | 2 |" in card
    assert "On 16 held-out examples of the calibration, its embeddings have a cosine of " in card
    assert "conversion_report.json" not in card
    assert (data["license"], data["language"], data["base_model"]) == ("mit", ["en"], "big/tiny")
    assert data["tags"] == ["attn-variants", "grouped-query-attention", "captions"]
    assert "mit, the license of the original model." in card
    # The card has only the scores of the last step.
    assert {m["type"] for r in data["model-index"][0]["results"] for m in r["metrics"]} >= {"spearmanr"}
    assert "model_history.json" in plan.files and not plan.warnings
    assert str(tuned.parent) not in card


def test_uploaded_files_name_no_local_folder(tuned):
    from hf_attn_variants.hub.push import REDACTED_FILES, _get_payload

    uploaded = {name: _get_payload(tuned, name).decode() for name in REDACTED_FILES if (tuned / name).is_file()}
    assert "model_history.json" in uploaded and not any(str(tuned.parent.parent) in text for text in uploaded.values())


def test_example_of_a_pair_task_runs_with_a_pair(tuned):
    block = re.search(r"```python\n(.*?)```", str(generate_model_card(tuned, "me/x")), re.DOTALL)[1]
    assert 'tokenizer("Two dogs run in the snow.", "Dogs are running outside.", ' in block
    actual = {}
    exec(compile(block.replace("me/x", str(tuned)), "card", "exec"), actual)
    assert actual["inputs"]["token_type_ids"].unique().tolist() == [0, 1]


@pytest.mark.parametrize("name", TASKS)
def test_example_has_the_number_of_texts_of_the_task(name, tmp_path):
    BERT.make_config(architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path)
    (tmp_path / "all_results.json").write_text(json.dumps({"task_name": name}))
    call = re.search(r"tokenizer\((.*), return_tensors", str(generate_model_card(tmp_path, "me/x")))[1]
    assert len(re.findall(r'"[^"]+"', call)) == len(TASKS[name].text_columns)


def test_question_answering_card_shows_a_question(tmp_path):
    BERT.make_config(architectures=["BertForQuestionAnswering"]).save_pretrained(tmp_path)
    assert 'tokenizer("Where do the dogs run?", "Two dogs' in str(generate_model_card(tmp_path, "me/x"))


def test_conversion_after_training_keeps_the_history_without_scores(tuned, tmp_path):
    convert(tuned, num_key_value_heads=1, output_dir=tmp_path / "mqa")
    card = str(generate_model_card(tmp_path / "mqa", "me/mqa"))
    assert "then fine-tuned (2 steps), then converted, and not trained afterwards." in card
    assert "4. `tuned` was converted with `--method mean`.\n" in card
    assert "## Conversion (step 1)" in card and "## Conversion (step 4)" in card
    assert card.count("`conversion_report.json` has") == 1
    data = read_front_matter(card)
    assert "model-index" not in data and data["license"] == "mit" and "captions" in data["tags"]
    assert "The model was not trained after the conversion" in card
    assert '"Dogs are running outside."' in card  # still a model for pairs of texts


def test_training_in_the_same_folder_keeps_the_history(tuned, tmp_path):
    folder = shutil.copytree(tuned.parent / "gqa2", tmp_path / "same")
    argv = ["--model_name_or_path", folder, "--output_dir", folder, "--overwrite_output_dir"]
    for _ in range(2):
        run("glue", *argv, *GLUE, *QUIET)
    assert [step["kind"] for step in read_history(folder).steps] == ["conversion", "training", "training"]
    assert (folder / "conversion_report.json").is_file()
    assert "`conversion_report.json` has" in str(generate_model_card(folder, "me/x"))


def test_continued_run_in_the_same_folder_is_one_training(tuned, tmp_path, monkeypatch):
    folder = shutil.copytree(tuned.parent / "gqa2", tmp_path / "same")
    argv = ["glue", "--model_name_or_path", folder, "--output_dir", folder, *GLUE, *QUIET]
    argv += ["--checkpointing_steps", "1"]
    save_results = finetune.save_results

    def interrupted(*arguments):
        save_results(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(finetune, "save_results", interrupted)
    assert cli.main([str(item) for item in (*argv, "--overwrite_output_dir")]) == 130
    assert (folder / "all_results.json").is_file()
    monkeypatch.undo()
    run(*argv, "--resume_from_checkpoint", "latest")
    assert [step["kind"] for step in read_history(folder).steps] == ["conversion", "training"]


def test_full_disk_keeps_the_history(tuned, tmp_path, monkeypatch):
    folder = shutil.copytree(tuned, tmp_path / "same")
    before = read_history(folder)
    argv = ["glue", "--model_name_or_path", folder, "--output_dir", folder, "--overwrite_output_dir", *GLUE, *QUIET]

    write_bytes = Path.write_bytes

    def full(path, content):
        write_bytes(path, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    assert cli.main([str(item) for item in argv]) == 2
    monkeypatch.undo()
    assert read_history(folder) == before and len(before.steps) == 3 and before.metadata["license"] == "mit"
    assert not list(folder.glob(".tmp-*"))


def test_report_of_a_recorded_step_is_not_added_again(tuned, tmp_path):
    """Check a run that is killed before it removes the earlier results of its folder."""
    folder = shutil.copytree(tuned, tmp_path / "same")
    before = read_history(folder)
    write_history(folder, before)
    shutil.copy(tuned.parent / "gqa2" / "conversion_report.json", folder)
    assert (folder / "all_results.json").is_file() and read_history(folder) == before


def test_overwriting_removes_the_old_history_and_license(tuned, tiny, tmp_path):
    folder = shutil.copytree(tuned.parent / "gqa2", tmp_path / "other")
    (folder / "README.md").write_text(README)
    source = shutil.copytree(tiny, tmp_path / "b")
    (source / "README.md").write_text("---\nlicense: cc-by-nc-4.0\nbase_model: big/b\n---\n")
    run("glue", "--model_name_or_path", source, "--output_dir", folder, "--overwrite_output_dir", *GLUE, *QUIET)
    data = read_front_matter(generate_model_card(folder, "me/x"))
    assert (data["license"], data["base_model"]) == ("cc-by-nc-4.0", "big/b")
    assert [step["kind"] for step in read_history(folder).steps] == ["training"]


@pytest.mark.parametrize("is_continuation, name", [(True, "config.json"), (False, "notes.txt")])
def test_readme_of_the_source_or_without_a_model_is_kept(is_continuation, name, tmp_path):
    (tmp_path / name).write_text("{}")
    (tmp_path / "README.md").write_text(README)
    (tmp_path / STAGE_FOLDER).mkdir()
    (tmp_path / STAGE_FOLDER / "config.json").write_text('{"new": 1}')
    replace_model(tmp_path / STAGE_FOLDER, tmp_path, is_continuation)
    assert (tmp_path / "README.md").exists() and (tmp_path / "config.json").read_text() == '{"new": 1}'
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


def test_converted_folder_has_its_own_card(tiny, tmp_path, capsys):
    """Check that the card is not that of the original model, and keeps its license terms."""
    run("convert", tiny, "--num_key_value_heads", 2, "--method", "mean", "--output_dir", tmp_path / "gqa2")
    assert "README.md is the model card. `attn-variants push` adds" in capsys.readouterr().out
    card = (tmp_path / "gqa2/README.md").read_text()
    assert is_unedited_card(card) and "\n# gqa2\n" in card
    assert 'from_pretrained("gqa2", trust_remote_code=True)' in card
    assert {name: read_front_matter(card)[name] for name in ("license", "base_model", "language")} == {
        "license": "mit", "base_model": "big/tiny", "language": ["en"],
    }  # fmt: skip
    run("convert", tmp_path / "gqa2", "--num_key_value_heads", 1, "--method", "mean", "--output_dir", tmp_path / "mqa")
    assert "2. `gqa2` was converted" in (tmp_path / "mqa/README.md").read_text()
    convert(tiny, num_key_value_heads=2, output_dir=tmp_path / "python")
    assert not (tmp_path / "python/README.md").exists()
    assert read_front_matter(plan_push(tmp_path / "python", "me/x").card)["license"] == "mit"


def test_broken_readme_of_the_source_is_kept(tiny, tmp_path, caplog):
    """Check that the README is copied unchanged, and that a push raises an error about it."""
    folder = shutil.copytree(tiny, tmp_path / "broken")
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    run("convert", folder, "--num_key_value_heads", 2, "--method", "mean", "--output_dir", tmp_path / "gqa2")
    assert (tmp_path / "gqa2/README.md").read_text() == "---\nlicense: [\n---\n"
    assert "The history of the model is incomplete" in caplog.text
    with pytest.raises(ValueError, match=r"Cannot read the metadata of"):
        plan_push(tmp_path / "gqa2", "me/x")


def test_card_of_removed_weights_is_removed(folder):
    assert write_model_card(folder) and not write_model_card(folder)
    (folder / STAGE_FOLDER).mkdir()
    (folder / STAGE_FOLDER / "config.json").write_text("{}")
    replace_model(folder / STAGE_FOLDER, folder, is_continuation=True)
    assert not (folder / "README.md").exists() and (folder / "conversion_report.json").exists()


def test_card_describes_a_conversion_after_training(tmp_path):
    make_t5(tmp_path / "t5")
    source, target = make_text(tmp_path)
    (tmp_path / "t5" / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n")
    convert(tmp_path / "t5", num_key_value_heads=1, output_dir=tmp_path / "mqa")
    run("seq2seq", "--model_name_or_path", tmp_path / "mqa", "--source_file", source, "--target_file", target, *QUIET,
        "--max_train_steps", "2", "--max_length", "16", "--output_dir", tmp_path / "tuned")  # fmt: skip
    card = str(generate_model_card(tmp_path / "tuned", "me/t5"))
    assert "1. `t5` was converted with `--method mean`.\n2. The model was fine-tuned on source.txt for 2 steps" in card
    assert read_front_matter(card)["license"] == "cc-by-4.0"


HOSTILE = {
    "no JSON": "{",
    "a list": "[1]",
    "no text": b"\xff\xfe\x00",
    "deep": "[" * 100_000 + "]" * 100_000,
    "a deep object": '{"steps": ' * 3000 + "1" + "}" * 3000,
}


@pytest.mark.parametrize("name", ["model_history.json", "conversion_report.json", "all_results.json"])
@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_unreadable_report_is_named_and_does_not_stop_a_push(folder, name, content):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    plan = plan_push(folder, "me/x")
    assert any(name in warning and "The card does not contain it." in warning for warning in plan.warnings)
    assert plan.left_out[name] == "cannot be read" and name not in plan.files
    assert name in list_folder_files(folder)[1]


@pytest.mark.parametrize("value", ["text\n## Heading", [[]], None, 3, {"a": {"b": [None]}}], ids=repr)
def test_report_with_wrong_field_types_is_reported(folder, value):
    report = json.loads((folder / "conversion_report.json").read_text())
    report |= {"calibration": {"count": 3, "kind": "texts", "targets": False, "max_length": 8}}
    for key in REPORT_FIELDS["conversion"]:
        (folder / "conversion_report.json").write_text(json.dumps(report | {key: value}))
        try:
            card = str(generate_model_card(folder, "me/x"))
        except ValueError as error:
            assert "must contain values that a model card can show" in str(error)
        else:
            assert "\n## Heading" not in card and "## Conversion" in card, key


def test_older_report_without_new_fields_is_read(tmp_path):
    calibration = {"count": 9, "kind": "texts", "targets": False, "max_length": 64}
    quality = {"measure": "loss", "value": 0.1, "bound": 0.3, "examples": 8, "is_kept": True}
    report = {"calibration": calibration, "quality": quality | {"alike": False, "unknown": False}}
    (tmp_path / "conversion_report.json").write_text(json.dumps(report))
    assert read_history(tmp_path).steps == [{"kind": "conversion"} | report]


def test_unknown_step_is_named(folder):
    (folder / "model_history.json").write_text(json.dumps({"format": 9, "steps": [{"kind": "pruning"}, 4]}))
    plan = plan_push(folder, "me/x")
    assert sum("of a kind unknown to this version" in warning for warning in plan.warnings) == 2
    assert "## Conversion\n" in plan.card


def test_training_from_a_broken_readme_gives_a_warning(tiny, tmp_path, caplog):
    folder = shutil.copytree(tiny, tmp_path / "broken")
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    run("glue", "--model_name_or_path", folder, "--output_dir", tmp_path / "out", *GLUE, *QUIET)
    assert "history in the model card" in caplog.text and "README.md" in caplog.text
    assert "do not state a license" in str(generate_model_card(tmp_path / "out", "me/x"))


def test_license_argument_replaces_an_unreadable_readme(folder):
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    assert read_front_matter(generate_model_card(folder, "me/x", CardOptions(license="mit")))["license"] == "mit"


def test_base_model_is_the_source_of_the_first_step(folder):
    report = json.loads((folder / "conversion_report.json").read_text())
    (folder / "conversion_report.json").unlink()
    first = report | {"kind": "conversion", "source": "google-bert/bert-base-uncased", "source_revision": "0" * 40}
    edit_json(folder / "all_results.json", steps=3, arguments={"model_name_or_path": "me/bert-gqa4"})
    for step, name in ((first, "google-bert/bert-base-uncased"), ({"kind": "conversion", **report}, "source")):
        (folder / "model_history.json").write_text(json.dumps({"format": 1, "steps": [step]}))
        card = generate_model_card(folder, "me/x")
        assert f"1. `{name}` was converted" in str(card) and f"\n`{name}` was converted" in str(card)
        assert read_front_matter(card)["base_model"] == "me/bert-gqa4"
        assert str(card).count("me/bert-gqa4") == 1  # the summary also names the first model
        assert "1. `big/a` was converted" in str(generate_model_card(folder, "me/x", CardOptions(base_model="big/a")))


def test_several_licenses_are_kept(folder):
    (folder / "README.md").write_text("---\nlicense:\n- mit\n- apache-2.0\n---\n")
    card = generate_model_card(folder, "me/x")
    assert read_front_matter(card)["license"] == ["mit", "apache-2.0"]
    assert "mit, apache-2.0, the license of the original" in str(card)


@pytest.mark.thorough
def test_history_of_a_hub_id_loads_without_weights(tuned, hub, tmp_path):
    """Check in a separate process, because this one is offline."""
    files = {"README.md": README.encode(), "model_history.json": (tuned / "model_history.json").read_bytes()}
    hub.create("me/tuned", files={**files, "model.safetensors": b"not read"})
    hub.create("me/plain", files={"config.json": b"{}"})
    code = """
import json, sys
from hf_attn_variants.model_folder import read_source_history
for found in map(read_source_history, sys.argv[1:]):
    kinds = [step["kind"] for step in found.steps]
    print(json.dumps([kinds, found.metadata.get("license"), found.problems]))
"""
    printed = run_elsewhere("-c", code, "me/tuned", "me/plain", cwd=tmp_path, hub=hub, has_package=True)
    actual = list(map(json.loads, printed.splitlines()))
    assert actual == [[["conversion", "training"], "mit", []], [[], None, []]]
    assert not any("safetensors" in request for request in hub.requests)


def test_unreachable_hub_id_is_named():
    [problem] = read_source_history("me/elsewhere").problems  # the session is offline
    assert "README.md" in problem and "Could not download" in problem
