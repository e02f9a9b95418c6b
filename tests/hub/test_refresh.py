"""`attn-variants refresh`: today's code in a repository of an older version, and every other byte as it was."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from architectures import ARCHITECTURES
from fixtures.old_repositories import ARCHIVES, copy_repository, repository_names, unpack_repositories
from packaging.version import Version
from relatives import RELATIVES
from safetensors.torch import load_file, save_file

import hf_attn_variants
from hf_attn_variants.commands.refresh import main, parse_args
from hf_attn_variants.conversion.checkpoint.source import side_files
from hf_attn_variants.errors import run_script
from hf_attn_variants.hub import refresh_check, refresh_plan
from hf_attn_variants.hub.card import is_untouched
from hf_attn_variants.hub.code_outputs import model_outputs
from hf_attn_variants.hub.push import folder_files
from hf_attn_variants.hub.refresh import refresh_repository
from hf_attn_variants.hub.refresh_check import cache_difference, trial_inputs
from hf_attn_variants.modeling.hosts.modeling_attn_variant_t5 import AttnVariantT5Attention
from hf_attn_variants.modeling.travel import code_files
from hf_attn_variants.modeling.variant_names import ATTN_VARIANTS_VERSION, NEWEST_RUN

ROOT = Path(__file__).resolve().parents[2]
MODELING = ROOT / "hf_attn_variants/modeling"
T5 = "T5ForConditionalGeneration-latent"
SAMPLE = (T5, "BertLMHeadModel-hybrid", "WhisperForConditionalGeneration-latent")
OLD_CODE_RUNS = Version(transformers.__version__) < Version("5.24")


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """All repositories of 0.1.0; never written to."""
    return unpack_repositories(tmp_path_factory.mktemp("archive") / "0.1.0")


@pytest.fixture
def old(archive, tmp_path):
    """A T5 that 0.1.0 saved, with a tokenizer's file and the card of a model of that version."""
    folder = copy_repository(archive / T5, tmp_path / "t5-gqa2")
    (folder / "tokenizer.json").write_bytes(b'{"version": "1.0",\r\n "x": 1 }')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("{}")
    shutil.copyfile(ROOT / "tests/fixtures/model_card_0.1.0.md", folder / "README.md")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def visible(folder):
    return {name: content for name, content in contents(folder).items() if not name.startswith(".")}


def of_today(files):
    host = json.loads(files["config.json"])["model_type"].removeprefix("attn_variant_")
    own = code_files("configuration_attn_variants", f"modeling_attn_variant_{host}")
    return all(content.decode() == own[name] for name, content in files.items() if name.endswith(".py"))


def refused(folder, message, kind=ValueError, **options):
    before = contents(folder)
    with pytest.raises(kind, match=message):
        refresh_repository(folder, **options)
    assert contents(folder) == before


@pytest.mark.thorough
def test_in_place_the_code_is_todays_and_the_rest_is_as_it_was(old):
    before = contents(old)
    result = refresh_repository(old)
    after = visible(old)
    assert of_today(after) and result.version_before == "0.1.0" and result.version == ATTN_VARIANTS_VERSION
    hf_attn_variants.AttnVariantT5ForConditionalGeneration.from_pretrained(old).save_pretrained(old / "again")
    assert {name for name in after if name.endswith(".py")} == {path.name for path in (old / "again").glob("*.py")}
    assert {n: c for n, c in before.items() if not n.endswith((".py", ".md"))} == {
        n: c for n, c in after.items() if not n.endswith((".py", ".md"))
    }
    backup = old / result.backup
    kept = {name: content for name, content in contents(backup).items() if name != "refresh.json"}
    assert kept == {n: c for n, c in before.items() if n in kept} and "config.json" in kept
    changed = {each.name for each in result.changes if each.kind == "changed"}
    changed |= {each.name for each in result.changes if each.kind == "removed"}
    assert {"variant_names.py", "README.md", "attention_variants.py"} <= changed == kept.keys() - {"config.json"}
    assert json.loads((backup / "refresh.json").read_text())["changed"] == [
        each.name for each in result.changes if each.kind == "changed"
    ]
    assert not any(".refresh" in name for names in side_files(old, []) for name in names)
    assert backup.name in folder_files(old)[1] and not any(".refresh" in name for name in folder_files(old)[0])
    assert f"hf_attn_variants 0.1.0 -> {ATTN_VARIANTS_VERSION}" in result.summary()


