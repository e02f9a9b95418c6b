"""Softmax attention inside a window and a kernel outside it, with a joint normalization (LoLCATs, arXiv 2410.10254).

For query i, s_ij are the dot products, c_i is their maximum within the window, and gamma is learned for each head:

    w_ij = gamma exp(s_ij - c_i) in the window, phi(q_i) phi(k_j) elsewhere;  o_i = sum_j w_ij v_j / sum_j w_ij

Explicit weights are computed for blocks of C queries and the C + before + after keys that are in any of their windows.
Two running sums of phi(k) v^T cover the keys before and after this span. Nothing is subtracted from a sum, and no
tensor is as large as n x m. A decoder caches the sum over the keys before the next token's window, and the keys in
that window.

The formula is implemented in `reference.linear.hybrid_attention`. The symbols are defined in `softmax_attention`.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.beams import QueryFolder
from ...ops.key_ranges import KeyRange
from ...ops.memory_efficient_attention import disable_autocast
from ...ops.variant_attention import AttentionHeads
from .attention_kernel import KernelTensorSpec
from .hedgehog_kernel import HedgehogKernel

__all__ = ["HybridKernel"]

# A block has as many queries as the window has tokens, within these limits. Longer blocks require more individual
# weights, and shorter blocks require more sums.
MIN_BLOCK_LENGTH, MAX_BLOCK_LENGTH = 64, 128


class HybridState(NamedTuple):
    """The cached state of a decoder: sums over the keys before the next window, and the keys in that window."""

    sums: Tensor  # [b, k, F, d_v + 1]
    keys: Tensor  # [b, k, before, d]
    values: Tensor  # [b, k, before, d_v]
    is_token: Tensor  # [b, 1, before, 1]: True for tokens


class NearKeys(NamedTuple):
    """The keys in one call, preceded by `before` cached keys or masked positions."""

    keys: Tensor  # [b, k, before + m, d]
    values: Tensor  # [b, k, before + m, d_v]
    is_token: Tensor  # [b, 1, before + m, 1]

    @classmethod
    def from_call(
        cls, key_range: KeyRange, key: Tensor, value: Tensor, key_mask: Tensor | None, state: HybridState | None
    ) -> "NearKeys":
        """Return the keys of the current call, preceded by the cached keys or, without a state, by masked positions.

        Args:
            key_range: the key range of the window.
            key, value: [b, k, m, d] and [b, k, m, d_v].
            key_mask: a boolean mask [b or 1, 1, m, 1] that is False for padding, or None if there is no padding.
            state: the state of the earlier tokens, if any.
        """
        key_mask = key.new_ones(1, 1, key.shape[2], 1, dtype=torch.bool) if key_mask is None else key_mask
        key_mask = key_mask.expand(key.shape[0], -1, -1, -1)
        if state is None:
            padding = (0, 0, key_range.before, 0)
            return cls(*(nn.functional.pad(tensor, padding) for tensor in (key, value, key_mask)))
        pairs = zip((state.keys, state.values, state.is_token), (key, value, key_mask), strict=True)
        return cls(*(torch.cat([old.to(new.dtype), new], dim=2) for old, new in pairs))

    def make_state(self, features: Tensor, sums: Tensor | None, key_range: KeyRange) -> HybridState:
        """Return the state for the next token.

        Args:
            features: phi(k) [b, k, before + m, F], which is zero for masked keys.
            sums: the sums over the earlier keys, if any.
            key_range: the key range of the window.
        """
        num_older = features.shape[2] - key_range.before
        values = nn.functional.pad(self.values[:, :, :num_older], (0, 1), value=1.0)
        new = features[:, :, :num_older].mT @ values
        return HybridState(new if sums is None else sums + new, *(tensor[:, :, num_older:] for tensor in self))


@dataclass(frozen=True)
class HybridKernel(HedgehogKernel):
    """A kernel with a softmax inside a window and Hedgehog features outside it.

    Args:
        window: w, the window size in tokens (`attention_window`).
    """

    window: int

    name = "hybrid"
    paper = ("LoLCATs: on low-rank linearizing of large language models", "2410.10254")
    learned_parameters = (*HedgehogKernel.learned_parameters, "window_log_factor")
    needs_window = True

    @classmethod
    def from_config(
        cls, config: Any, prefix: str, head_dim: int, path: str, is_causal: bool, layer: int
    ) -> "HybridKernel":
        """Create the kernel of an attention module, with the window of its layer.

        See `AttentionKernel.from_config` for the arguments.
        """
        hedgehog = HedgehogKernel.from_config(config, prefix, head_dim, path, is_causal, layer)
        return cls(
            hedgehog.features, is_causal, hedgehog.seed, config.get_layer_value(f"{prefix}attention_window", layer)
        )

    @classmethod
    def check(cls, config: Any, field: str) -> None:
        """Check that each layer with this kernel has a window.

        Raises:
            ValueError: if a layer has no window, or if the field is for cross-attention.
        """
        prefix = field.removesuffix("attention_kernel")
        if prefix == "cross_":
            raise ValueError(
                f'`{field}="hybrid"` is not supported, because the queries in cross-attention have no positions '
                "among the keys. Choose another kernel."
            )
        window = f"{prefix}attention_window"
        layers = range(config.get_num_layers(window))
        values = [
            config.get_layer_value(window, layer)
            for layer in layers
            if config.get_layer_value(field, layer) is not None
        ]
        if None in values:
            invalid_value = values if any(values) else None
            raise ValueError(f'`{window}` must be set in all layers with `{field}="hybrid"`, got {invalid_value}.')

    @property
    def key_range(self) -> KeyRange:
        """The key range of the window in which the softmax is used."""
        return KeyRange.from_window(self.window, 1, 0, self.is_causal)

    @property
    def exports_explicit_weights(self) -> bool:
        """Always True, because a graph with blocks would have a fixed length."""
        return True

    def get_tensor_specs(self, heads: AttentionHeads) -> dict[str, KernelTensorSpec]:
        """Return the Hedgehog feature maps and the logarithm of gamma [h].

        The initial value is gamma = 1 / F, because phi(q) phi(k) is 1 / F if all features are the same, and exp(s - c)
        is 1 if all logits are the same.
        """
        initialize = partial(torch.full, (heads.query,), -math.log(2 * self.features))
        return super().get_tensor_specs(heads) | {"window_log_factor": KernelTensorSpec((heads.query,), initialize)}

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        scaling: float,
        state: Any = None,
    ) -> tuple[Tensor, Any]:
        """Compute attention from softmax weights inside the window and sums of key features outside it.

        See `AttentionKernel.attend` for the arguments. The state is a `HybridState`.
        """
        exact = torch.promote_types(value.dtype, torch.float32)
        with disable_autocast(query):
            key_range = self.key_range
            near_keys = NearKeys.from_call(key_range, key.to(exact), value.to(exact), key_mask, state)
            features, _ = self.compute_key_features(module, near_keys.keys, near_keys.is_token, scaling)
            fold, sums = QueryFolder(query, key, 1), None if state is None else state.sums
            query = query.to(exact)
            rows = (
                fold.fold_queries(tensor) for tensor in (query, self.compute_query_features(module, query, scaling))
            )
            queries, unfolded_features = (tensor.unflatten(2, (fold.groups, -1)) for tensor in rows)
            log_factor = module.window_log_factor.to(exact).unflatten(0, (key.shape[1], -1))
            output = compute_hybrid_sums(
                queries, unfolded_features, near_keys, features, log_factor, sums, key_range, scaling
            )
            output = output.flatten(2, 3)
            new_state = near_keys.make_state(features, sums, key_range) if self.is_causal else None
            return fold.unfold(self.normalize_outputs(output)).to(value.dtype), new_state

    def replace_window_weights(
        self, module: Any, weights: Tensor, query: Tensor, key: Tensor, key_mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Replace the weights inside the window with softmax weights."""
        logits = (query.unflatten(1, (key.shape[1], -1)) @ key.mT[:, :, None]).flatten(1, 2) * scaling
        return compute_hybrid_weights(
            logits, weights, key_mask, module.window_log_factor.to(query.dtype), self.key_range
        )

    def count_flops(self, heads: AttentionHeads, num_keys: int) -> tuple[int, int]:
        """Return the operation counts of Hedgehog, plus a query's dot products and weighted sums in the window."""
        key_flops, query_flops = super().count_flops(heads, num_keys)
        return key_flops, query_flops + 2 * self.key_range.count_attended_keys(num_keys) * (
            heads.head_dim + heads.value_dim
        )

    def count_state_values(self, heads: AttentionHeads) -> int:
        """Return the number of values in the state: the sums, and the keys and values in the next window."""
        num_window_values = heads.key * self.key_range.before * (heads.head_dim + heads.value_dim)
        return super().count_state_values(heads) + num_window_values


