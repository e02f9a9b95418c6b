"""Check files of every kind with a few changed bytes: they are read, or raise one clear error.

There are 200 inputs by default, and 8,000 with `-m slow`. `limits` restricts the time and the memory of each.
"""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert
from fixtures.linear_loop import make_loop
from hypothesis import given
from hypothesis import strategies as st
from security.test_hostile_files import limit_time_and_memory, make_hypothesis_settings

from hf_attn_variants import convert
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.glue_tasks import TASKS
from hf_attn_variants.hub import plan_push
from hf_attn_variants.model_folder import read_history
from hf_attn_variants.text_files import read_columns, read_lines, read_pairs
from hf_attn_variants.training.classification import ClassificationSettings
from hf_attn_variants.training.classification.data import load_classification_data
from hf_attn_variants.training.engine.session import read_log
from hf_attn_variants.training.glue.task import read_glue_tsv
from hf_attn_variants.training.ner.task import read_conll
from hf_attn_variants.training.squad.data import read_squad

ROWS = [{"a": f"dog {i}", "b": {"c": "naïve\u2028cat", "d": i}} for i in range(3)]
SQUAD = {
    "data": [{"paragraphs": [{"context": "A cat sat.", "qas": [{"id": "q", "question": "Who?", "answers": []}]}]}]
}
SQUAD["data"][0]["paragraphs"][0]["qas"][0]["answers"] = [{"text": "cat", "answer_start": 2}]
CARD = "---\nlicense: mit\nlanguage:\n- en\ntags: [a, b]\nbase_model: me/bert\nmodel-index: []\n---\n\n# x\n"
HISTORY = {
    "format": 1,
    "steps": [{"kind": "training", "task_name": "sst2", "eval_accuracy": 0.9, "arguments": {"seed": 1}}],
}
RESULTS = {"eval_accuracy": 0.5, "task_name": "sst2", "date": "2026-01-01", "arguments": {"learning_rate": 1e-3}}
# Bytes that are hard to parse.
PAYLOADS = [
    *(item.encode() for item in "\0\n\r\t\"'{}[],:-#&*!|>%@`\\\u2028\x85"),
    *(item.encode() for item in ("null", "true", "NaN", "-Infinity", "1e999", "\\ud800", "---\n", '"""', "&x [*x]")),
    *(b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\xed\xa0\x80", b"!!python/object/apply:os.system ['true']"),
    *(b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000, b"- " * 5000, b"x" * 100_000),
]
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "replace", "delete", "repeat", "cut"]),
        st.floats(0, 1),
        st.integers(0, 24),
        st.sampled_from(PAYLOADS) | st.binary(max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def edit_content(content, edits):
    for kind, share, length, payload in edits:
        position = int(share * len(content))
        before, span, after = content[:position], content[position : position + length], content[position + length :]
        content = {
            "insert": before + payload + span + after,
            "replace": before + payload + after,
            "delete": before + after,
            "repeat": before + span * 50 + after,
            "cut": before,
        }[kind]
    return content


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A converted checkpoint with the reports of a training."""
    folder = tmp_path_factory.mktemp("fuzzed")
    convert(make_tiny_bert(folder / "bert"), num_key_value_heads=2, output_dir=folder / "gqa")
    for name, value in (("model_history.json", HISTORY), ("all_results.json", RESULTS)):
        (folder / "gqa" / name).write_text(json.dumps(value))
    (folder / "gqa/README.md").write_text(CARD)
    return folder / "gqa"


def make_table(suffix):
    if suffix in ("csv", "tsv"):
        mark = {"csv": ",", "tsv": "\t"}[suffix]
        return "".join(f"{mark.join(row)}\n" for row in (("a", "b"), ("dog", '"a ""cat"""'), ("x", "y"))).encode()
    return ("\n".join(map(json.dumps, ROWS)) if suffix == "jsonl" else json.dumps(ROWS, indent=1)).encode()


def read_classified(path):
    settings = ClassificationSettings(model_name_or_path="m", output_dir="o", train_file=str(path), text_columns="a")
    return load_classification_data(settings, None)


CLASSIFIED = {
    "classes.csv": b'a,label\ndog,x\n"a ""cat""",y\n',
    "numbers.csv.gz": gzip.compress(b"a,score\ndog,0.5\ncat,-1\n", mtime=0),
    "several.jsonl": b'{"a": "dog", "labels": ["x", "y"]}\n{"a": "cat", "labels": []}\n',
}
# By file name: the intact content, and the function that reads the file at a path.
GLUE_FILES = {
    name: b"".join((FIXTURES / folder / "dev.tsv").read_bytes().splitlines(keepends=True)[:5])
    for name, folder in (("stsb", "STS-B"), ("cola", "CoLA"))
}
READERS = {
    **{
        f"table.{item}": (make_table(item), lambda path: read_columns([path], ["a"]))
        for item in ("csv", "tsv", "json", "jsonl")
    },
    "nested.jsonl": (make_table("jsonl"), lambda path: read_columns([path], ["b.c", "a"])),
    "packed.csv.gz": (gzip.compress(make_table("csv"), mtime=0), lambda path: read_columns([path], ["a", "b"])),
    **{name: (content, read_classified) for name, content in CLASSIFIED.items()},
    "lines.txt": ("one\n\nzwei \u2028 drei\n".encode(), lambda path: read_lines([path])),
    "pairs.txt": (b"one\ntwo\n", lambda path: read_pairs(path, path)),
    "squad.json": (json.dumps(SQUAD).encode(), read_squad),
    "words.conll": (b"-DOCSTART- O\n\nDogs B-X\nbark O\n\ncats I-X\n", lambda path: read_conll(str(path))),
    **{
        f"{name}.tsv": (content, lambda path, name=name: read_glue_tsv(path, TASKS[name]))
        for name, content in GLUE_FILES.items()
    },
}
CHECKPOINT_FILES = ("README.md", "model_history.json", "all_results.json", "conversion_report.json", "config.json")
COUNTS = pytest.mark.parametrize("scale", [1, pytest.param(42, marks=pytest.mark.slow)])


def assert_works_or_explains(read, *args):
    with limit_time_and_memory():
        try:
            read(*args)
        except (ValueError, OSError) as error:
            assert str(error).strip(), f"{type(error).__name__} without a message"


@COUNTS
@pytest.mark.parametrize("name", READERS)
def test_fuzzed_example_files_are_read_or_raise_an_error(name, scale, tmp_path):
    content, read = READERS[name]
    (tmp_path / name).write_bytes(content)
    read(tmp_path / name)  # the intact file can be read

    @make_hypothesis_settings(12 * scale)
    @given(edits=EDITS)
    def attempt(edits):
        (tmp_path / name).write_bytes(edit_content(content, edits))
        assert_works_or_explains(read, tmp_path / name)

    attempt()


@COUNTS
@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_fuzzed_checkpoint_files_are_read_or_raise_an_error(name, scale, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "gqa")
    content = (folder / name).read_bytes()

    @make_hypothesis_settings(4 * scale)
    @given(edits=EDITS)
    def attempt(edits):
        (folder / name).write_bytes(edit_content(content, edits))
        with limit_time_and_memory():
            read_history(folder)  # the history names files that cannot be read
        assert_works_or_explains(plan_push, folder, "me/gqa")

    attempt()


@COUNTS
@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "config.json", "README.md"])
def test_fuzzed_source_files_are_read_or_raise_an_error(name, scale, tmp_path):
    source = make_tiny_bert(tmp_path / "bert")
    (source / "README.md").write_text(CARD)
    content, outputs = (source / name).read_bytes(), tmp_path / "outputs"
    outputs.mkdir()

    @make_hypothesis_settings(4 * scale)
    @given(edits=EDITS)
    def attempt(edits):
        (source / name).write_bytes(edit_content(content, edits))
        assert_works_or_explains(convert_checkpoint, source, outputs / "gqa", 2, "mean")
        shutil.rmtree(outputs / "gqa", ignore_errors=True)
        assert not list(outputs.iterdir())

    attempt()