def test_shards_stay_as_they_are(old, tmp_path):
    tensors = load_file(old / "model.safetensors")
    (old / "model.safetensors").unlink()
    halves = {f"model-0000{part + 1}-of-00002.safetensors": sorted(tensors)[part::2] for part in (0, 1)}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, old / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in halves.items() for name in names}}
    (old / "model.safetensors.index.json").write_text(json.dumps(index))
    before = contents(old)
    result = refresh_repository(old, tmp_path / "new")
    assert all(each.name.endswith((".py", ".md")) for each in result.changes)
    after = contents(tmp_path / "new")
    assert {name: after[name] for name in before if "model" in name and not name.endswith(".py")} == {
        name: content for name, content in before.items() if "model" in name and not name.endswith(".py")
    }
    (old / "model-00001-of-00002.safetensors").unlink()
    refused(old, "1 of 2 shards are missing", OSError)


def test_a_card_that_nobody_edited_says_what_is_true_of_the_new_code(old):
    before = (old / "README.md").read_text()
    refresh_repository(old)
    text = (old / "README.md").read_text()
    assert is_untouched(text) and f"transformers 5.15 to {NEWEST_RUN}." in text
    repo_id = re.search(r'from_pretrained\("(.+?)"', text)[1]
    assert f"`attn-variants refresh {repo_id}`" in text
    lines = set(before.splitlines()) ^ set(text.splitlines())
    assert all("transformers" in line or "revision=" in line or "<!-- generated" in line for line in lines), lines


def test_an_edited_card_stays_and_that_is_said(old):
    edited = (old / "README.md").read_text().replace("# ", "# My ", 1)
    (old / "README.md").write_text(edited)
    result = refresh_repository(old)
    assert (old / "README.md").read_text() == edited and "README.md was written or edited" in result.summary()


def test_a_second_refresh_changes_nothing(old):
    refresh_repository(old)
    before = {path: path.stat().st_mtime_ns for path in old.rglob("*")}
    result = refresh_repository(old)
    assert result.changes == [] and f"is up to date ({ATTN_VARIANTS_VERSION})" in result.summary()
    assert {path: path.stat().st_mtime_ns for path in old.rglob("*")} == before


def test_what_is_saved_today_is_up_to_date(converted):
    assert refresh_repository(converted, dry_run=True).changes == []
    assert refresh_check._newest_run(refresh_plan.read_repository(converted)) == NEWEST_RUN


def test_a_dry_run_lists_every_file_and_writes_nothing(old, capsys):
    before = {path: (path.stat().st_mtime_ns, path.is_dir() or path.read_bytes()) for path in old.rglob("*")}
    assert run_script(lambda: main(parse_args([str(old), "--dry_run"]))) == 0
    printed = capsys.readouterr().out
    assert re.search(r"changed +\+\d+ +-\d+  variant_names.py", printed)
    assert re.search(r"added +\+\d+ +-0  attn_variants_ops.py", printed)
    assert "Dry run: nothing was written." in printed
    assert {p: (p.stat().st_mtime_ns, p.is_dir() or p.read_bytes()) for p in old.rglob("*")} == before