def compute_hybrid_sums(
    queries: Tensor,
    query_features: Tensor,
    near_keys: NearKeys,
    key_features: Tensor,
    log_factor: Tensor,
    sums: Tensor | None,
    key_range: KeyRange,
    scaling: float,
) -> Tensor:
    """Return each query's weighted sum of values, followed by its sum of weights.

    Args:
        queries, query_features: q [b, k, g, n, d] and phi(q) [b, k, g, n, F].
        near_keys: the keys and values.
        key_features: phi(k) for these keys, [b, k, before + n, F], which is zero for masked keys.
        log_factor: the logarithm of gamma, [k, g].
        sums: the sums over all earlier keys, [b, k, F, d_v + 1], if any.
        key_range: the key range of the window.
        scaling: the factor by which the dot products are multiplied.

    Returns:
        [b, k, g, n, d_v + 1].
    """
    length, window_length = queries.shape[3], key_range.before + key_range.after
    block = min(length, max(MIN_BLOCK_LENGTH, min(MAX_BLOCK_LENGTH, window_length)))
    count = -(-length // block)
    missing = count * block - length
    queries, query_features = (
        nn.functional.pad(tensor, (0, 0, 0, missing)).unflatten(3, (count, block)).transpose(2, 3)
        for tensor in (queries, query_features)
    )  # [b, k, N, g, C, ...]
    values = nn.functional.pad(near_keys.values, (0, 1), value=1.0)
    operands = [near_keys.keys, values, key_features, near_keys.is_token]
    operands = [nn.functional.pad(tensor, (0, 0, 0, missing + key_range.after)) for tensor in operands]
    spans = [tensor.unfold(2, block + window_length, block) for tensor in operands]  # [b, k, N, ..., S]
    is_near, is_far = _create_window_masks(block, key_range, queries.device)
    logits = queries.flatten(3, 4) @ spans[0] * scaling
    logits = logits.unflatten(3, (-1, block)).masked_fill(~(is_near & spans[3][:, :, :, None]), -torch.inf)
    weights = _compute_window_weights(logits, log_factor[:, None, :, None, None])
    feature_weights = (query_features.flatten(3, 4) @ spans[2]).unflatten(3, (-1, block))
    weights = weights + feature_weights.masked_fill(~is_far, 0)
    output = weights.flatten(3, 4) @ spans[1].mT
    if count > 1 or sums is not None:
        others = _sum_features_outside_span(operands[2], operands[1], sums, block, window_length, key_range.is_causal)
        output = output + query_features.flatten(3, 4) @ others
    return output.unflatten(3, (-1, block)).transpose(2, 3).flatten(3, 4)[:, :, :, :length]


def _create_window_masks(block: int, key_range: KeyRange, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two masks [C, S] for a block's span: keys inside a query's window, and other keys that it attends to."""
    window_length = key_range.before + key_range.after
    distance = torch.arange(block + window_length, device=device) - torch.arange(block, device=device)[:, None]
    is_before, is_after = distance < 0, distance > window_length
    return ~(is_before | is_after), is_before if key_range.is_causal else is_before | is_after


def _compute_window_weights(logits: Tensor, log_factor: Tensor) -> Tensor:
    """Return gamma exp(s - c) for logits that are -inf outside the window, where c is the largest logit in a row."""
    max_logit = logits.amax(-1, keepdim=True)
    max_logit = max_logit.clamp_min(torch.finfo(max_logit.dtype).min)  # for an empty window, -inf - -inf would be NaN
    return (logits - max_logit + log_factor).exp()


def _sum_features_outside_span(
    features: Tensor, values: Tensor, sums: Tensor | None, block: int, window_size: int, is_causal: bool
) -> Tensor:
    """Return each block's sums over all keys before its span and, unless attention is causal, all keys after it.

    A span starts at the first position in its block and is `window_size` positions longer than the block. The sums
    have the shape [b, k, N, F, d_v + 1].
    """
    size = features.shape[2] - window_size
    before = _compute_block_sums(features[:, :, :size], values[:, :, :size], block).cumsum(2)
    first = torch.zeros_like(before[:, :, :1]) if sums is None else sums[:, :, None]
    before = torch.cat([first, first + before[:, :, :-1]], dim=2)
    if is_causal:
        return before
    after = (
        _compute_block_sums(features[:, :, window_size:], values[:, :, window_size:], block).flip(2).cumsum(2).flip(2)
    )
    return before + nn.functional.pad(after[:, :, 1:], (0, 0, 0, 0, 0, 1))


def _compute_block_sums(features: Tensor, values: Tensor, block: int) -> Tensor:
    features, values = (tensor.unflatten(2, (-1, block)) for tensor in (features, values))
    return features.mT @ values


def compute_hybrid_weights(
    logits: Tensor, feature_weights: Tensor, key_mask: Tensor | None, log_factor: Tensor, key_range: KeyRange
) -> Tensor:
    """Return the unnormalized weights [b, h, n, m] for all keys.

    Args:
        logits: the scaled dot products, [b, h, n, m].
        feature_weights: phi(q) phi(k) [b, h, n, m], which is zero for masked keys.
        key_mask: a boolean mask [b or 1, 1, m, 1] that is False for padding, or None if there is no padding.
        log_factor: the logarithm of gamma, [h].
        key_range: the key range of the window.
    """
    length, key_length = logits.shape[2:]
    positions = torch.arange(key_length, device=logits.device)
    is_near = key_range.get_allowed_mask(positions[key_length - length :], positions)
    logits = logits.masked_fill(~is_near if key_mask is None else ~(is_near & key_mask.mT), -torch.inf)
    return torch.where(is_near, _compute_window_weights(logits, log_factor[:, None, None]), feature_weights)
