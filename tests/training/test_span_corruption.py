"""Check span corruption: T5's lengths, valid spans, complete text, and shuffled context."""

import json

import numpy as np
import pytest
import torch
from fixtures.span_corruption import make_sentinel_tokenizer
from transformers import AutoTokenizer

from hf_attn_variants.training.pretraining.span_corruption import (
    SpanCorruptionPreparer,
    compute_block_length,
    compute_corrupted_lengths,
    count_noise_tokens_and_spans,
    get_sentinel_ids,
    sample_noise_spans,
)
from hf_attn_variants.training.pretraining.task import HeldOutBlockDataset


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_sentinel_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_lengths_equal_the_t5_paper():
    # 512 inputs are made of 568 tokens, and have 114 targets: the lengths that T5 was pretrained with.
    assert compute_block_length(512, 0.15, 3.0) == 568 and compute_corrupted_lengths(568, 0.15, 3.0) == (512, 114)
    assert count_noise_tokens_and_spans(568, 0.15, 3.0) == (85, 28)


@pytest.mark.parametrize("max_length", [4, 7, 48, 64, 200, 512])
@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.5, 1.0), (0.3, 10.0)])
def test_longest_fitting_block_is_used(max_length, density, mean_span):
    length = compute_block_length(max_length, density, mean_span)
    assert compute_corrupted_lengths(length, density, mean_span)[0] <= max_length
    assert compute_corrupted_lengths(length + 1, density, mean_span)[0] > max_length


@pytest.mark.parametrize("length", [1, 2, 5, 52, 568])
def test_spans_cover_the_noise_without_touching(length):
    noise, count = count_noise_tokens_and_spans(length, 0.15, 3.0)
    for seed in range(20):
        spans = sample_noise_spans(length, 0.15, 3.0, np.random.default_rng(seed))
        lengths = spans[:, 1] - spans[:, 0]
        assert spans.shape == (count, 2) and lengths.sum() == noise and (lengths >= 1).all()
        assert (spans[1:, 0] > spans[:-1, 1]).all() and (spans[0, 0] > 0 or length == 1) and spans[-1, 1] == length


def test_noise_is_uniform_except_at_the_ends():
    share = np.zeros(100)
    for seed in range(2000):
        for begin, end in sample_noise_spans(100, 0.15, 3.0, np.random.default_rng(seed)):
            share[begin:end] += 1 / 2000
    assert share.mean() == pytest.approx(0.15) and share[0] == 0.0 and share[-1] == pytest.approx(1.0)
    assert np.abs(share[10:80] - share[10:80].mean()).max() < 0.05


def test_inputs_and_targets_together_contain_the_text(tokenizer):
    prepare = SpanCorruptionPreparer(tokenizer, 32, seed=3)
    words = np.arange(20, 20 + prepare.block_length)
    for number in range(20):
        example = prepare(words, (0, number))
        inputs = example["input_ids"][example["attention_mask"] == 1].tolist()
        labels = example["labels"][example["labels"] >= 0].tolist()
        assert len(example["input_ids"]) == prepare.input_length <= 32
        assert len(example["labels"]) == len(example["decoder_input_ids"]) == prepare.target_length
        assert inputs[-1] == labels[-1] == tokenizer.eos_token_id and labels[0] == prepare.sentinels[0]
        assert example["decoder_input_ids"].tolist() == [tokenizer.pad_token_id, *labels[:-1]]
        spans, sentinel = {}, None
        for token in labels[:-1]:
            if token in prepare.sentinels:
                sentinel = token
            else:
                spans.setdefault(sentinel, []).append(token)
        result = [part for token in inputs[:-1] for part in spans.get(token, [token])]
        assert result == words.tolist()
        used = [token for token in inputs if token in prepare.sentinels]
        assert used == prepare.sentinels[: len(used)].tolist() == list(spans)


def test_examples_depend_only_on_seed_and_key(tokenizer):
    prepare, other = SpanCorruptionPreparer(tokenizer, 32, seed=3), SpanCorruptionPreparer(tokenizer, 32, seed=4)
    words = np.arange(20, 20 + prepare.block_length)
    same = HeldOutBlockDataset([words], prepare)[0], prepare(words, (0, 0))
    assert all(np.array_equal(same[0][key], same[1][key]) for key in same[0])
    for changed in (prepare(words, (1, 0)), prepare(words, (0, 1)), other(words, (0, 0))):
        assert not np.array_equal(changed["input_ids"], same[0]["input_ids"])
    for length in (1, 2, 9):
        short = prepare(words[:length], (0, 0))
        assert {key: len(value) for key, value in short.items()} == {key: len(value) for key, value in same[0].items()}
        noise, spans = count_noise_tokens_and_spans(length, 0.15, 3.0)
        assert short["attention_mask"].sum() == length - noise + spans + 1
        assert (short["labels"] >= 0).sum() == noise + spans + 1


def test_shuffling_moves_only_words(tokenizer):
    prepare = SpanCorruptionPreparer(tokenizer, 32, seed=3)
    examples = [prepare(np.arange(20, 20 + n), (0, n)) for n in (prepare.block_length, 9)]
    batch = {key: torch.from_numpy(np.stack([example[key] for example in examples])) for key in examples[0]}
    shuffled, again = prepare.shuffle_input_tokens(batch), prepare.shuffle_input_tokens(batch)
    assert torch.equal(shuffled["input_ids"], again["input_ids"])
    assert shuffled["labels"] is batch["labels"] and not torch.equal(shuffled["input_ids"], batch["input_ids"])
    assert torch.equal(shuffled["input_ids"].sort(-1).values, batch["input_ids"].sort(-1).values)
    words = batch["input_ids"] >= 20
    assert torch.equal(shuffled["input_ids"][~words], batch["input_ids"][~words])


def test_mt5_sentinels_are_detected(tokenizer, tmp_path):
    folder = make_sentinel_tokenizer(tmp_path / "mt5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        spelled = json.loads((folder / name).read_text())
        text = json.dumps(spelled, ensure_ascii=False).replace("<extra_id_", "\u2581<extra_id_")
        (folder / name).write_text(text, encoding="utf-8")
    mt5 = AutoTokenizer.from_pretrained(folder)
    assert get_sentinel_ids(mt5, 9) == [*mt5.convert_tokens_to_ids([f"\u2581<extra_id_{i}>" for i in range(8)]), None]
    assert (
        SpanCorruptionPreparer(mt5, 32, 0).sentinels.tolist()
        == SpanCorruptionPreparer(tokenizer, 32, 0).sentinels.tolist()
    )


def test_unsuitable_tokenizers_and_lengths_raise_an_error(tokenizer, tiny_bert):
    with pytest.raises(ValueError, match=r"28.*8.*--max_length"):
        SpanCorruptionPreparer(tokenizer, 512, 0)
    with pytest.raises(ValueError, match=r"sentinels.*got 0"):
        SpanCorruptionPreparer(AutoTokenizer.from_pretrained(tiny_bert), 32, 0)