def test_a_new_folder_has_everything_and_the_old_one_is_as_it_was(old, tmp_path):
    before = contents(old)
    (old / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (old / ".git").mkdir()
    (old / ".git/HEAD").write_text("ref")
    result = refresh_repository(old, tmp_path / "new")
    after = contents(tmp_path / "new")
    assert of_today(after) and result.backup is None
    assert {n for n in after if not n.endswith(".py")} == {n for n in before if not n.endswith(".py")} | {
        ".gitattributes"
    }
    assert after["model.safetensors"] == before["model.safetensors"]
    assert contents(old).items() >= before.items()
    with pytest.raises(OSError, match="not empty"):
        refresh_repository(old, tmp_path / "new")


def test_auto_map_is_put_right_and_other_entries_stay(old):
    text = (old / "config.json").read_text()
    entry = '"AutoModel": "modeling_attn_variant_t5.AttnVariantT5Model"'
    assert entry in text
    odd = text.replace(
        entry, '"AutoModel": "old_file.OldName",\n    "AutoTokenizer": [\n      "my_tokens.Mine",\n      null\n    ]'
    )
    odd = odd.replace('"use_cache"', '"mine": "é\\u00e9",\n  "use_cache"')
    (old / "config.json").write_text(odd)
    (old / "old_file.py").write_text("from .additive_score import x\n")
    (old / "my_tokens.py").write_text("raise SystemExit\n")
    result = refresh_repository(old)
    assert (old / "config.json").read_text() == odd
    assert "old_file.py is not of this package" in result.summary() and "its entry AutoTokenizer" in result.summary()
    theirs = odd.replace("old_file.OldName", "me/x--modeling_attn_variant_t5.Gone")
    (old / "config.json").write_text(theirs)
    refresh_repository(old)
    assert (old / "config.json").read_text() == odd.replace(
        "old_file.OldName", "modeling_attn_variant_t5.AttnVariantT5Model"
    )


@pytest.mark.parametrize("form", ["compact", "four", "crlf", "bom"])
def test_a_configuration_keeps_its_form(old, form):
    values = {"odd": float("nan")} | json.loads((old / "config.json").read_text())
    values["auto_map"]["AutoModelForMaskedLM"] = "modeling_attn_variant_t5.AttnVariantT5Gone"
    text = json.dumps(values, indent={"compact": None, "four": 4}.get(form, 2))
    text = {"crlf": text.replace("\n", "\r\n"), "bom": f"\ufeff{text}"}.get(form, text)
    (old / "config.json").write_bytes(text.encode())
    refresh_repository(old)
    expected = re.sub(r',\s*"AutoModelForMaskedLM": "modeling_attn_variant_t5.AttnVariantT5Gone"', "", text)
    assert (old / "config.json").read_bytes() == expected.encode() != text.encode()


def test_files_of_former_versions_go_and_other_peoples_stay(old, monkeypatch):
    names = refresh_plan._known_names()
    monkeypatch.setattr(refresh_plan, "_known_names", lambda: {*names, "former.py", "needed.py"})
    (old / "former.py").write_text("x = 1\n")
    (old / "needed.py").write_text("x = 1\n")
    (old / "mine.py").write_text("from .needed import x\n")
    result = refresh_repository(old)
    assert not (old / "former.py").exists() and (old / result.backup / "former.py").exists()
    assert (old / "mine.py").exists() and (old / "needed.py").exists()
    assert "mine.py is not of this package and stays" in result.summary()


def test_a_file_of_somebody_elses_is_not_overwritten(old):
    (old / "attn_variants_ops.py").write_text("mine = 1\n")
    refused(old, "attn_variants_ops.py is not of the code of 0.1.0, which does not import it")


def test_what_somebody_edited_in_our_code_is_said(old):
    assert "not as 0.1.0 wrote" not in refresh_repository(old, dry_run=True).summary()
    with open(old / "t5_family.py", "a") as file:
        file.write("# mine\n")
    assert "not as 0.1.0 wrote them: t5_family.py." in refresh_repository(old).summary()


def test_the_digests_are_those_of_the_repositories_that_were_kept(archive, tmp_path):
    known = json.loads(refresh_plan.RELEASED.read_text())
    for path in ARCHIVES.glob("*.tar.xz"):
        version = path.name.removesuffix(".tar.xz")
        folder = archive if version == "0.1.0" else unpack_repositories(tmp_path / version, version)
        found = refresh_plan.released_digests(folder)
        assert known.get(version) == found, f"put into released_code.json: {json.dumps({version: found}, indent=2)}"


# What is refused.


def test_a_newer_version_is_refused_by_name(old):
    text = (old / "variant_names.py").read_text()
    (old / "variant_names.py").write_text(text.replace("0.1.0", "99.1.0rc1"))
    refused(old, "hf_attn_variants 99.1.0rc1; this is .* older: install 99.1.0rc1")
    (old / "variant_names.py").write_text(text.replace("0.1.0", "x.y"))
    refused(old, "of version 'x.y', which is none")


def test_code_that_says_no_version_is_refreshed(old):
    (old / "variant_names.py").unlink()
    result = refresh_repository(old)
    assert result.version_before is None and "of an unknown version ->" in result.summary()
    assert of_today(visible(old)) and (old / "variant_names.py").exists()


def test_what_is_not_ours_is_refused(plain_bert, old):
    refused(plain_bert, "model type 'bert' that this package did not save")
    values = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({n: v for n, v in values.items() if n != "auto_map"}))
    refused(old, "carries no code")
    (old / "config.json").write_text(json.dumps(values | {"model_type": "attn_variant_unknown"}))
    refused(old, "'attn_variant_unknown' is not supported")
    (old / "config.json").unlink()
    refused(old, "no config.json", OSError)


