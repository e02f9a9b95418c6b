"""Check that pushed files contain no local folders or passwords, and that foreign text is escaped."""

import json

import pytest
from fixtures.data_files import edit_json
from transformers import AutoModel, AutoTokenizer

from hf_attn_variants.hub import plan_push
from hf_attn_variants.hub.card import escape_markdown, format_inline_code, generate_model_card, remove_local_paths
from hf_attn_variants.hub.push import _get_payload

HOME = "/home/alice/secret-project"


def list_uploaded_files(plan, folder):
    """Return each uploaded file."""
    result = {name: _get_payload(plan.folder, name) for name in plan.files}
    read = {name: item if isinstance(item, bytes) else open(item, "rb").read() for name, item in result.items()}
    assert {name: len(item) for name, item in read.items()} == plan.files
    return read | {"README.md": plan.card.encode()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"trained on {HOME}/data/train.csv, then more", "trained on train.csv, then more"),
        (f"--data_dir={HOME}/data --seed 1", "--data_dir=data --seed 1"),
        (f"path:{HOME}/x.json", "path:x.json"),
        (f"see '{HOME}/x.json'", "see 'x.json'"),
        ("from ~/priv/x.txt and ../y/z.txt", "from x.txt and z.txt"),
        ("of /home/alice and /Users/alice/", "of ~ and ~"),
        ("file:///home/alice/a/b.txt", "b.txt"),
        (r"on C:\Users\alice\x.txt now", "on x.txt now"),
        (r"of C:\Users\alice now", "of ~ now"),
        ("of /home/alice/home/data.csv", "of data.csv"),
        (r"on \\server\share\x.txt", "on x.txt"),
        ("https://user:pw@example.org/a/b.csv", "https://example.org/a/b.csv"),
        ("from https://user:p@ss@example.org/a", "from https://example.org/a"),
        ("https://x.org/a?X-Amz-Signature=abc&n=1", "https://x.org/a?X-Amz-Signature=...&n=1"),
        ("with hf_abcdefghijklmnopqrstuvwx", "with hf_..."),
    ],
)
def test_local_paths_and_passwords_are_removed_from_text(text, expected):
    assert remove_local_paths({"x": [text]}) == {"x": [expected]}


@pytest.mark.parametrize(
    "text",
    ["google-bert/bert-base-uncased", "https://hf.co/a/b/c", "and/or", "1/2/3 of 4", "me/x--modeling.Class", "a: b",
     "km/h", "s3://bucket/a/b", "</s>", "git@github.com:me/x.git", "2026-11-25"],
)  # fmt: skip
def test_text_without_local_paths_is_unchanged(text):
    assert remove_local_paths(text) == text


def test_model_and_tokenizer_files_name_no_folder(folder):
    edit_json(
        folder / "config.json", _name_or_path=f"{HOME}/bert", note=f"made in {HOME}/runs/x by hand", best_path="/a"
    )
    edit_json(
        folder / "tokenizer_config.json",
        name_or_path=f"{HOME}/bert",
        tokenizer_file=f"{HOME}/bert/tokenizer.json",
        special_tokens_map_file="/root/.cache/x/special_tokens_map.json",
    )
    edit_json(folder / "special_tokens_map.json", cls_token="[CLS]")
    edit_json(folder / "trainer.json", args={"data": f"{HOME}/data", "url": "https://u:pw@example.org/x"})
    (folder / "1_Pooling").mkdir()
    edit_json(folder / "1_Pooling/config.json", made_by=f"{HOME}/a/b")
    (folder / "debug.log").write_text(HOME)
    (folder / "nohup.out").write_text(HOME)
    (folder / "1_Pooling/run.LOG").write_text(HOME)
    (folder / "setup.txt").write_text("git clone https://me:pw@example.org/x")
    (folder / "notes.txt").write_text(f"see {HOME}/x\n")
    plan = plan_push(folder, "me/x")
    files = list_uploaded_files(plan, folder)
    outcome = {name for name, content in files.items() if b"secret-project" in content or b"pw@" in content}
    assert outcome == {"notes.txt"} and "notes.txt contains local paths and is pushed unchanged." in plan.warnings
    assert (
        plan.left_out["debug.log"] == plan.left_out["nohup.out"] == plan.left_out["1_Pooling/run.LOG"] == "a log file"
    )
    assert plan.left_out["setup.txt"] == "contains a token, or an address with a password"
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["name_or_path"] == "bert" and settings["tokenizer_file"] == "tokenizer.json"
    assert json.loads(files["trainer.json"]) == {"args": {"data": "data", "url": "https://example.org/x"}}


