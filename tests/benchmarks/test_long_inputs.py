"""Check the benchmarks of long inputs at tiny sizes: sampling, truncation, retrieval and rows."""

import gzip
import json
import random
from types import SimpleNamespace

import pytest
import torch
from fixtures.commands import run_command
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.squad import make_questions, make_reader
from fixtures.uptraining import make_t5, make_text
from transformers import AutoModel, AutoModelForQuestionAnswering, AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks.long import long_inputs, long_questions, long_t5

WINDOW = ("--attention_pattern", "sliding_window", "--attention_window", "8", "--num_global_tokens", "1")


@pytest.fixture
def source(tmp_path):
    return make_tiny_bert(tmp_path / "source")


def test_query_retrieves_its_own_document():
    others = torch.eye(3)
    queries = torch.tensor([[3.0, 2, 1], [1, 0, 0], [2, 1, 3], [2, 1, 3], [3, 2, 1], [0, 0, 1]])  # 2 per document
    actual = long_inputs.compute_retrieval_scores(queries, others)
    assert actual["accuracy"] == pytest.approx(3 / 6, abs=1e-4)  # ranks 1, 1, 3, 3, 3, 1
    assert actual["reciprocal_rank"] == pytest.approx((1 + 1 + 1 / 3 + 1 / 3 + 1 / 3 + 1) / 6, abs=1e-4)


def test_passages_are_distributed_over_the_text():
    cut = long_inputs.split_into_passages(list(range(1000)))
    assert len(cut) == long_inputs.PASSAGES and {len(item) for item in cut} == {long_inputs.PASSAGE}
    assert (cut[0][0], cut[-1][-1]) == (0, 999)