@pytest.mark.parametrize("name", ["model.safetensors", "additive_score.py", "extra.txt", "1_Pooling/more.json"])
def test_links_that_lead_out_of_the_folder_are_refused(old, tmp_path, name):
    (tmp_path / "outside").write_text("secret")
    (old / name).unlink(missing_ok=True)
    (old / name).symlink_to(tmp_path / "outside")
    refused(old, rf"{name} is a link that leads out of the folder", OSError)
    refused(old, rf"{name} is a link that leads out of the folder", OSError, output_dir=tmp_path / "new")
    assert (tmp_path / "outside").read_text() == "secret" and not (tmp_path / "new").exists()


def test_what_is_no_file_is_refused(old, tmp_path):
    os.mkfifo(old / "pipe.py")
    with pytest.raises(OSError, match=r"pipe\.py is neither a file nor a folder"):
        refresh_repository(old)
    (old / "pipe.py").unlink()
    (old / "inside").symlink_to(old / "1_Pooling")
    with pytest.raises(OSError, match="inside is a link to a folder"):
        refresh_repository(old, tmp_path / "new")
    (old / "inside").unlink()
    (old / "gone").symlink_to(old / "nothing")
    with pytest.raises(OSError, match="gone is a link that leads nowhere"):
        refresh_repository(old)


def test_a_link_inside_is_copied_and_not_swapped(old, tmp_path):
    (old / "variant_names.py").rename(old / "names.txt")
    (old / "variant_names.py").symlink_to("names.txt")
    refused(old, "variant_names.py is a link; put the file itself there", OSError)
    refresh_repository(old, tmp_path / "new")
    assert of_today(contents(tmp_path / "new")) and (old / "variant_names.py").is_symlink()


def test_pickles_are_not_read(old, tmp_path):
    bomb = b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    (old / "optimizer.pt").write_bytes(bomb)
    (old / "pytorch_model.bin").write_bytes(bomb)
    result = refresh_repository(old)
    assert "pytorch_model.bin is a pickle: it was not read." in result.notes
    assert (old / "optimizer.pt").read_bytes() == bomb and not (tmp_path / "ran").exists()
    shutil.copytree(old, tmp_path / "pickles")
    (tmp_path / "pickles/model.safetensors").unlink()
    (tmp_path / "pickles/variant_names.py").write_text("x = 1\n")
    refused(tmp_path / "pickles", "no weights in safetensors; pickles can run code")
    assert not (tmp_path / "ran").exists()


def plant(folder, mark):
    """Code that says that it ran, in every file of the repository that something may run."""
    for path in folder.glob("*.py"):
        text = path.read_text()
        path.write_text(f"{text}\nopen({str(mark)!r}, 'a').write('ran')\n")
    (folder / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'a').write('ran')\n")


def test_nothing_in_the_repository_is_run(old, tmp_path, monkeypatch):
    plant(old, tmp_path / "mark")
    elsewhere = {"peft_type": "LORA", "base_model_name_or_path": "me/elsewhere", "auto_mapping": None}
    (old / "adapter_config.json").write_text(json.dumps(elsewhere))
    values = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps(values | {"_attn_implementation": "me/kernel"}))
    monkeypatch.chdir(old)
    result = refresh_repository(".", tmp_path / "new")
    assert not (tmp_path / "mark").exists() and "sitecustomize.py is not of this package" in result.summary()
    assert of_today({n: c for n, c in contents(tmp_path / "new").items() if n != "sitecustomize.py"})


# What is compared.


@pytest.mark.thorough
@pytest.mark.parametrize("row", [*ARCHITECTURES, *RELATIVES], ids=lambda row: row.name)
def test_every_head_has_inputs_to_try(row):
    for head in row.heads:
        model = row.model(head, "gqa").eval()
        outputs = model_outputs(model, trial_inputs(model))
        assert outputs and all(value.isfinite().all() for value in outputs.values()), head
        difference = cache_difference(model, trial_inputs(model))
        writes = head.endswith(("ForConditionalGeneration", "CausalLM", "LMHeadModel", "MTModel"))
        assert (difference is not None) == (writes and head != "WhisperForConditionalGeneration"), head
        assert difference is None or difference < 1e-5