def test_labels_and_words_like_paths_are_unchanged(folder):
    labels = {"0": "/person/artist", "1": "~/x/y", "2": "C:/a/b"}
    edit_json(folder / "config.json", id2label=labels, label2id={name: int(i) for i, name in labels.items()})
    edit_json(folder / "tokenizer_config.json", cls_token="/a/b/c", name_or_path=HOME)
    other_folder = folder.parent / "there"
    other_folder.mkdir()
    for name, content in list_uploaded_files(plan_push(folder, "me/x"), folder).items():
        (other_folder / name).write_bytes(content)
    assert AutoModel.from_pretrained(other_folder).config.id2label == {int(i): name for i, name in labels.items()}
    assert AutoTokenizer.from_pretrained(other_folder).cls_token == "/a/b/c"
    assert json.loads((other_folder / "tokenizer_config.json").read_text())["name_or_path"] == "secret-project"


def test_files_without_local_paths_are_uploaded_unchanged(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(f"\n{text}\n")
    assert list_uploaded_files(plan_push(folder, "me/x"), folder)["config.json"].decode() == f"\n{text}\n"


HOSTILE = "a <img src=x onerror=alert(1)> | b ](http://evil) `c` *d* _e_ [f](g) $h$ \n# i"


@pytest.mark.parametrize("place", ["dataset_name", "task_name", "teacher", "metric", "versions", "lr_scheduler_type"])
def test_text_from_results_is_escaped_in_cards(place, folder):
    arguments = {"dataset_name": "d", "task_name": "t", "teacher": "x", "lr_scheduler_type": "linear"}
    results = {"eval_accuracy": 0.5, "steps": 3, "objective": "mlm"}
    results |= {"arguments": arguments, "versions": {"torch": "1"}}
    if place == "metric":
        results[f"eval_{HOSTILE}"] = 0.25
    elif place == "versions":
        results["versions"] = {HOSTILE: HOSTILE}
    else:
        arguments[place] = HOSTILE
    (folder / "all_results.json").write_text(json.dumps(results))
    check_body(str(generate_model_card(folder, "me/x")))


@pytest.mark.parametrize("field", ["source", "method", "heads", "talking_heads", "calibration"])
def test_text_from_reports_is_escaped_in_cards(field, folder):
    report = json.loads((folder / "conversion_report.json").read_text())
    values = {
        "heads": {HOSTILE: [1, 2]},
        "talking_heads": {HOSTILE: []},
        "calibration": {"count": 1, "kind": HOSTILE, "targets": False, "max_length": 3},
    }
    edit_json(
        folder / "conversion_report.json", **report | {"source_revision": "1", field: values.get(field, HOSTILE)}
    )
    check_body(str(generate_model_card(folder, "me/x")))


@pytest.mark.parametrize("field", ["license", "license_name", "license_link"])
def test_license_is_escaped_in_cards(field, folder):
    import yaml

    terms = {"license": "other", "license_link": None} | {field: HOSTILE}
    terms = {name: value for name, value in terms.items() if value}
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(terms)}---\n")
    check_body(str(generate_model_card(folder, "me/x")))


def check_body(card):
    body = card.split("\n---\n", 1)[1].rsplit("<!-- generated", 1)[0]
    outside = "".join(body.split("```")[::2])
    assert "onerror" in outside or "img src" in outside, outside
    for line in outside.splitlines():
        shown = line if "onerror" in line else ""
        in_code = "`` a <img" in shown or "`` --method" in shown or "`` steps" in shown
        assert in_code or not shown or ("<img" not in shown and "](http" not in shown.replace("\\](", "")), shown
        assert not line.startswith("# i")
    tables = [line for line in outside.splitlines() if line.startswith("| ") and "onerror" in line]
    for line in tables:
        assert line.replace("\\|", "").count("|") in (3, 4, 5), line


def test_escaping_distinguishes_text_and_code():
    assert escape_markdown("a|b <c> & _d_ e_f *g* [h](i) `j`\nk") == (
        r"a\|b &lt;c&gt; &amp; \_d\_ e_f \*g\* \[h\](i) \`j\` k"
    )
    assert escape_markdown("stsb") == "stsb" and escape_markdown("cosine_with_restarts") == "cosine_with_restarts"
    assert escape_markdown("# x") == r"\# x" and escape_markdown(0.5) == "0.5"
    assert format_inline_code("a") == "`a`" and format_inline_code("a `b` ``c``") == "``` a `b` ``c`` ```"


def test_source_folder_is_not_a_base_model(folder):
    (folder / "README.md").write_text(f"---\nlicense: mit\nbase_model: {HOME}/bert\n---\n")
    card = str(generate_model_card(folder, "me/x"))
    assert "secret-project" not in card and "base_model" not in card
