"""Patterns that select scattered keys by their positions in the text, and attention to these keys.

Each pattern is a subclass of `ScatteredPattern`. `attend_to_gathered_keys` computes one block of queries at a time and
gathers the keys that any query in the block attends to:

    keys       0 1 2 3 4 5 6 7 8 9          the keys of queries 6 and 7, which form one block
    query 6    x . . x . . x . . .
    query 7    x . . . . . x x . .
    gathered   0 3 6 7                      one mask [2, 4] instead of a mask [2, 10]

No mask has the size n x m, and the backward pass recomputes each block. The cost of a block depends on the number of
gathered keys. The pattern itself is evaluated for all keys, which takes one or two comparisons per key. The symbols
are defined in `softmax_attention`.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ...ops.key_ranges import MAX_SIZE, look_up_relative_bias
from ...ops.padded_rows import find_text_spans, is_boolean_key_mask
from ...ops.variant_attention import is_exporting, is_traced
from .attention_pattern import AttentionPattern

__all__ = [
    "BlockPattern",
    "DilatedBlockPattern",
    "FixedPattern",
    "LocalBlockPattern",
    "RandomBlockPattern",
    "StridedPattern",
    "attend_to_gathered_keys",
    "should_gather_keys",
]


class BlockPattern(NamedTuple):
    """The pattern of one attention module, with the same interface as `KeyRange`.

    The queries are at the positions of the last keys.
    """

    kind: "type[ScatteredPattern]"
    block: int  # number of tokens per block, or the stride
    sizes: tuple[int, ...] = ()  # further sizes (`ScatteredPattern.get_pattern_parameters`)
    heads: int = 0  # number of heads to divide the two parts among, or 0 if each head has both parts
    global_tokens: int = 0
    is_causal: bool = False
    first: Tensor | None = None  # the position of the first token in each row, [b]; None means 0
    blocks: Tensor | None = None  # the number of blocks in each row, [b]; None means all

    @property
    def before(self) -> int:
        """The largest possible number of earlier keys (`MAX_SIZE`), because the cache keeps all tokens."""
        return MAX_SIZE

    @property
    def uses_random_numbers(self) -> bool:
        """True if blocks are drawn from the whole text, and not only from the blocks before the query."""
        return self.kind.is_random and not self.is_causal

    @property
    def depends_on_positions(self) -> bool:
        """True if the pattern depends on token positions, and not only on distances."""
        return self.kind.depends_on_positions or self.global_tokens > 0

    def adapt_to_padded_rows(self, mask: Tensor) -> "BlockPattern":
        """Return the pattern for a call whose rows may contain padding.

        Args:
            mask: a boolean mask of the keys, [b, 1, 1 or n, m].
        """
        first, tokens = find_text_spans(mask[:, 0, 0])
        if not (self.uses_random_numbers or is_traced() or first.any()):
            return self
        return self._replace(first=first, blocks=-(-tokens // self.block) if self.uses_random_numbers else None)

    def count_attended_keys(self, key_length: int) -> int:
        """Return approximately how many of `key_length` keys a query attends to.

        The result does not apply to global tokens, which attend to all keys.
        """
        near, far = self.kind.count_near_and_far_keys(self, key_length)
        num_keys = -(-(near + far) // 2) if self.heads else near + far  # average over the heads
        return min(key_length, num_keys + self.global_tokens)

    def covers_all_keys(self, length: int, key_length: int) -> bool:
        """Return True if the last `length` positions attend to all keys, or to all earlier keys if causal."""
        return self.kind.covers_all_keys(self, key_length) and not self.heads

    def get_allowed_mask(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return a mask of the keys 0 .. m - 1 that queries at positions [n] attend to, [n, m] or [h, n, m].

        If rows contain padding (see `adapt_to_padded_rows`), the shape is [b, 1 or h, n, m], and values at padding are
        undefined.
        """
        if self.first is not None:
            query_positions, key_positions = (
                positions - self.first[:, None, None] for positions in (query_positions, key_positions)
            )  # [b, 1, n], [b, 1, m]
        query_positions, key_positions = query_positions[..., None], key_positions[..., None, :]
        distance = query_positions - key_positions
        near, far = self.kind.compute_near_and_far_masks(self, distance, query_positions, key_positions)
        if self.heads and far is not None:
            parts = [near] * (self.heads - self.heads // 2) + [far | (distance == 0)] * (self.heads // 2)
            allowed = torch.stack(parts) if self.first is None else torch.cat(parts, 1)
        else:
            allowed = near if far is None else near | far
        allowed = allowed | (key_positions < self.global_tokens) | (query_positions < self.global_tokens)
        return allowed & (distance >= 0) if self.is_causal else allowed


class ScatteredPattern(AttentionPattern):
    """The base class of patterns that select near keys and, in some patterns, far keys.

    Class attributes:
        is_random: True if a part of the pattern is drawn at random.
    """

    is_random: ClassVar[bool] = False

    @classmethod
    def get_key_range(cls, config: Any, prefix: str, heads: int, layer: int, is_causal: bool) -> BlockPattern:
        """Return the pattern of one attention module. See `AttentionPattern.get_key_range` for the arguments."""
        return BlockPattern(
            cls,
            getattr(config, f"{prefix}attention_block_size"),
            cls.get_pattern_parameters(config, prefix, layer),
            heads if getattr(config, f"{prefix}split_attention_heads") else 0,
            0 if is_causal else getattr(config, f"{prefix}num_global_tokens"),
            is_causal,
        )

    @classmethod
    def get_pattern_parameters(cls, config: Any, prefix: str, layer: int) -> tuple[int, ...]:
        """Return the sizes of the pattern other than its block size. See `get_key_range` for the arguments."""
        return ()

    @staticmethod
    @abstractmethod
    def compute_near_and_far_masks(
        pattern: BlockPattern, distance: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return boolean masks [.., n, m] of the near keys and of the far keys, or None if there are no far keys.

        Args:
            pattern: the pattern of the attention module.
            distance: the distances from keys to queries, [.., n, m].
            query_positions, key_positions: their positions in the text, [.., n, 1] and [.., 1, m].
        """

    @staticmethod
    @abstractmethod
    def count_near_and_far_keys(pattern: BlockPattern, key_length: int) -> tuple[int, int]:
        """Return approximately how many near keys and how many far keys a query attends to."""

    @staticmethod
    def covers_all_keys(pattern: BlockPattern, key_length: int) -> bool:
        """Return True if each of `key_length` positions attends to all positions, or to all earlier ones if causal."""
        return key_length <= pattern.block


class LocalBlockPattern(ScatteredPattern):
    """A pattern in which each token attends to the tokens in its own block."""

    name = "local_blocks"
    paper = ("Generating Wikipedia by summarizing long sequences: local blocks", "1801.10198")
    needed = ("attention_block_size",)
    optional = ("num_global_tokens",)

    @staticmethod
    def compute_near_and_far_masks(
        pattern: BlockPattern, distance: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the keys in the query's block.

        See `ScatteredPattern.compute_near_and_far_masks` for the arguments.
        """
        return query_positions // pattern.block == key_positions // pattern.block, None

    @staticmethod
    def count_near_and_far_keys(pattern: BlockPattern, key_length: int) -> tuple[int, int]:
        """Return the number of tokens in a block."""
        return pattern.block, 0


class DilatedBlockPattern(ScatteredPattern):
    """A pattern with dilated blocks. Its extra size is r, the step between two attended tokens."""

    name = "dilated_blocks"
    paper = ("LongNet: dilated blocks", "2307.02486")
    needed = ("attention_block_size", "attention_dilation")
    optional = ("num_global_tokens",)

    @classmethod
    def get_pattern_parameters(cls, config: Any, prefix: str, layer: int) -> tuple[int, ...]:
        """Return r."""
        return (getattr(config, f"{prefix}attention_dilation"),)

    @staticmethod
    def compute_near_and_far_masks(
        pattern: BlockPattern, distance: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the keys in the query's block whose distance from the query is a multiple of r."""
        (step,) = pattern.sizes
        return (query_positions // pattern.block == key_positions // pattern.block) & (distance % step == 0), None

    @staticmethod
    def count_near_and_far_keys(pattern: BlockPattern, key_length: int) -> tuple[int, int]:
        """Return the number of attended tokens in a block."""
        return -(-pattern.block // pattern.sizes[0]), 0

    @staticmethod
    def covers_all_keys(pattern: BlockPattern, key_length: int) -> bool:
        """Return True if each position attends to all positions, which is only possible for a single position."""
        return key_length <= 1


class FixedPattern(ScatteredPattern):
    """A pattern with blocks and with summary tokens at the end of each block, to which all tokens attend.

    With `split_attention_heads`, half of the heads attend to the blocks, and the other half to the summary tokens.
    """

    name = "fixed"
    paper = ("Sparse Transformers: strided and fixed patterns", "1904.10509")
    needed = ("attention_block_size", "num_summary_tokens")
    optional = ("split_attention_heads", "num_global_tokens")

    @classmethod
    def get_pattern_parameters(cls, config: Any, prefix: str, layer: int) -> tuple[int, ...]:
        """Return the number of summary tokens per block."""
        return (getattr(config, f"{prefix}num_summary_tokens"),)

    @staticmethod
    def compute_near_and_far_masks(
        pattern: BlockPattern, distance: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the keys in the query's block, and the summary tokens of all blocks."""
        (summary,) = pattern.sizes
        is_summary = (key_positions % pattern.block >= pattern.block - summary).expand_as(distance)
        return query_positions // pattern.block == key_positions // pattern.block, is_summary

    @staticmethod
    def count_near_and_far_keys(pattern: BlockPattern, key_length: int) -> tuple[int, int]:
        """Return the number of tokens in a block, and the number of summary tokens."""
        return pattern.block, -(-key_length // pattern.block) * pattern.sizes[0]


class StridedPattern(ScatteredPattern):
    """A pattern with near and strided keys. Its block size is the stride l.

    With `split_attention_heads`, half of the heads attend to the near keys, and the other half to the strided keys.
    """

    name = "strided"
    paper = ("Sparse Transformers: strided and fixed patterns", "1904.10509")
    needed = ("attention_block_size",)
    optional = ("split_attention_heads", "num_global_tokens")
    depends_on_positions = False

    @staticmethod
    def compute_near_and_far_masks(
        pattern: BlockPattern, distance: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the keys within one stride of the query, and those whose distance is a multiple of the stride."""
        return distance.abs() <= pattern.block, distance % pattern.block == 0

    @staticmethod
    def count_near_and_far_keys(pattern: BlockPattern, key_length: int) -> tuple[int, int]:
        """Return the number of keys within one stride, and the number of strided keys (one per stride)."""
        return pattern.block * (1 if pattern.is_causal else 2) + 1, -(-key_length // pattern.block)


# Draws are 32-bit integers that depend only on positions, so that they are the same on all devices.
UINT32_MASK = 0xFFFFFFFF
MAX_BLOCKS = 2**20
LARGEST_DRAW = 2**62


class RandomBlockPattern(ScatteredPattern):
    """A pattern with random blocks. Its extra sizes are the number of random blocks and the seed of the layer."""

    name = "random_blocks"
    paper = ("BigBird: random blocks", "2007.14062")
    needed = ("attention_block_size", "num_random_blocks")
    optional = ("attention_seed", "num_global_tokens")
    is_random = True

    @classmethod
    def get_pattern_parameters(cls, config: Any, prefix: str, layer: int) -> tuple[int, ...]:
        """Return the number of random blocks and the seed of the layer."""
        seed = _hash_number(_hash_number(getattr(config, f"{prefix}attention_seed")) + layer)
        return getattr(config, f"{prefix}num_random_blocks"), seed

    @staticmethod
    def compute_near_and_far_masks(
        pattern: BlockPattern, distance: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the keys in the query's block and its neighbors, and the keys in the random blocks.

        See `ScatteredPattern.compute_near_and_far_masks` for the arguments.
        """
        random, seed = pattern.sizes
        block = query_positions // pattern.block
        blocks = torch.arange(-(-key_positions.shape[-1] // pattern.block), device=key_positions.device)
        block_distance = block - blocks  # [n, blocks]
        is_far_block = block_distance > 1 if pattern.is_causal else block_distance.abs() > 1
        if pattern.blocks is not None:
            is_far_block = is_far_block & (blocks < pattern.blocks[:, None, None, None])
        # Each pair of blocks has a random number that depends only on this pair, and a block attends to the blocks
        # with the smallest numbers. In causal attention, a block therefore attends to the same blocks regardless of
        # the text length.
        random_numbers = (
            _hash_number((_hash_number((seed + block) & UINT32_MASK) + blocks) & UINT32_MASK) * MAX_BLOCKS + blocks
        )
        random_numbers = torch.where(is_far_block, random_numbers, LARGEST_DRAW)
        threshold = random_numbers.sort(-1).values[..., :random].amax(-1, keepdim=True)
        is_selected = is_far_block & (random_numbers <= threshold)
        key_blocks = key_positions // pattern.block
        index = key_blocks.clamp(0, blocks.shape[0] - 1).expand_as(distance)
        return (block - key_blocks).abs() <= 1, is_selected.gather(-1, index)

    @staticmethod
    def count_near_and_far_keys(pattern: BlockPattern, key_length: int) -> tuple[int, int]:
        """Return the total number of tokens in a block, its neighbors and the random blocks."""
        return ((2 if pattern.is_causal else 3) + pattern.sizes[0]) * pattern.block, 0


def _hash_number(number: Any) -> Any:
    """Return a pseudo-random hash of an integer below 2^32, or of a tensor of such integers."""
    for _ in range(2):
        number = (((number >> 16) ^ number) * 0x45D9F3B) & UINT32_MASK
    return (number >> 16) ^ number


# The number of queries per block, and the minimum length for blocks. For shorter texts, a single mask is faster.
GATHERED_QUERIES, MIN_GATHERED_KEYS = 128, 1024


def should_gather_keys(pattern: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return True if a call has a scattered pattern and should be computed in blocks.

    This requires a mask that is boolean and the same for all queries, or no mask.
    """
    if not isinstance(pattern, BlockPattern) or torch.compiler.is_compiling() or is_exporting():
        return False
    length, key_length = query.shape[2], key.shape[2]
    # If an encoder has keys before its queries, such as PEFT prefixes, mask creation raises an error.
    if query.shape[0] != key.shape[0] or not (pattern.is_causal or length == key_length):
        return False
    masks_only_keys = mask is None or is_boolean_key_mask(mask)
    return (
        masks_only_keys
        and length > 1
        and key_length >= MIN_GATHERED_KEYS
        and not pattern.covers_all_keys(length, key_length)
    )


def attend_to_gathered_keys(
    attend: Callable[..., Tensor],
    pattern: Any,
    query_key_value: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    table: Tensor | None,
) -> Tensor:
    """Attend to the keys that a pattern selects, and return the outputs [b, n, h_v, d_v].

    Args:
        attend: an attention function that takes query, key, value, mask and the keyword argument `position_bias`. It
            may also return the weights.
        pattern: the pattern that selects the keys (`BlockPattern`).
        query_key_value: the queries [b, h_k, n, d], the keys [b, k, m, d] and the values.
        mask: a boolean mask of the keys, [b, 1, 1 or n, m or more], of which the last m keys are used.
        table: the bias table, which is indexed by distance (see `look_up_relative_bias`).
    """
    query, key, value = query_key_value
    length, key_length = query.shape[2], key.shape[2]
    keys = torch.arange(key_length, device=query.device)
    mask = None if mask is None else mask[..., :1, -key_length:]
    rows = (
        max(1, GATHERED_QUERIES // pattern.block) * pattern.block
        if pattern.block <= 4 * GATHERED_QUERIES
        else GATHERED_QUERIES
    )

    def attend_from_block(query: Tensor, key: Tensor, value: Tensor, table: Any, begin: int) -> Tensor:
        queries = torch.arange(begin, begin + query.shape[2], device=query.device) + key_length - length
        allowed = pattern.get_allowed_mask(queries, keys)
        selected_keys = allowed.flatten(0, -2).any(0).nonzero()[:, 0]
        allowed = allowed[..., selected_keys][(None,) * (4 - allowed.dim())]
        allowed = allowed if mask is None else allowed & mask[..., selected_keys]
        bias = None if table is None else look_up_relative_bias(table, queries, selected_keys)
        output = attend(query, key[:, :, selected_keys], value[:, :, selected_keys], allowed, position_bias=bias)
        return output[0] if isinstance(output, tuple) else output

    needs_gradients = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (*query_key_value, table)
    )
    outputs = []
    # The first block ends at a boundary of the pattern, because queries after a cache may start inside a block.
    begin, end = 0, rows - (key_length - length) % rows
    while begin < length:
        arguments = (query[:, :, begin:end], key, value, table, begin)
        outputs.append(
            checkpoint(attend_from_block, *arguments, use_reentrant=False)
            if needs_gradients
            else attend_from_block(*arguments)
        )
        begin, end = end, end + rows
    return torch.cat(outputs, 1)