def test_a_cache_that_goes_wrong_is_refused(old, monkeypatch):
    forward = AttnVariantT5Attention.forward

    def wrong(self, hidden_states, *args, **kwargs):
        cache = kwargs.get("past_key_values", kwargs.get("cache"))
        step = cache is not None and cache.get_seq_length() > 0
        return forward(self, hidden_states * (2 if step else 1), *args, **kwargs)

    monkeypatch.setattr(AttnVariantT5Attention, "forward", wrong)
    refused(old, "logits with a cache differ from those without")


def test_weights_that_are_not_those_of_the_configuration_are_refused(old):
    tensors = load_file(old / "model.safetensors")
    values = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps(values | {"num_key_value_heads": 12}))
    refused(old, r"has the shape .* \(\d+ tensors differ\): config.json is not that of the weights")
    (old / "config.json").write_text(json.dumps(values))
    name = "encoder.final_layer_norm.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, old / "model.safetensors", {"format": "pt"})
    refused(old, f"its weights lack {name}")
    save_file(tensors | {"more": tensors[name].clone()}, old / "model.safetensors", {"format": "pt"})
    refused(old, "hold more than today's class reads: more")
    save_file(tensors | {name: tensors[name] * float("nan")}, old / "model.safetensors", {"format": "pt"})
    refused(old, "its outputs are not finite")
    content = (old / "model.safetensors").read_bytes()
    (old / "model.safetensors").write_bytes(content[:-8])
    refused(old, "truncated", OSError)


@pytest.mark.skipif(not OLD_CODE_RUNS, reason="the old code is not of this transformers")
def test_trusted_old_code_is_run_and_compared(old, tmp_path):
    plant(old, tmp_path / "mark")
    assert "old code ran too" in refresh_repository(old, dry_run=True, trust_remote_code=True).summary()
    assert (tmp_path / "mark").exists()
    text = (old / "t5_family.py").read_text()
    (old / "t5_family.py").write_text(
        f"{text}\nimport torch\ntorch.nn.Linear.forward = lambda s, x: x @ s.weight.T * 2\n"
    )
    refused(old, "of the old code and today's differ by up to", trust_remote_code=True)
    (old / "t5_family.py").write_text("raise ImportError('of another transformers')\n")
    found = refresh_repository(old, trust_remote_code=True).summary()
    assert "the old code could not run here (ImportError: of another transformers)" in found


@pytest.mark.thorough
def test_old_code_is_not_asked_under_a_transformers_that_it_does_not_know(old, monkeypatch):
    monkeypatch.setattr(refresh_check, "NEWEST_BEFORE", "5.14")
    assert (
        "it is of transformers up to 5.14" in refresh_repository(old, dry_run=True, trust_remote_code=True).summary()
    )


def test_what_means_something_else_in_upstream_is_said(archive, tmp_path):
    folder = copy_repository(archive / "UMT5ForConditionalGeneration-latent", tmp_path / "umt5")
    assert "tie_word_embeddings" not in refresh_repository(folder, dry_run=True).summary()
    config = {"model_type": "attn_variant_umt5", "tie_word_embeddings": False, "transformers_version": "5.23.0"}
    [said] = refresh_plan.what_changes_meaning(config)
    assert "d_model ** -0.5" in said and "keeps what it did" in said
    assert not refresh_plan.what_changes_meaning(config | {"transformers_version": "5.24.0"})
    assert not refresh_plan.what_changes_meaning(config | {"model_type": "attn_variant_t5"})


def load_elsewhere(folder, home):
    """Load each repository of a folder by its own code, in a process without this package; return the rows."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/versions/matrix_worker.py"), "load", str(folder)],
        env=variables | {"HF_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["rows"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "names", [SAMPLE, pytest.param(repository_names(), marks=pytest.mark.slow)], ids=["sample", "all"]
)
def test_refreshed_repositories_give_what_they_gave(names, archive, tmp_path):
    for name in names:
        copy_repository(archive / name, tmp_path / "refreshed" / name)
        refresh_repository(tmp_path / "refreshed" / name)
        assert of_today(visible(tmp_path / "refreshed" / name))
    rows = load_elsewhere(tmp_path / "refreshed", tmp_path / "home")
    assert [row["repository"] for row in rows] == sorted(names)
    for row in rows:
        assert "error" not in row and row.get("same_tokens", True), row
        assert row["largest_difference"] <= 1e-4 * max(1.0, row["largest_logit"]), row