@COUNTS
@pytest.mark.parametrize("name", ["train_state.json", "train_log.jsonl"])
def test_fuzzed_run_files_are_read_or_raise_an_error(name, scale, tmp_path):
    (tmp_path / "run").mkdir()
    make_loop(tmp_path / "run", total_steps=2, checkpointing_steps=2).run()
    path = tmp_path / "run/checkpoint-2" / name
    content = path.read_bytes()

    def go_on():
        shutil.copytree(tmp_path / "run", tmp_path / "again", dirs_exist_ok=True)
        loop = make_loop(tmp_path / "again", total_steps=2, checkpointing_steps=2, resume_from_checkpoint="latest")
        loop.run()
        read_log(tmp_path / "again/train_log.jsonl")

    go_on()

    @make_hypothesis_settings(6 * scale)
    @given(edits=EDITS)
    def attempt(edits):
        path.write_bytes(edit_content(content, edits))
        assert_works_or_explains(go_on)

    attempt()


def test_yaml_alias_bomb_in_a_card_uses_little_memory(checkpoint, tmp_path):
    """Check YAML lines that each repeat the previous line ten times, which some parsers expand to a billion words."""
    folder = shutil.copytree(checkpoint, tmp_path / "gqa")
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{after}: &{after} [{', '.join([f'*{name}'] * 10)}]"
        for name, after in zip("abcdefgh", "bcdefghi", strict=True)
    ]
    (folder / "README.md").write_text("---\n" + "\n".join(lines) + "\ntags: *i\n---\n")
    with limit_time_and_memory():
        read_history(folder)
    assert_works_or_explains(plan_push, folder, "me/gqa")
    assert isinstance(folder, Path)
