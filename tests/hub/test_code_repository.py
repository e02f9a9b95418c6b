"""Check checkpoints that share a code repository: what is pushed, and how the models load without this package."""

import json
import re
import textwrap

import pytest
import torch
from architectures import BERT, T5
from fixtures.commands import run_command
from fixtures.data_files import edit_json
from fixtures.elsewhere import WITHOUT_PACKAGE, run_elsewhere
from fixtures.speech import make_feature_extractor
from relatives import WHISPER
from safetensors.torch import save_file
from transformers import BertTokenizerFast

import hf_attn_variants
from hf_attn_variants.commands import push as command
from hf_attn_variants.commands import refresh
from hf_attn_variants.hub import CardOptions, plan_push, push_checkpoint
from hf_attn_variants.hub.card import is_unedited_card, refresh_card
from hf_attn_variants.hub.code_repository import build_complete_code
from hf_attn_variants.modeling.code_builder import MODELING_FOLDER

REPO, CODE = "me/bert-gqa2", "me/code"


def push(folder, api, repo_id=REPO, card_options=None, **options):
    return push_checkpoint(plan_push(folder, repo_id, card_options, code_repo=CODE), api=api, **options)


def download(hub, folder):
    """Write the pushed files to a folder, and return it."""
    folder.mkdir()
    for name, content in hub.files(REPO).items():
        (folder / name).write_bytes(content)
    return folder


def get_auto_map(hub, repo_id):
    return json.loads(hub.files(repo_id)["config.json"])["auto_map"]


def get_commit_messages(hub, repo_id):
    return [message for _, _, message in hub.repositories[repo_id].log[1:]]


def test_complete_code_includes_every_class_and_no_stub():
    code = build_complete_code()
    assert "INCLUDED_MECHANISMS = None\n" in code["attn_variants_base.py"]
    for config_class in hf_attn_variants.registration.ARCHITECTURES:
        assert f"\nclass {config_class.__name__}(" in code["configuration_attn_variants.py"]
        names = config_class.auto_classes.values()
        assert all(f"\nclass {name}(" in code[f"{config_class.modeling_file}.py"] for name in names)
    stubs = re.findall(r"^class (\w+)\(MissingDefinition\)", "".join(code.values()), re.MULTILINE)
    assert stubs == ["build_code"]  # repositories do not build code
    architectures = {path.name for path in (MODELING_FOLDER / "architectures").glob("*.py")} - {"__init__.py"}
    assert architectures <= {*code}


def test_code_is_pushed_to_its_own_repository(folder, hub, api):
    hub.create(REPO, files={"modeling_attn_variant_bert.py": b"old", "handler.py": b"mine"})
    result = push(folder, api)
    assert result.removed == ["modeling_attn_variant_bert.py"]
    remote_files, code = hub.files(REPO), hub.files(CODE)
    assert [name for name in remote_files if name.endswith(".py")] == ["handler.py"]
    assert {name: code[name].decode() for name in build_complete_code()} == build_complete_code()
    assert b"license: apache-2.0" in code["README.md"]
    references = {
        auto: f"{CODE}--{name}" for auto, name in json.loads((folder / "config.json").read_text())["auto_map"].items()
    }
    assert get_auto_map(hub, REPO) == references and "AutoModel" in references
    before, after = json.loads((folder / "config.json").read_text()), json.loads(remote_files["config.json"])
    assert after == before | {"auto_map": references}
    assert result.code_commit == hub.head(CODE) and hub.files(CODE).keys() == {*code}


def test_card_shows_both_commits(folder, hub, api):
    result = push(folder, api)
    card = hub.files(REPO)["README.md"].decode()
    assert is_unedited_card(card) and "COMMIT" not in card
    assert card.count(f'    revision="{result.commit}",\n    code_revision="{result.code_commit}",\n') == 2
    assert f"[{CODE}](https://huggingface.co/{CODE})" in card
    # The commit on the card contains the model, and the card itself is in the next commit.
    repository = hub.repositories[REPO]
    pinned = repository.commits[result.commit]
    assert {*hub.files(REPO)} - {*pinned} == {"README.md"}
    assert {name: content for name, content in hub.files(REPO).items() if name != "README.md"} == pinned


def test_repeated_push_creates_no_commits(folder, t5_variant, hub, api):
    first = push(folder, api)
    assert len(get_commit_messages(hub, REPO)) == 2 and len(get_commit_messages(hub, CODE)) == 1
    second = push(folder, api)
    assert (second.commit, second.code_commit, second.changed) == (first.commit, first.code_commit, False)
    assert push(t5_variant, api, "me/t5").code_commit == first.code_commit
    assert len(get_commit_messages(hub, REPO)) == 2 and len(get_commit_messages(hub, CODE)) == 1


