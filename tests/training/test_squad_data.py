"""Check the SQuAD reader: valid files, and errors for invalid ones."""

import gzip
import json

import pytest
from fixtures.squad import CONTEXTS, make_questions, write_questions

from hf_attn_variants.training.squad.data import check_answers_exist, hash_questions, load_squad, read_squad


def test_plain_and_gzip_squad_files_give_all_questions(tmp_path):
    plain = write_questions(tmp_path / "dev.json")
    packed = tmp_path / "dev.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    questions = read_squad(plain)
    assert [(q.question, q.answers[0].text) for q in questions] == [p for pairs in CONTEXTS.values() for p in pairs]
    assert all(q.context[a.start :].startswith(a.text) for q in questions for a in q.answers)
    assert hash_questions(read_squad(packed)) == hash_questions(questions) != hash_questions(questions[1:])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_squad_files_can_have_a_byte_order_mark(tmp_path, encoding):
    plain, marked = write_questions(tmp_path / "dev.json"), tmp_path / "marked.json"
    marked.write_text(plain.read_text(), encoding=encoding)
    assert read_squad(marked) == read_squad(plain)


def test_unanswerable_questions_need_squad_version_2(tmp_path):
    questions = read_squad(write_questions(tmp_path / "dev.json", version_2=True))
    assert [q.id for q in questions if not q.answers] == ["0-none", "1-none"]
    check_answers_exist("dev.json", questions, version_2=True)
    with pytest.raises(ValueError, match=r"dev.json: 2 questions have no answer .* 0-none.*--version_2_with_negative"):
        check_answers_exist("dev.json", questions, version_2=False)


@pytest.mark.parametrize("text", ["red house", "北京大学"])
def test_log_names_the_units_of_f1_for_scripts_without_spaces(tmp_path, caplog, text):
    path = tmp_path / "dev.json"
    qa = {"id": "1", "question": "?", "answers": [{"text": text, "answer_start": 0}]}
    path.write_text(json.dumps({"data": [{"paragraphs": [{"context": text, "qas": [qa]}]}]}))
    with caplog.at_level("INFO", "hf_attn_variants"):
        load_squad({"validation_file": path, "test_file": None}, from_hub=False, with_train=False)
    assert ("F1 compares characters" in caplog.text) == (text == "北京大学")


def test_squad_test_file_needs_no_answers(tmp_path):
    content = make_questions()
    for paragraph in content["data"][0]["paragraphs"]:
        for qa in paragraph["qas"]:
            del qa["answers"]
    path = tmp_path / "test.json"
    path.write_text(json.dumps(content))
    assert len(read_squad(path, has_answers=False)) == 5
    with pytest.raises(ValueError, match=r'paragraphs\[0\].qas\[0\].*"answers".*id, question'):
        read_squad(path)


def change(path, edit):
    content = make_questions()
    edit(content["data"][0]["paragraphs"])
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p[1]["qas"][0]["answers"][0].update(answer_start=3), r"1.*0.*\(id 1-0\)"),
        (lambda p: p[0]["qas"][1]["answers"][0].update(answer_start=900), r"\(id 0-1\).*'Tom'.*900"),
        (lambda p: p[0]["qas"][1]["answers"].clear(), r"\(id 0-1\).*is_impossible"),
        (lambda p: p[0]["qas"][1].update(id="0-0"), "got 0-0 twice"),
        (lambda p: p[0]["qas"][1].update(answers={"text": ["x"]}), r"a list \"answers\".*got {'text': \['x'\]}"),
        (lambda p: p[1].pop("context"), r'paragraphs\[1\].*"context".*qas'),
        (lambda p: p.clear(), "at least one question"),
    ],
)  # fmt: skip
def test_squad_errors_name_the_file_and_the_question(tmp_path, edit, message):
    with pytest.raises(ValueError, match=message) as error:
        read_squad(change(tmp_path / "bad.json", edit))
    assert "bad.json" in str(error.value)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", ValueError, r"bad\.json.*JSON"),
        (b"{", ValueError, r"bad\.json.*JSON"),
        (b'{"context": "x"}\n{"context": "x"}', ValueError, "line 2.* a single JSON object in the SQuAD format"),
        (b'[{"context": "x"}]', ValueError, '"data".*JSON'),
        (b'{"rows": []}', ValueError, '"data"'),
        (b'{"data": [], "data": []}', ValueError, r"bad\.json.*The key 'data' occurs twice"),
        (None, OSError, r"bad\.json"),
    ],
)
def test_other_json_files_raise_an_error(tmp_path, content, kind, message):
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(kind, match=message):
        read_squad(path)


def test_truncated_squad_gzip_raises_an_error(tmp_path):
    path = tmp_path / "dev.json.gz"
    path.write_bytes(gzip.compress(json.dumps(make_questions()).encode())[:-20])
    with pytest.raises(OSError, match="gzip file"):
        read_squad(path)
