"""Check held-out rows, masks by key, and the batches of an encoder-decoder."""

import pytest
import torch

from hf_attn_variants.training.engine.dataloaders import (
    TextDataset,
    hash_texts,
    make_masked_text_collator,
    make_source_target_collator,
    make_text_collator,
)
from hf_attn_variants.training.uptraining.task import split_off_held_out_rows


def test_last_rows_are_held_out():
    rows = [str(i) for i in range(100)]
    assert split_off_held_out_rows(rows) == (rows[:95], rows[95:])
    assert split_off_held_out_rows(rows, max_rows=2) == (rows[:98], rows[98:])
    assert split_off_held_out_rows(["a", "b"]) == (["a"], ["b"]) and len(split_off_held_out_rows(rows * 200)[1]) == 512
    with pytest.raises(ValueError, match="a validation file"):
        split_off_held_out_rows(["a"])


def test_rows_have_a_key_and_a_length():
    rows = TextDataset(["aa", "bbbb", "c"])
    assert rows[1] == ("bbbb", (0, 1))
    rows.start_epoch(3)
    assert rows[1] == ("bbbb", (3, 1)) and rows.sort_longest_first().texts == ["bbbb", "aa", "c"]
    assert TextDataset([("a", "bb")]).get_lengths() == [3]
    assert hash_texts(["ab", "c"]) != hash_texts(["a", "bc"]) == hash_texts([("a", "bc")])


def test_masks_depend_only_on_the_key(tokenizer):
    text = "the dog and the cat were in the house with the man"
    collate = make_masked_text_collator(tokenizer, 32, 8, probability=0.5, seed=1)
    plain = make_text_collator(tokenizer, 32, 8)([(text, (0, 0)), ("the dog", (0, 1))])
    batch = collate([(text, (0, 0)), ("the dog", (0, 1))])
    predicted = batch["labels"] != -100
    assert torch.equal(batch["labels"][predicted], plain["input_ids"][predicted])
    assert torch.equal(batch["input_ids"][~predicted], plain["input_ids"][~predicted])
    assert torch.equal(batch["attention_mask"], plain["attention_mask"]) and batch["labels"].shape[1] % 8 == 0
    specials = torch.isin(plain["input_ids"], torch.tensor(tokenizer.all_special_ids))
    assert predicted.any() and not (predicted & specials).any()
    assert (batch["input_ids"] == tokenizer.mask_token_id).any()
    again = collate([(text, (0, 0))])
    length = again["labels"].shape[1]
    assert torch.equal(again["labels"][0], batch["labels"][0, :length])
    others = [collate([(text, key)])["labels"] for key in ((1, 0), (0, 1))]
    others.append(make_masked_text_collator(tokenizer, 32, 8, probability=0.5, seed=2)([(text, (0, 0))])["labels"])
    assert not any(torch.equal(again["labels"], other) for other in others)


def test_decoder_inputs_are_shifted_targets(tokenizer):
    collate = make_source_target_collator(tokenizer, 16, None, 5, decoder_start_token_id=7, source_prefix="the ")
    batch = collate([(("dog", "the cat and the dog"), (0, 0)), (("house in the", "dog"), (0, 1))])
    assert tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True) == ["the dog", "the house in the"]
    assert batch["labels"].shape == (2, 5) and (batch["labels"][1] == -100).tolist() == [False] * 3 + [True] * 2
    assert batch["decoder_input_ids"][:, 0].tolist() == [7, 7]
    real = batch["labels"][:, :-1] != -100
    assert torch.equal(batch["decoder_input_ids"][:, 1:][real], batch["labels"][:, :-1][real])
    assert sorted(batch) == ["attention_mask", "decoder_input_ids", "input_ids", "labels", "token_type_ids"]
