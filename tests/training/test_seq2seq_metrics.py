"""Compare metrics of texts with sacrebleu and hand-computed values, and check metrics of `evaluate`."""

import textwrap

import pytest
import sacrebleu
from fixtures.commands import run_command
from fixtures.uptraining import make_t5, make_text

from hf_attn_variants.commands.training import seq2seq
from hf_attn_variants.training.seq2seq import METRIC_PACKAGES, check_text_metrics
from hf_attn_variants.training.seq2seq.metrics import get_text_metric, score_texts
from hf_attn_variants.training.seq2seq.task import load_seq2seq_data

TEXTS = ["The dog sits on the red mat.", "A man sees a house in the garden .", "big dogs"]
RIGHT = ["The dog sat on the red mat.", "A man sees a house in his garden.", "Big dogs run."]


def test_bleu_and_chrf_equal_sacrebleu():
    result = score_texts(["bleu", "chrf"], TEXTS, [(text,) for text in RIGHT])
    assert result == {
        "bleu": sacrebleu.corpus_bleu(TEXTS, [RIGHT]).score,
        "chrf": sacrebleu.corpus_chrf(TEXTS, [RIGHT]).score,
    }
    assert 10 < result["bleu"] < 90
    assert score_texts(["bleu"], RIGHT, [(text,) for text in RIGHT]) == {"bleu": pytest.approx(100.0)}


def test_rows_may_have_different_numbers_of_references():
    references = [(RIGHT[0], TEXTS[0]), (RIGHT[1],), (RIGHT[2], "something else", TEXTS[2])]
    more = score_texts(["bleu", "accuracy"], TEXTS, references)
    fewer = score_texts(["bleu", "accuracy"], TEXTS, [(text,) for text in RIGHT])
    assert more["bleu"] > fewer["bleu"] and fewer["accuracy"] == 0.0 and more["accuracy"] == pytest.approx(2 / 3)


def test_rouge_equals_hand_computed_values():
    pytest.importorskip("rouge_score")
    result = score_texts(["rouge"], ["the cat sat", "x"], [("the cats sat down",), ("y", "x")])
    # First row: 3 of 4 words match ("cat" by its stem), so rouge-1 and rouge-L are 6/7 and rouge-2 is 2 * 2 / (2 + 3).
    # Second row: 1.
    expected = {"rouge1": 6 / 7, "rouge2": 4 / 5, "rougeL": 6 / 7, "rougeLsum": 6 / 7}
    for name, value in expected.items():
        second = 0.0 if name == "rouge2" else 1.0  # a single word has no pair
        assert result[name] == pytest.approx(100 * (value + second) / 2)


def test_rouge_lsum_compares_sentences():
    pytest.importorskip("rouge_score")
    result = score_texts(["rouge"], ["The cat sat. A dog ran!"], [("A dog ran! The cat sat.",)])
    assert result["rougeL"] == pytest.approx(50) and result["rougeLsum"] == pytest.approx(100)


def test_unknown_and_missing_metrics_raise_an_error(monkeypatch):
    with pytest.raises(ValueError, match="'meteor'"):
        check_text_metrics(["bleu", "meteor"])
    monkeypatch.setitem(METRIC_PACKAGES, "other", "no_such_package")
    with pytest.raises(ValueError, match=r"--metrics other.*no-such-package"):
        check_text_metrics(["other"])


