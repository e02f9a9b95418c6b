"""Check passages: half of an encoder's calibration texts continue with the texts after them."""

import logging
from dataclasses import replace

import pytest
import torch
from fixtures.calibrations import WordTokenizer, make_bert, make_calibration, make_t5, make_texts

from hf_attn_variants.conversion import convert_model
from hf_attn_variants.conversion.calibration.batches import join_passages, make_batches

TEXTS = [f"{number} is a number" for number in range(400)]
FOUR = [4] * 400  # the number of tokens in each text


def test_every_second_text_continues_with_the_next_texts():
    result = join_passages(TEXTS, FOUR, 256)
    assert sorted(result) == list(range(0, 400, 2))
    for number, (passage, length) in result.items():
        parts = TEXTS[number:] + TEXTS[:number]
        count = -(-length // 4)  # the texts of four tokens that reach the length
        assert passage == " ".join(parts[:count])


def test_short_and_long_passages_are_equally_frequent():
    lengths = [length for _, length in join_passages(TEXTS, FOUR, 256).values()]
    assert min(lengths) >= 16 and max(lengths) <= 256
    for begin in (16, 32, 64, 128):
        assert sum(begin <= length < 2 * begin for length in lengths) == pytest.approx(50, abs=2)


def test_text_without_spaces_is_joined_by_token_count():
    """Check chemical formulas of 60 tokens without spaces, because a count of words would join up to 256 of them."""
    texts, counts = ["CC(=O)Oc1ccccc1C(=O)O" * 3] * 400, [60] * 400
    assert max(passage.count(" ") for passage, _ in join_passages(texts, counts, 256).values()) == 4
    result = join_passages(texts, counts, 256).values()
    assert all(len(passage.split()) > 1 for passage, _ in result)  # each passage has several texts


def test_passages_work_with_few_texts_and_positions():
    assert join_passages(["a b", "c"], [2, 1], 64) == {0: ("a b c", 16)}
    assert all(length == 9 for _, length in join_passages(TEXTS, FOUR, 9).values())


def count_tokens(model, **changes):
    """Return the number of tokens of each calibration example."""
    calibration_data = make_calibration(**changes)
    parts = make_batches(model, calibration_data.tokenizer, calibration_data, torch.Generator().manual_seed(0))
    return sorted(int(count) for part in parts for batch in part for count in batch["attention_mask"].sum(1))


def test_passages_are_the_default_only_for_encoders():
    alone = sorted(map(len, WordTokenizer()(make_texts(), max_length=23)["input_ids"]))
    assert count_tokens(make_bert(), passages=False) == alone and max(alone) < 64
    mixed = count_tokens(make_bert(), passages=None)
    # Single texts have at most 23 tokens. Half of the examples are passages of 16 to 256 tokens, of which a share of
    # log(256 / 24) / log(16) is longer.
    assert len(mixed) == 512 and sum(count > 23 for count in mixed) == pytest.approx(218, abs=4)
    assert 200 < max(mixed) < 256
    assert max(count_tokens(make_bert(), passages=None, max_length=40)) < 40
    short = make_bert()
    short.config.max_position_embeddings = 80
    assert 64 < max(count_tokens(short, passages=None)) < 80
    targets = {"target_texts": make_texts()}
    assert count_tokens(make_t5(), passages=None, **targets) == count_tokens(make_t5(), passages=False, **targets)


def test_fitted_passages_contain_no_held_out_text():
    texts = [chr(number) * 30 for number in range(207, 257)]  # each text has one unique token
    calibration_data = replace(make_calibration(passages=None), texts=texts)
    used, held_out = (
        {int(token) for batch in part for token in batch["input_ids"].unique()}
        for part in make_batches(
            make_bert(), calibration_data.tokenizer, calibration_data, torch.Generator().manual_seed(0)
        )
    )
    space = WordTokenizer()([" "])["input_ids"][0][0]
    assert len(held_out - {0, space}) == 12 and used & held_out <= {0, space}


def test_unsupported_passages_raise_an_error():

    with pytest.raises(ValueError, match="`passages`"):
        make_calibration(passages=True, target_texts=make_texts())


@pytest.mark.thorough
def test_much_shorter_text_than_the_model_supports_gives_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "hf_attn_variants"):
        convert_model(make_bert(), 2, calibration=make_calibration(passages=None))
        assert not any("The longest calibration example" in item.getMessage() for item in caplog.records)
        convert_model(make_bert(), 2, calibration=make_calibration())
    (record,) = (item for item in caplog.records if "The longest calibration example" in item.getMessage())
    assert "The longest calibration example has 22 tokens" in record.getMessage()