def test_changed_card_keeps_the_commit_of_the_model(folder, hub, api):
    first = push(folder, api)
    second = push(folder, api, card_options=CardOptions(license="mit"))
    assert second.commit == first.commit and second.changed and len(get_commit_messages(hub, REPO)) == 3
    assert b"license: mit" in hub.files(REPO)["README.md"]
    # If somebody else changes the model in between, the earlier commit no longer contains it.
    hub.repositories[REPO].commit("main", {**hub.files(REPO), "notes.txt": b"new"}, "notes")
    third = push(folder, api)
    assert third.commit not in (first.commit, hub.head(REPO))
    assert f'revision="{third.commit}"'.encode() in hub.files(REPO)["README.md"]


def test_changed_code_is_pushed_in_the_same_run(folder, hub, api, monkeypatch):
    first = push(folder, api)
    changed = {**build_complete_code(), "attn_variants_ops.py": "# changed\n"}
    monkeypatch.setattr("hf_attn_variants.hub.push.build_complete_code", lambda: changed)
    second = push(folder, api)
    assert second.code_commit != first.code_commit and second.commit == first.commit
    assert hub.files(CODE)["attn_variants_ops.py"] == b"# changed\n"
    assert f'code_revision="{second.code_commit}"'.encode() in hub.files(REPO)["README.md"]


def test_dry_run_lists_both_repositories_without_requests(folder, hub, api, capsys):
    arguments = ["--model_name_or_path", str(folder), "--repo_id", REPO, "--code_repo", CODE, "--dry_run"]
    run_command(command, *arguments)
    printed = capsys.readouterr().out
    model, code = printed.split(f"code -> {CODE}: ")
    assert f"modeling_attn_variant_bert.py (the code is in {CODE})" in model and "model.safetensors\n" in model
    for name, text in build_complete_code().items():
        assert f"{len(text.encode()):,}  {name}\n" in code
    assert f"Without `code_revision`, `from_pretrained` runs the newest commit of {CODE}." in code
    assert 'code_revision="COMMIT OF THE CODE",' in code
    assert not hub.requests