def test_pieces_are_averaged_with_their_lengths_as_weights(source):
    model, tokenizer = AutoModel.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    ids = torch.randint(5, 60, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    ends = tokenizer.cls_token_id, tokenizer.sep_token_id

    def alone(part):
        mean = model(input_ids=torch.tensor([[ends[0], *part, ends[1]]])).last_hidden_state[0].mean(0)
        return mean / mean.norm()

    with torch.no_grad():
        expected = 14 * alone(ids[:14]) + 6 * alone(ids[14:])
        actual = long_inputs.make_encoder(model, tokenizer, 16)(ids)
        torch.testing.assert_close(actual, expected / expected.norm())
        torch.testing.assert_close(long_inputs.make_encoder(model, tokenizer, 16, 1)(ids), alone(ids[:14]))


@pytest.mark.thorough
def test_long_input_rows_are_not_measured_again(source, tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(source)
    words = [word for word in tokenizer.get_vocab() if word.isalpha()]
    generator = random.Random(0)
    shards = []
    for number in range(4):
        articles = ["\n".join(" ".join(generator.choices(words, k=20)) for _ in range(6)) for _ in range(8)]
        shards.append(tmp_path / f"train-{number}.txt.gz")
        shards[-1].write_bytes(gzip.compress("\n\n".join(articles).encode()))

    class Tiny:
        reads = ()
        pairs, scores = [(words[i], words[i + 1]) for i in range(4)], [1, 2, 3, 4]

        def __init__(self, data_dir):
            self.source, self.tokenizer, self.shards = source, tokenizer, shards

    sizes = {"SHORTEST": 60, "LONGEST": 400, "POSITIONS": 160, "LEAST_CHARACTERS": 0, "PASSAGE": 8}
    sizes |= {"TRAINING_TEXTS": 8, "WINDOW": WINDOW, "SentenceEncoder": Tiny}
    for name, value in sizes.items():
        monkeypatch.setattr(long_inputs, name, value)
    monkeypatch.setitem(long_inputs.PIECES, "chunks", (64, None))
    monkeypatch.setitem(long_inputs.READINGS, "window", WINDOW)
    steps = {"300": "2", "256": "32", "1024": "128"}
    monkeypatch.setattr(long_inputs, "UPTRAINING", tuple(steps.get(flag, flag) for flag in long_inputs.UPTRAINING))
    flags = ["--readings", "chunks", "window", "window, uptrained", "--articles", "6", "--output", tmp_path / "o.json"]
    flags = [str(flag) for flag in (*flags, "--work_dir", tmp_path / "work", "--data_dir", tmp_path)]
    rows = run_command(long_inputs, *flags)
    assert [row["reading"] for row in rows] == ["chunks", "window", "window, uptrained"]
    assert all(0 <= row[by]["accuracy"] <= 1 for row in rows for by in ("by_halves", "by_passages"))
    assert all(row["bfloat16_cosine"] > 0.99 for row in rows)
    assert rows[0]["spearman"] == pytest.approx(rows[1]["spearman"])  # texts of three tokens fit into any window
    written = json.loads((tmp_path / "o.json").read_text())
    assert written["runs"] == rows and written["set_aside"] == [shard.name for shard in shards[1:]]
    monkeypatch.setattr(long_inputs, "measure", None)
    assert run_command(long_inputs, *flags) == rows


def test_joined_articles_shift_the_answers(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(make_reader("bert", tmp_path / "reader"))
    content = make_questions()
    joined = long_questions.join_articles(content, tokenizer, tokens=1000, questions=4, seed=0)
    (article,) = joined["data"]
    (paragraph,) = article["paragraphs"]
    assert paragraph["context"] == "\n".join(item["context"] for item in content["data"][0]["paragraphs"])
    assert len(paragraph["qas"]) == 4
    for qa in paragraph["qas"]:
        for answer in qa["answers"]:
            begin = answer["answer_start"]
            assert paragraph["context"][begin : begin + len(answer["text"])] == answer["text"]
    short = long_questions.join_articles(content, tokenizer, tokens=20, questions=9, seed=0)["data"][0]["paragraphs"]
    assert short[0]["context"] == content["data"][0]["paragraphs"][0]["context"] and len(short[0]["qas"]) == 3


@pytest.mark.thorough
def test_article_is_read_in_windows_or_in_one_pass(tmp_path, monkeypatch):
    reader = make_reader("bert", tmp_path / "reader")
    AutoModelForQuestionAnswering.from_pretrained(reader).save_pretrained(reader)  # reading needs a trained head
    (tmp_path / "squad").mkdir()
    (tmp_path / long_questions.DEV).write_text(json.dumps(make_questions()))
    window = ("--max_position_embeddings", "120", *WINDOW)
    monkeypatch.setattr(long_questions, "READINGS", {"windows": ((), 32, 4), "one window": (window, 120, 4)})
    monkeypatch.setattr(long_questions, "ROOM", 4000)
    flags = ["--model", reader, "--work_dir", tmp_path / "work", "--data_dir", tmp_path, "--questions", "5"]
    flags += ["--output", tmp_path / "out.json", "--readings", "windows", "one window"]
    squad = long_questions.squad_command
    shorter = SimpleNamespace(main=squad.main, parse_args=shorten_questions(squad.parse_args))
    monkeypatch.setattr(long_questions, "squad_command", shorter)
    rows = run_command(long_questions, *flags)
    assert [row["eval_samples"] for row in rows] == [5, 5]
    assert rows[0]["eval_windows"] > rows[1]["eval_windows"] == 5
    assert json.loads((tmp_path / "out.json").read_text())["runs"] == rows


def shorten_questions(parse_args):
    return lambda argv: parse_args([*argv, "--max_query_length", "8"])


@pytest.mark.thorough
def test_t5_with_windows_gives_equal_translations(tmp_path, monkeypatch):
    source, (english, german) = make_t5(tmp_path / "source"), make_text(tmp_path, 24)

    class Tiny:
        reads, uptraining, batch_size = (), ("--objective", "seq2seq", "--max_length", "16", "--cpu"), 8
        tokenizer = AutoTokenizer.from_pretrained(source)

        def __init__(self, data_dir):
            self.source = source

        def write_training_texts(self, folder, seed, steps):
            return ["--source_file", str(english), "--target_file", str(german)]

        def evaluate(self, folder):
            model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
            ids = torch.arange(3, 20)[None]
            return {"loss": model(input_ids=ids, labels=ids).loss.item()}

    monkeypatch.setattr(long_t5, "Translator", Tiny)
    flags = ["--work_dir", str(tmp_path / "work"), "--output", str(tmp_path / "out.json"), "--steps", "2"]
    run_command(long_t5, *flags, "--parts", "quality")
    rows = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(row["encoder"], row["steps"]) for row in rows] == [
        *((encoder, 0) for encoder in long_t5.ENCODERS),
        (long_t5.SUMMARIES, 2),
    ]
    everything, windows, summaries, trained = (row["loss"] for row in rows)
    assert windows == pytest.approx(everything, abs=1e-5) and len({everything, summaries, trained}) == 3


def test_passes_are_timed_together_with_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(long_t5, "SHAPES", {"t5-small": long_t5.SHAPES["tiny"]})
    monkeypatch.setattr(long_t5, "MOST_FULL", 300)
    flags = ["--work_dir", str(tmp_path / "work"), "--output", str(tmp_path / "out.json"), "--parts", "passes"]
    run_command(long_t5, *flags, "--lengths", "280", "600", "--rounds", "1")
    short, long = json.loads((tmp_path / "long_t5_passes.json").read_text())["runs"]
    assert short["milliseconds"].keys() == {*long_t5.ENCODERS, *long_t5.UPSTREAM.values()}
    assert short["milliseconds"].keys() - long["milliseconds"].keys() == {"everything", "T5"}


def test_timed_encoders_give_equal_outputs(monkeypatch):
    monkeypatch.setattr(long_t5, "SHAPES", {"t5-small": long_t5.SHAPES["tiny"]})
    encoders, ids = long_t5.make_encoders(), torch.randint(2, 400, (1, 600))
    for variant_name, upstream_name in long_t5.UPSTREAM.items():
        weights = encoders[variant_name].state_dict()
        names = dict(zip(sorted(encoders[upstream_name].state_dict()), sorted(weights), strict=True))
        encoders[upstream_name].load_state_dict({name: weights[variant_key] for name, variant_key in names.items()})
        with torch.no_grad():
            outputs = [encoders[name](ids).last_hidden_state for name in (variant_name, upstream_name)]
        torch.testing.assert_close(*outputs, atol=1e-4, rtol=1e-4)
