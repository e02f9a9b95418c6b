"""Compare the patterns' formulas with each other, and with windows that are written out."""

import pytest
import torch

from hf_attn_variants.reference.patterns import (
    keys_in_fixed_pattern,
    keys_in_local_block,
    keys_in_random_blocks,
    keys_in_strided_pattern,
    keys_in_window,
    pattern_mask,
    sliding_window_attention,
    sliding_window_mask,
)
from hf_attn_variants.reference.talking_heads import attention_core

DRAWN = {
    "window": ({"window": 2}, ["##...", "###..", ".###.", "..###", "...##"]),
    "dilated": ({"window": 2, "dilation": 2}, ["#.#..", ".#.#.", "#.#.#", ".#.#.", "..#.#"]),
    "global": ({"window": 2, "global_tokens": 1}, ["#####", "###..", "####.", "#.###", "#..##"]),
    "causal": ({"window": 2, "causal": True}, ["#....", "##...", ".##..", "..##.", "...##"]),
    "causal, dilated": ({"window": 2, "dilation": 2, "causal": True}, ["#....", ".#...", "#.#..", ".#.#.", "..#.#"]),
}


@pytest.mark.parametrize("fields, rows", DRAWN.values(), ids=DRAWN)
def test_window_mask_equals_the_drawing(fields, rows):
    assert sliding_window_mask(5, **fields).tolist() == [[cell == "#" for cell in row] for row in rows]


def test_global_token_attends_and_is_attended_everywhere():
    assert keys_in_window(1, 6, window=2, global_tokens=2) == [0, 1, 2, 3, 4, 5]
    assert keys_in_window(5, 6, window=2, global_tokens=2) == [0, 1, 4, 5]


@pytest.mark.parametrize("fields", [fields for fields, _ in DRAWN.values()], ids=DRAWN)
def test_key_by_key_attention_equals_masked_full_attention(fields):
    torch.manual_seed(0)
    n, double = 7, torch.float64
    Q = torch.randn(2, 4, n, 3, dtype=double)
    K, V = torch.randn(2, 2, 2, n, 3, dtype=double)
    padding = torch.arange(n) < torch.tensor([n, 3])[:, None]
    bias = torch.randn(4, 2 * n - 1, dtype=double)
    output, weights = sliding_window_attention(Q, K, V, scale=0.5, padding=padding, bias=bias, **fields)
    allowed = sliding_window_mask(n, **fields) & padding[:, None, None]
    distance = torch.arange(n) - torch.arange(n)[:, None]
    mask = torch.zeros(allowed.shape, dtype=double).masked_fill(~allowed, -torch.inf)
    expected = attention_core(Q, K, V, scale=0.5, bias=bias[None, :, distance + n - 1], mask=mask)
    torch.testing.assert_close((output, weights), expected)


BLOCKS = {
    "strided": (keys_in_strided_pattern, {"stride": 2}, ["###.#", "####.", "#####", ".####", "#.###"]),
    "strided, near, causal": (
        keys_in_strided_pattern, {"stride": 2, "part": 1, "causal": True}, ["#....", "##...", "###..", ".###.",
        "..###"],
    ),
    "strided, far": (keys_in_strided_pattern, {"stride": 2, "part": 2}, ["#.#.#", ".#.#.", "#.#.#", ".#.#.", "#.#.#"]),
    "fixed": (keys_in_fixed_pattern, {"block": 2, "summary": 1}, ["##.#.", "##.#.", ".###.", ".###.", ".#.##"]),
    "fixed, far, causal": (
        keys_in_fixed_pattern,
        {"block": 2, "summary": 1, "part": 2, "causal": True},
        ["#....", ".#...", ".##..", ".#.#.", ".#.##"],
    ),
    "local": (keys_in_local_block, {"block": 3}, ["###..", "###..", "###..", "...##", "...##"]),
    "local, causal": (
        keys_in_local_block, {"block": 3, "causal": True}, ["#....", "##...", "###..", "...#.", "...##"],
    ),
    "random, none": (
        keys_in_random_blocks,
        {"block": 1, "num_random": 0},
        ["##...", "###..", ".###.", "..###", "...##"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("keys, fields, rows", BLOCKS.values(), ids=BLOCKS)
def test_block_pattern_equals_the_drawing(keys, fields, rows):
    mask = pattern_mask(5, lambda i, n: keys(i, n, **fields))
    assert mask.tolist() == [[cell == "#" for cell in row] for row in rows]


def test_random_blocks_have_the_right_count_and_cover_the_text():
    fields = {"block": 4, "num_random": 2, "seed": 3}
    counts = torch.zeros(25)
    for block in range(25):
        read = keys_in_random_blocks(4 * block, 100, **fields)
        near = range(max(0, 4 * block - 4), min(100, 4 * block + 8))
        random_blocks = sorted(set(read) - set(near))
        assert len(random_blocks) == 8 and all(key // 4 * 4 in random_blocks for key in random_blocks)
        counts[[key // 4 for key in random_blocks[::4]]] += 1
    assert counts.max() <= 8 and (counts > 0).sum() >= 16  # 50 draws from 25 blocks
    assert keys_in_random_blocks(40, 100, **fields) != keys_in_random_blocks(40, 100, **fields, layer=1)
    causal = {**fields, "causal": True}
    assert keys_in_random_blocks(40, 60, **causal) == keys_in_random_blocks(40, 100, **causal)