def test_push_command_prints_both_commits(folder, hub, api, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", lambda token: api)
    arguments = ["--model_name_or_path", str(folder), "--repo_id", REPO, "--code_repo", CODE]
    result = run_command(command, *arguments)
    pinned = f'from_pretrained("{REPO}", revision="{result.commit}", code_revision="{result.code_commit}", trust'
    assert pinned in capsys.readouterr().out


@pytest.mark.parametrize("code_repo, message", [("code", "owner/name"), (REPO, "owner/name"), ("me/a/b", "Repo id")])
def test_invalid_code_repository_raises_an_error(folder, code_repo, message):
    with pytest.raises(ValueError, match=message):
        plan_push(folder, REPO, code_repo=code_repo)


@pytest.mark.parametrize("auto_map", [None, {"AutoModel": "derived.Derived"}, {"AutoTokenizer": ["a.B", None]}])
def test_classes_outside_the_code_repository_raise_an_error(folder, auto_map):
    edit_json(folder / "config.json", auto_map=auto_map)
    with pytest.raises(ValueError, match="must only refer to classes of hf_attn_variants"):
        plan_push(folder, REPO, code_repo=CODE)


def test_sentence_model_names_the_commit_of_the_code(folder, hub, api, tmp_path):
    name = "sentence_bert_config.json"
    (folder / "modules.json").write_text("[]")
    before = {"max_seq_length": 16, "model_kwargs": {"dtype": "float16"}, "config_args": {}}
    (folder / name).write_text(json.dumps(before))
    result = push(folder, api)
    pin = {"code_revision": result.code_commit}
    after = {"model_kwargs": {"dtype": "float16"} | pin, "config_args": pin, "tokenizer_args": pin}
    assert json.loads(hub.files(REPO)[name]) == before | after
    # A model with its own code must not name the commit of another repository.
    (folder / name).write_bytes(hub.files(REPO)[name])
    push_checkpoint(plan_push(folder, "me/own"), api=api)
    assert json.loads(hub.files("me/own")[name]) == before | {"tokenizer_args": {}}
    (folder / name).write_text('{"model_kwargs": 3}')
    with pytest.raises(ValueError, match="must contain the arguments of a sentence-transformers module"):
        plan_push(folder, REPO)


def test_public_checkpoint_requires_public_code(folder, hub, api):
    hub.create(CODE, private=True)
    with pytest.raises(ValueError, match="me/code must be public"):
        push(folder, api, private=False)
    hub.create(CODE, private=False)
    push(folder, api, "me/private", private=True)
    assert hub.repositories["me/private"].private


def test_downloaded_checkpoint_can_be_pushed_again(folder, hub, api, tmp_path):
    push(folder, api)
    copy = download(hub, tmp_path / "copy")
    push(copy, api, "me/copy")
    assert get_auto_map(hub, "me/copy") == get_auto_map(hub, REPO)
    with pytest.raises(ValueError, match="must refer to code in the folder"):
        plan_push(copy, "me/copy")


def test_refreshed_checkpoint_has_its_own_code_and_card(folder, hub, api, tmp_path):
    push(folder, api)
    run_command(refresh, download(hub, tmp_path / "copy"), "--output_dir", tmp_path / "new")
    assert (tmp_path / "new/modeling_attn_variant_bert.py").is_file()
    assert json.loads((tmp_path / "new/config.json").read_text())["auto_map"]["AutoModel"].startswith("modeling_")
    card = (tmp_path / "new/README.md").read_text()
    assert is_unedited_card(card) and "Its code is in this repository" in card and "code_revision" not in card
    assert refresh_card(card) == card and f'    "{REPO}",\n    trust_remote_code=True,\n)' in card


# A process that cannot import the package loads the models from the local Hub.
ELSEWHERE = WITHOUT_PACKAGE + textwrap.dedent(
    """
    import json
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel

    def check(model, path):
        saved = load_file(path)
        inputs = {name.removeprefix("input."): value for name, value in saved.items() if name.startswith("input.")}
        with torch.no_grad():
            for implementation in ("sdpa", "eager"):
                model.set_attn_implementation(implementation)
                result = model(**inputs).last_hidden_state
                torch.testing.assert_close(result, saved["expected"], atol=1e-5, rtol=0)

    models = []
    for repo_id, options, tensors in json.loads(sys.argv[1]):
        model = AutoModel.from_pretrained(repo_id, trust_remote_code=True, **options).eval()
        parts = type(model).__module__.split(".")
        assert parts[0] == "transformers_modules", parts
        models.append((model, tensors))
        print(json.dumps([*parts[1:], model.config._attn_implementation]))
    for model, tensors in models:
        check(model, tensors)
    if len(sys.argv) > 2:
        for index, (model, tensors) in enumerate(models):
            model.save_pretrained(f"{sys.argv[2]}/{index}")
            check(AutoModel.from_pretrained(f"{sys.argv[2]}/{index}", trust_remote_code=True).eval(), tensors)
    """
)


WINDOW = {"encoder_attention_pattern": "sliding_window", "encoder_attention_window": 4}
MODELS = {
    "bert-gqa": (BERT, "BertModel", "gqa", {}),
    "bert-talking": (BERT, "BertModel", "gqa_talking", {}),
    "t5-window": (T5, "T5Model", "mha", WINDOW),
    "whisper-latent": (WHISPER, "WhisperModel", "latent", {}),
}
# Fields that the test sets when it loads the first model again.
NEW_FIELDS = {"attention_pattern": "sliding_window", "attention_window": 2}


@pytest.fixture
def pushed(hub, api, tmp_path):
    """Return the folder and the arguments of `from_pretrained` for each model, and the commit of the code."""
    loads = {}
    for name, (architecture, head, variant, fields) in MODELS.items():
        folder = tmp_path / name / "model"
        architecture.make_model(head, variant, **fields).save_pretrained(folder)
        result = push(folder, api, f"me/{name}")
        loads[name] = [f"me/{name}", {"revision": result.commit, "code_revision": result.code_commit}, None]
        loads[name][2] = save_outputs(architecture, head, folder)
    assert len(hub.repositories[CODE].log) == 2
    return loads


def save_outputs(architecture, head, folder, name="tensors", **fields):
    """Save a batch and the outputs of the installed package, and return the path."""
    model = getattr(hf_attn_variants, f"AttnVariant{head}").from_pretrained(folder, **fields).eval()
    batch = architecture.make_batch(head)
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
    path = folder.parent / f"{name}.safetensors"
    save_file({"expected": expected} | {f"input.{key}": value.contiguous() for key, value in batch.items()}, path)
    return str(path)


@pytest.mark.thorough
def test_models_share_code_in_one_process_without_this_package(pushed, hub, tmp_path):
    folder = tmp_path / "bert-gqa/model"
    edited = save_outputs(BERT, "BertModel", folder, "edited", **NEW_FIELDS)
    repo_id, commits, _ = pushed["bert-gqa"]
    loads = [*pushed.values(), [repo_id, commits | NEW_FIELDS, edited]]
    # A later, broken commit of the code must have no effect.
    hub.repositories[CODE].commit(
        "main", {**hub.files(CODE), "attn_variants_base.py": b"raise SystemExit(1)"}, "broken"
    )
    printed = run_elsewhere("-c", ELSEWHERE, json.dumps(loads), tmp_path / "again", cwd=tmp_path, hub=hub)
    lines = [json.loads(line) for line in printed.splitlines()]
    digest = re.search('CODE_DIGEST = "(.*)"', build_complete_code()["attn_variants_base.py"])[1]
    for owner, name, commit, _, attention in lines:
        assert (owner, name, commit) == ("me", "code", commits["code_revision"])
        assert attention.startswith("attn_variants_sdpa_") and attention.endswith(digest)
    # A saved model contains the code instead of a reference to it.
    for index, (architecture, *_) in enumerate([*MODELS.values(), MODELS["bert-gqa"]]):
        saved = tmp_path / "again" / str(index)
        auto_map = json.loads((saved / "config.json").read_text())["auto_map"]
        assert auto_map == architecture.config_class.build_auto_map()
        files = {path.name: path.read_text() for path in saved.glob("*.py")}
        assert files == {name: build_complete_code()[name] for name in files}
        assert f"{architecture.config_class.modeling_file}.py" in files


@pytest.mark.thorough
def test_two_commits_of_the_code_and_a_normal_model_load_in_one_process(pushed, hub, api, tmp_path, monkeypatch):
    """Check that each model runs its own code, although the files have the same names."""
    repo_id, commits, tensors = pushed["bert-talking"]
    code = dict(build_complete_code())
    code["attn_variants_base.py"] = re.sub('CODE_DIGEST = ".*"', 'CODE_DIGEST = "0"', code["attn_variants_base.py"])
    monkeypatch.setattr("hf_attn_variants.hub.push.build_complete_code", lambda: code)
    second = push(tmp_path / "bert-talking/model", api, repo_id)
    push_checkpoint(plan_push(tmp_path / "bert-talking/model", "me/normal"), api=api)
    later = {"revision": second.commit, "code_revision": second.code_commit}
    loads = [[repo_id, commits, tensors], [repo_id, later, tensors], ["me/normal", {}, tensors]]
    lines = run_elsewhere("-c", ELSEWHERE, json.dumps(loads), cwd=tmp_path, hub=hub).splitlines()
    assert len({json.loads(line)[-1] for line in lines}) == 3


CARD_EXAMPLE = ELSEWHERE.split("import torch")[0] + "exec(compile(sys.argv[1], 'card', 'exec'), {})"


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bert", "t5", "whisper", "sentences"])
def test_example_of_the_card_runs_without_this_package(kind, converted, hub, api, tmp_path):
    folder, tokenizer = tmp_path / kind, BertTokenizerFast.from_pretrained(converted)
    model = {
        "bert": lambda: BERT.make_model("BertModel", "gqa_talking", vocab_size=len(tokenizer)),
        "sentences": lambda: BERT.make_model("BertModel", "gqa", vocab_size=len(tokenizer)),
        "t5": lambda: T5.make_model("T5ForConditionalGeneration", "gqa", vocab_size=len(tokenizer)),
        "whisper": lambda: WHISPER.make_model("WhisperModel", "latent"),
    }[kind]()
    for part in (model, tokenizer, *([make_feature_extractor()] if kind == "whisper" else [])):
        part.save_pretrained(folder)
    if kind == "sentences":  # SentenceTransformer must run the pinned code, too
        library = pytest.importorskip("sentence_transformers")
        library.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu").save_pretrained(str(folder))
    push(folder, api, "me/model")
    [example] = re.findall(r"```python\n(.*?)```", hub.files("me/model")["README.md"].decode(), re.DOTALL)
    assert ("SentenceTransformer(" in example) == (kind == "sentences") and "code_revision=" in example
    hub.repositories[CODE].commit(
        "main", {**hub.files(CODE), "attn_variants_base.py": b"raise SystemExit(1)"}, "broken"
    )
    run_elsewhere("-c", CARD_EXAMPLE, example, cwd=tmp_path, hub=hub)


def test_saving_with_the_installed_package_writes_the_code(folder, hub, api, tmp_path):
    push(folder, api)
    (tmp_path / "copy").mkdir()
    for name, content in hub.files(REPO).items():
        (tmp_path / "copy" / name).write_bytes(content)
    model = hf_attn_variants.AttnVariantBertModel.from_pretrained(tmp_path / "copy")
    assert model.config.auto_map["AutoModel"] == f"{CODE}--modeling_attn_variant_bert.AttnVariantBertModel"
    model.save_pretrained(tmp_path / "saved")
    saved = {path.name: path.read_text() for path in (tmp_path / "saved").glob("*.py")}
    assert saved == {path.name: path.read_text() for path in folder.glob("*.py")}
    auto_map = json.loads((tmp_path / "saved/config.json").read_text())["auto_map"]
    assert auto_map == json.loads((folder / "config.json").read_text())["auto_map"]
