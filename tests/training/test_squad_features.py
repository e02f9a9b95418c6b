"""Check windows over contexts: they cover every token and the answer, and predictions are text of the context."""

import numpy as np
import pytest
import transformers
from fixtures.squad import make_reader, write_questions
from transformers import AutoTokenizer

from hf_attn_variants import AttnVariantBertConfig, AttnVariantT5Config
from hf_attn_variants.modeling.mechanisms.patterns.pattern_table import supports_global_mask
from hf_attn_variants.training.squad.data import (
    NO_ANSWER,
    Answer,
    Question,
    extract_predictions,
    make_nbest_entries,
    make_window_collator,
    make_windows,
    read_squad,
)

LENGTH, DEFAULT_STRIDE, QUERY = 16, 4, 6


@pytest.fixture(scope="module", params=["bert", "t5"])
def tokenizer(request, tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_reader(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return read_squad(write_questions(tmp_path_factory.mktemp("squad") / "dev.json", version_2=True))


@pytest.fixture
def windows(questions, tokenizer):
    return make_windows(questions, tokenizer, LENGTH, DEFAULT_STRIDE, QUERY)


def test_windows_overlap_by_the_stride_and_cover_the_context(questions, tokenizer, windows):
    for number, question in enumerate(questions):
        result = [w for w in windows if w.question == number]
        assert len(result) > 1 and all(len(w.input_ids) <= LENGTH for w in result)
        context_encoding = tokenizer(question.context, add_special_tokens=False, return_offsets_mapping=True)
        joined = list(map(tuple, result[0].offsets.tolist()))
        for window in result[1:]:
            rows = list(map(tuple, window.offsets.tolist()))
            assert rows[:DEFAULT_STRIDE] == joined[-DEFAULT_STRIDE:]
            joined += rows[DEFAULT_STRIDE:]
        assert joined == context_encoding["offset_mapping"]


def test_answer_is_labeled_in_windows_that_contain_it_completely(questions, windows):
    for number, question in enumerate(questions):
        marked = [w for w in windows if w.question == number and w.start != NO_ANSWER]
        assert bool(marked) == bool(question.answers)
        for window in marked:
            begin, end = (window.offsets[i - window.context_begin] for i in (window.start, window.end))
            assert question.context[begin[0] : end[1]] == question.answers[0].text
        for window in windows:
            if window.question == number and question.answers and window not in marked:
                answer = question.answers[0]
                after = answer.start + len(answer.text)
                assert window.offsets[0, 0] > answer.start or window.offsets[-1, 1] < after


@pytest.mark.thorough
@pytest.mark.parametrize("answer", ["caf" + chr(0xE9), "cafe" + chr(0x301), "cafe" + chr(0xAD), chr(0x200B) + "cafe"])
def test_answer_may_begin_or_end_between_tokens(answer, shared_data):
    for name in ("bert-base-uncased", "albert", "t5"):
        tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers" / name)
        context = f"They met in the {answer} that day, and in another place on all of the others."
        question = Question("1", "Where did they meet?", context, (Answer(answer, context.index(answer)),))
        windows = make_windows([question], tokenizer, 24, 4, 8)
        assert len(windows) > 1 and windows[0].start != NO_ANSWER and windows[-1].start == NO_ANSWER
        begin, end = (windows[0].offsets[i - windows[0].context_begin] for i in (windows[0].start, windows[0].end))
        assert context[begin[0] : end[1]].strip() in answer


def test_long_question_is_truncated_with_a_warning(questions, tokenizer, caplog):
    windows = make_windows(questions[:1], tokenizer, LENGTH, DEFAULT_STRIDE, 2)
    assert tokenizer.decode(windows[0].input_ids).count("Where did") == 1
    assert "Mary" not in tokenizer.decode(windows[0].input_ids[: windows[0].context_begin])
    assert "1 of 1 questions have more than --max_query_length 2" in caplog.text


def test_batches_are_padded_and_contain_answer_positions(tokenizer, windows):
    short = sorted(windows, key=lambda w: len(w.input_ids))[:1] + windows[:2]
    batch = make_window_collator(tokenizer, None)(short)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == batch["token_type_ids"].shape
    assert batch["attention_mask"].sum(-1).tolist() == [len(w.input_ids) for w in short]
    assert batch["start_positions"].tolist() == [w.start for w in short]
    types = batch["token_type_ids"][1]
    if tokenizer.cls_token is not None:
        assert types[: windows[0].context_begin].sum() == 0 and types[windows[0].context_begin :].all()


def test_question_tokens_are_global(tokenizer, windows):
    batch = make_window_collator(tokenizer, None, marks_questions=True)(windows[:3])
    assert batch["global_attention_mask"].shape == batch["input_ids"].shape
    for window, ids, marks in zip(windows, batch["input_ids"], batch["global_attention_mask"], strict=False):
        assert marks.tolist() == [1] * window.context_begin + [0] * (len(ids) - window.context_begin)


@pytest.mark.parametrize(
    ("config", "takes"),
    [
        (AttnVariantBertConfig(), False),
        (AttnVariantBertConfig(attention_pattern="sliding_window", attention_window=4), True),
        (AttnVariantBertConfig(attention_pattern="memory_compressed", attention_block_size=4), False),
        (AttnVariantT5Config(encoder_attention_pattern="sliding_window", encoder_attention_window=4), False),
        (transformers.BertConfig(), False),
    ],
)
def test_only_window_models_get_global_masks(config, takes):
    assert supports_global_mask(config) == takes


def test_logits_at_the_answer_give_its_text(questions, windows):
    starts, ends = (np.zeros((len(windows), LENGTH)) for _ in range(2))
    for i, window in enumerate(windows):
        if window.start != NO_ANSWER:
            starts[i, window.start] = ends[i, window.end] = 10.0
        else:
            starts[i, NO_ANSWER] = ends[i, NO_ANSWER] = 4.0
    predictions = extract_predictions(questions, windows, starts, ends)
    for question, prediction in zip(questions, predictions, strict=True):
        expected = question.answers[0].text if question.answers else ""
        assert prediction.id == question.id and prediction.answer(0.0) == expected
        assert prediction.answer(None) == expected or not question.answers
        entries = make_nbest_entries(prediction, with_null=True)
        assert entries[0]["text"] == expected
        assert sum(entry["probability"] for entry in entries) == pytest.approx(1.0)
        assert [e["probability"] for e in entries] == sorted((e["probability"] for e in entries), reverse=True)


def test_predicted_spans_are_ordered_short_and_within_the_context(questions, windows):
    generator = np.random.default_rng(0)
    starts, ends = (generator.normal(size=(len(windows), LENGTH)) for _ in range(2))
    for longest in (1, 3):
        predictions = extract_predictions(questions, windows, starts, ends, n_best=5, max_answer_length=longest)
        for question, prediction in zip(questions, predictions, strict=True):
            question_windows = [i for i, w in enumerate(windows) if w.question == questions.index(question)]
            best = -np.inf
            for i in question_windows:
                first = windows[i].context_begin
                for a in range(first, first + len(windows[i].offsets)):
                    for b in range(a, min(a + longest, first + len(windows[i].offsets))):
                        best = max(best, starts[i, a] + ends[i, b])
            # The five best starts and ends nearly always contain the best pair, and never give a better one.
            assert prediction.spans[0].score <= best + 1e-9
            assert prediction.null.score == pytest.approx(min(starts[i, 0] + ends[i, 0] for i in question_windows))
            assert all(span.text in question.context and span.text for span in prediction.spans)
            assert len(prediction.spans) <= 5
    everything = extract_predictions(questions, windows, starts, ends, n_best=LENGTH, max_answer_length=LENGTH)
    assert all(p.spans[0].score >= q.spans[0].score for p, q in zip(everything, predictions, strict=True))
