"""Check runs into a folder with a model, killed or on a full disk at any point: the old model, the new one, or none.

The test copies the folder before each file operation of a run. A copy is the state that SIGKILL would leave, because
the system keeps written data. In addition, two runs are killed, and more with `-m slow`.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults.test_full_disk import DiskFullAtOpen, call_command
from faults.test_kills import read_contents
from fixtures.full_disk import full_disk
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.kills import CHANGES, draw_points, run_killed, run_watched
from fixtures.processes import run_processes
from fixtures.span_corruption import make_sentinel_tokenizer
from fixtures.squad import make_reader, write_questions
from fixtures.uptraining import make_bert, make_t5, make_text

from hf_attn_variants import cli
from hf_attn_variants.model_folder import describe_unfinished_model

GLUE_DATA = Path(__file__).resolve().parents[1] / "fixtures/glue/STS-B"
QUIET = ["--max_train_steps", 1, "--logging_steps", 1, "--cpu", "--disable_tqdm", "--overwrite_output_dir"]
TINY = "num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=16"
TINY_T5 = "d_model=16,d_kv=4,d_ff=16,num_layers=1,num_heads=4,relative_attention_num_buckets=8"
# The arguments of each training command. Names in capitals are files of `sources`.
TRAININGS = {
    "glue": ["--model_name_or_path", "BERT", "--task_name", "stsb", "--data_dir", GLUE_DATA, "--max_length", 16],
    "uptrain": ["--model_name_or_path", "SENTENCES", "--objective", "mlm", "--train_file", "LINES"],
    "classify": ["--model_name_or_path", "BERT", "--train_file", "TABLE.CSV", "--validation_file", "TABLE.CSV",
                 "--max_length", 16],
    "ner": ["--model_name_or_path", "BERT", "--train_file", "CONLL", "--validation_file", "CONLL",
            "--max_length", 16],
    "squad": ["--model_name_or_path", "READER", "--train_file", "QUESTIONS", "--validation_file", "QUESTIONS",
              "--max_length", 24, "--doc_stride", 4, "--max_query_length", 8],
    "seq2seq": ["--model_name_or_path", "T5", "--source_file", "LINES", "--target_file", "TARGETS",
                "--validation_source_file", "LINES", "--validation_target_file", "TARGETS", "--max_length", 16],
    "pretrain": ["--model_type", "bert", "--tokenizer_name", "BERT", "--config_overrides", TINY, "--train_file",
                 "LINES", "--validation_file", "LINES", "--max_length", 16],
    "pretrain-t5": ["--model_type", "t5", "--tokenizer_name", "SENTINELS", "--config_overrides", TINY_T5,
                    "--train_file", "LINES", "--validation_file", "LINES", "--max_length", 16],
}  # fmt: skip
QUICK = ("glue", "uptrain")
# The files of a model, and the files that describe it.
MODEL = re.compile(
    r"config\.json|(model|pytorch_model).*|generation_config\.json|(tokenizer|vocab|merges|spiece|special_|added_).*|"
    r"modules\.json|config_sentence.*|1_Pooling.*|README\.md|conversion_report\.json"
)
OLD_FILES = ("README.md", "conversion_report.json", "all_results.json", "generation_config.json", "spiece.model")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Training data, and the old models of the output folder: a BERT and a T5."""
    folder = tmp_path_factory.mktemp("sources")
    make_tiny_bert(folder / "BERT")
    make_bert(folder / "SENTENCES", folder / "BERT")
    (folder / "SENTENCES/1_Pooling").mkdir()
    (folder / "SENTENCES/1_Pooling/config.json").write_text('{"of": "the new"}')
    (folder / "SENTENCES/modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}]')
    make_reader("bert", folder / "READER")
    make_t5(folder / "T5")
    make_sentinel_tokenizer(folder / "SENTINELS")
    source, target = make_text(folder)
    source.rename(folder / "LINES")
    target.rename(folder / "TARGETS")
    (folder / "TABLE.CSV").write_text("text,label\na man,x\na dog,y\n" * 4)
    (folder / "CONLL").write_text("Ann B-PER\nsees O\nRome B-LOC\n\n" * 8)
    (folder / "QUESTIONS").write_bytes(Path(write_questions(folder / "v1.json", False)).read_bytes())
    return folder


def make_old(sources, out):
    """Write a sharded T5 or BERT with all optional files, and files of the user."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(sources / "T5")
    model.save_pretrained(out, max_shard_size="5KB")
    for path in (sources / "T5").glob("*token*"):
        shutil.copy(path, out)
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling/config.json").write_text('{"of": "the old"}')
    for name in OLD_FILES:
        if not (out / name).exists():
            (out / name).write_text("{}" if name.endswith("json") else "old")
    (out / "mine.txt").write_text("the user's")
    (out / "mine.safetensors").write_text("the user's")
    return out


def make_argv(command, sources, out):
    argv = [sources / item if isinstance(item, str) and item.isupper() else item for item in TRAININGS[command]]
    return [str(item) for item in (command, *argv, *QUIET, "--output_dir", out)]


def read_model_files(folder):
    """Return the files that make up the model in a folder, without hidden files."""
    result = read_contents(folder)
    return {name: result[name] for name in result if MODEL.fullmatch(name) and not name.startswith(".")}


def identify_model(folder, old, new):
    """Return which model a folder contains for every loader; fail if models are mixed or lost without an error."""
    from transformers import AutoConfig, AutoModel, BertModel

    assert (folder / "mine.txt").read_text() == (folder / "mine.safetensors").read_text() == "the user's"
    if describe_unfinished_model(folder):
        for loader in (AutoModel, AutoConfig, BertModel):  # a class would load weights without a config.json
            with pytest.raises(OSError, match=r"config\.json|valid JSON"):
                loader.from_pretrained(folder)
        check_tokenizer(folder, old, new)
        for argv in (["push", str(folder), "--repo_id", "me/x", "--dry_run"], ["inspect", str(folder)]):
            status, errors = call_command(argv)
            assert status == 2 and "killed while it replaced this model. `mv" in errors[0], errors
        return "refused"
    result, results = read_model_files(folder), (folder / "all_results.json")
    AutoModel.from_pretrained(folder)
    which = "old" if result == old else "new" if result == new else "mixed"
    assert which != "mixed", {name for name in {*old, *new, *result} if result.get(name) not in (old.get(name),)}
    if which == "old":
        assert results.read_text() == "{}"
    else:
        assert not results.exists() or json.loads(results.read_text())["steps"] == 1
    return which


def check_tokenizer(folder, old, new):
    """Check that the tokenizer raises an error, or that its files belong to one model."""
    from transformers import AutoTokenizer

    result = {
        name: content for name, content in read_contents(folder).items() if re.match("tokenizer|vocab|special_", name)
    }
    try:
        AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        return
    assert result and any(result.items() <= model.items() for model in (old, new)), result.keys()
    assert "tokenizer_config.json" in result, result.keys()


class Copies:
    """Copy a folder before each file operation, if it differs from the last copy."""

    def __init__(self, folder, places):
        self.folder, self.places, self.last, self.busy, self.count = folder, places, None, False, 0
        sys.addaudithook(self)

    def __call__(self, event, args):
        is_write = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if self.busy or self.folder is None or not (is_write or event in CHANGES):
            return
        self.busy = True
        try:
            now = {}
            for path in self.folder.rglob("*"):
                with contextlib.suppress(FileNotFoundError):
                    now[str(path)] = (path.lstat().st_ino, path.lstat().st_size, path.lstat().st_mtime_ns)
            if now != self.last:
                self.last, self.count = now, self.count + 1
                shutil.copytree(self.folder, self.places / f"{self.count:04}")
        finally:
            self.busy = False


def copy_at_each_change(command, sources, folder):
    out = make_old(sources, folder / "out")
    old = read_model_files(out)
    copies = Copies(out, folder / "copies")
    status, errors = call_command(make_argv(command, sources, out))
    copies.folder = None
    assert status == 0, errors
    new, seen = read_model_files(out), []
    assert not any(name.startswith(".") for name in os.listdir(out)), os.listdir(out)
    assert identify_model(out, old, new) == "new" and "spiece.model" not in new and not (out / "README.md").exists()
    for copy in sorted((folder / "copies").iterdir()):
        seen.append(identify_model(copy, old, new))
        if seen[-1] == "refused":  # the command in the error message restores a complete model
            command = re.search("`(mv .*?)`", describe_unfinished_model(copy))[1]
            subprocess.run(command, shell=True, check=True)
            assert identify_model(copy, old, new) in ("old", "new")
    print(json.dumps(seen))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command", [*QUICK, *(pytest.param(item, marks=pytest.mark.slow) for item in TRAININGS if item not in QUICK)]
)
def test_kill_at_each_change_leaves_one_model(command, sources, tmp_path):
    statuses, output = run_processes(1, copy_at_each_change, command, sources, tmp_path)
    assert statuses == [0], output[-3000:]
    seen = json.loads([line for line in output.splitlines() if line.startswith('["')][-1])
    # The order of a run: first the old model, then none, then the new one.
    assert seen == sorted(seen, key=("old", "refused", "new").index) and {*seen} == {"old", "refused", "new"}
    assert seen.count("refused") > 5


def run_here(command, sources, out):
    assert cli.main(make_argv(command, sources, out)) == 0


@pytest.mark.thorough
@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_overwrites_leave_one_model(count, sources, tmp_path):
    before = make_old(sources, tmp_path / "before")
    uninterrupted = shutil.copytree(before, tmp_path / "whole")
    num_operations, seconds = run_watched(run_here, "glue", sources, uninterrupted)
    old, new = read_model_files(before), read_model_files(uninterrupted)
    for number, point in enumerate(draw_points(num_operations, seconds, count, "overwrite")):
        out = shutil.copytree(before, tmp_path / f"out-{number}")
        run_killed(point, run_here, "glue", sources, out)
        identify_model(out, old, new)
        run_watched(run_here, "glue", sources, out)  # the next run finishes
        assert identify_model(out, old, new) == "new"
        assert not any(name.startswith(".") for name in os.listdir(out)), point


def fill_at_each_write(command, sources, folder, max_tries):
    logging.raiseExceptions = False  # stderr is a file on the same full disk
    no_room = DiskFullAtOpen(folder)
    before = make_old(sources, folder / "before")
    old, complete_folder = read_model_files(before), shutil.copytree(before, folder / "whole")
    with no_room.at(0):
        status, errors = call_command(make_argv(command, sources, complete_folder))
    assert status == 0, errors
    opened, new = no_room.seen, read_model_files(complete_folder)
    tries = [(f"open {number}", lambda number=number: no_room.at(number)) for number in range(1, opened + 1)]
    sizes = sorted({len(content) for content in read_contents(complete_folder).values()} - {0})
    tries += [(f"size {size - 1}", lambda size=size: full_disk(size - 1)) for size in sizes]
    tries = tries[:: max(1, len(tries) // max_tries)] if max_tries else tries
    seen = []
    for name, fault in tries:
        out = shutil.copytree(before, folder / f"out {name}")
        with fault():
            status, errors = call_command(make_argv(command, sources, out))
        seen.append(identify_model(out, old, new))
        assert status == 0 or (status == 2 and len(errors) == 1), (name, status, errors)
        assert status == 2 or seen[-1] == "new", name
        assert seen[-1] != "refused", (name, errors)  # moving files needs no disk space
    print(json.dumps(seen))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("command", "max_tries"), [("glue", 6), *(pytest.param(item, None, marks=pytest.mark.slow) for item in TRAININGS)]
)
def test_full_disk_at_each_write_leaves_one_model(command, max_tries, sources, tmp_path):
    statuses, output = run_processes(1, fill_at_each_write, command, sources, tmp_path, max_tries)
    assert statuses == [0], output[-3000:]
    assert "old" in json.loads([line for line in output.splitlines() if line.startswith('["')][-1])


def test_run_in_its_own_folder_keeps_the_files_of_its_model(sources, tmp_path):
    model_folder = shutil.copytree(sources / "SENTENCES", tmp_path / "own")
    (model_folder / "README.md").write_text("---\nlicense: mit\n---\n")
    argv = [
        item if item != str(sources / "SENTENCES") else str(model_folder)
        for item in make_argv("uptrain", sources, model_folder)
    ]
    assert cli.main(argv) == 0
    assert (
        (model_folder / "README.md").exists()
        and (model_folder / "modules.json").exists()
        and (model_folder / "1_Pooling").is_dir()
    )