METRIC = textwrap.dedent(
    """
    import datasets
    import evaluate

    class Lengths(evaluate.Metric):
        def _info(self):
            text = datasets.Value("{kind}")
            features = datasets.Features({{"predictions": text, "references": {references}}})
            return evaluate.MetricInfo(description="", citation="", inputs_description="", features=features)

        def _compute(self, predictions, references):
            return {values}
    """
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder for the copies of `evaluate`, one for all tests, because Python imports modules from the first one."""
    import evaluate

    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_MODULES_CACHE", "HF_EVALUATE_CACHE", "DOWNLOADED_EVALUATE_PATH"):
            patch.setattr(evaluate.config, name, str(folder / name))
        yield folder


@pytest.fixture
def script(tmp_path, cache):
    def write(name, values, references="text", kind="string"):
        path = tmp_path / f"{name}.py"
        path.write_text(METRIC.format(values=values, references=references, kind=kind))
        return str(path)

    return write


def test_evaluate_metric_scores_its_numeric_results(script, tmp_path):
    one = script("one_reference", '{"letters": sum(map(len, predictions)), "each": [1], "right": references[0]}')
    result = score_texts(["accuracy", one], ["ab", "c"], [("ab",), ("d",)])
    assert result == {"accuracy": 0.5, "letters": 3.0}
    with pytest.raises(ValueError, match="a single reference per text"):
        score_texts([one], ["ab"], [("ab", "d")])
    several = script("several", '{"most": float(max(map(len, references)))}', "datasets.List(text)")
    assert score_texts([several], ["ab", "c"], [("ab", "x"), ("d",)]) == {"most": 2.0}
    files = []
    for side in ("source", "target", "validation_source", "validation_target"):
        (tmp_path / side).write_text("a text\n")
        files += [f"--{side}_file", str(tmp_path / side)]
    data = load_seq2seq_data(seq2seq.parse_args(["m", "--output_dir", "o", *files, "--metrics", one, "bleu"]))
    assert data.metric_names == ("letters", "bleu") and data.main_metric == "letters"
    assert data.score(["ab"], [("ab",)])["letters"] == 2.0
    twice = script("twice", '{"bleu": 1.0}')
    with pytest.raises(ValueError, match="got bleu, bleu"):
        load_seq2seq_data(seq2seq.parse_args(["m", "--output_dir", "o", *files, "--metrics", "bleu", twice]))


@pytest.mark.parametrize(
    "value, flags, best, printed",
    [
        ("wer", [], 2, "lowest wer. If the highest values are better, set --greater_is_better"),
        ("letters", [], 3, "highest letters. If the lowest values are better, set --no-greater_is_better"),
        ("letters", ["--no-greater_is_better"], 2, ""),
        ("wer", ["--greater_is_better"], 3, ""),
    ],
)
def test_best_weights_can_be_selected_by_an_evaluate_metric(script, tmp_path, caplog, value, flags, best, printed):
    # The calls are a check before training, one per step for three steps, and one for the best weights.
    values = '{"%s": [0.0, 2.0, 1.0, 3.0, 3.0][(self.__dict__.setdefault("n", []).append(0) or len(self.n)) - 1]}'
    source, target = make_text(tmp_path)
    argv = [make_t5(tmp_path / "t5"), "--source_file", source, "--target_file", target, "--max_length", 8]
    argv += ["--validation_source_file", source, "--validation_target_file", target, "--output_dir", tmp_path / "out"]
    argv += ["--metrics", script(f"{value}_{len(flags)}", values % value), "--metric_for_best_model", value]
    argv += ["--max_train_steps", 3, "--eval_steps", 1, "--max_eval_samples", 4, "--cpu", "--disable_tqdm", *flags]
    assert run_command(seq2seq, *argv)["best_step"] == best
    assert ("The best weights are" in caplog.text) == bool(printed) and printed in caplog.text


@pytest.mark.parametrize(
    "name, values, kind, message",
    [
        ("of_labels", '{"right": 1.0}', "int32", "cannot score texts against references"),
        ("broken", '{"right": 1 / 0}', "string", "ZeroDivisionError: division by zero"),
        ("texts", '{"right": "yes"}', "string", "not return a number"),
    ],
)
def test_metric_for_other_inputs_raises_immediately(script, name, values, kind, message):
    with pytest.raises(ValueError, match=message) as caught:
        get_text_metric(script(name, values, kind=kind))
    assert "\n" not in str(caught.value)


def test_hub_metric_needs_a_repository_name_and_trust(cache, monkeypatch):
    import evaluate
    from hub.local_hub import LocalHub

    with pytest.raises(ValueError, match="--trust_remote_code"):
        check_text_metrics(["me/letters"])
    with pytest.raises(ValueError, match="letters"):
        check_text_metrics(["./letters"])
    with LocalHub() as hub:
        monkeypatch.setattr(evaluate.config, "HUB_EVALUATE_URL", hub.url + "/{path}/resolve/{revision}/{name}")
        code = METRIC.format(values='{"letters": sum(map(len, predictions))}', references="text", kind="string")
        hub.create("me/letters", files={"letters.py": code.encode()})
        assert score_texts(["me/letters"], ["ab"], [("x",)], trust_remote_code=True) == {"letters": 2.0}
        with pytest.raises(ValueError, match="--metrics me/nothing cannot score texts"):
            score_texts(["me/nothing"], ["ab"], [("x",)], trust_remote_code=True)
