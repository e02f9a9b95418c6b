"""Linear attention, whose weights are products of query and key features.

The features phi(q) and phi(k) have F dimensions per head. The weights are phi(q) phi(k)^T, divided by their row sums.
They are never stored, because the sums over keys and values do not depend on the query:

    S = sum_j phi(k_j) [v_j, 1]^T    [F, d_v + 1], over all keys
    o_i = phi(q_i) S                 d_v weighted sums of values, and the sum of weights by which they are divided

Each step takes n F d_v multiply-adds. In causal attention, S is a running sum over all earlier chunks of C tokens, and
the weights within a chunk are computed explicitly. A decoder only caches S. Sums are computed in float32 or a more
precise dtype. Attention dropout is not applied, because there are no weights to drop.

Source: arXiv 2006.16236. The formulas are implemented in `reference.linear`. The symbols are defined in
`softmax_attention`.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.beams import QueryFolder, count_beams, repeat_for_beams
from ...ops.memory_efficient_attention import disable_autocast
from ...ops.variant_attention import AttentionHeads
from .attention_kernel import AttentionKernel

__all__ = ["FeatureKernel", "TokenwiseKernel"]

# The number of tokens per chunk. The C x C weights within a chunk are about as large as a typical state.
CHUNK_LENGTH = 128


def compute_causal_linear_attention(
    queries: Tensor, features: Tensor, values: Tensor, sums: Tensor | None, group_size: int
) -> tuple[Tensor, Tensor]:
    """Multiply phi(q) by the sum of phi(k) v^T over the keys up to each query.

    Args:
        queries: phi(q) [b, k, g n, F], with n queries for each of the g heads in a group.
        features: phi(k) [b, k, n, F].
        values: [b, k, n, x].
        sums: the sums over earlier keys, [b, k, F, x], or None if there are no earlier keys.
        group_size: g, the number of query heads in a group.

    Returns:
        The outputs [b, k, g n, x] and the total sums [b, k, F, x].
    """
    length, chunk = features.shape[2], min(CHUNK_LENGTH, features.shape[2])
    missing = -length % chunk
    queries = nn.functional.pad(queries.unflatten(2, (group_size, length)), (0, 0, 0, missing))
    features, values = (nn.functional.pad(tensor, (0, 0, 0, missing)) for tensor in (features, values))
    queries = queries.unflatten(3, (-1, chunk)).transpose(2, 3).flatten(3, 4)  # [b, k, chunks, g C, F]
    features, values = (tensor.unflatten(2, (-1, chunk)) for tensor in (features, values))  # [b, k, chunks, C, ...]
    sums_within = features.mT @ values  # [b, k, chunks, F, x]
    sums_after = sums_within.cumsum(2) if sums is None else sums_within.cumsum(2) + sums[:, :, None]
    weights = (queries @ features.mT).unflatten(3, (group_size, chunk)).tril().flatten(3, 4)
    output = weights @ values + queries @ (sums_after - sums_within)
    output = output.unflatten(3, (group_size, chunk)).transpose(2, 3).flatten(3, 4)[:, :, :, :length]
    return output.flatten(2, 3), sums_after[:, :, -1]


class KernelState(NamedTuple):
    """The cached state, which contains sums over keys and, if they were divided, the logarithm of the divisor."""

    sums: Tensor  # [b, k, F, d_v + 1]
    log_scale: Tensor | None = None  # [b, k, 1, 1]


@dataclass(frozen=True)
class FeatureKernel(AttentionKernel):
    """The base class of kernels whose weights are products of query features and key features."""

    @abstractmethod
    def compute_query_features(self, module: Any, query: Tensor, scaling: float) -> Tensor:
        """Return phi(q) [b, h, n, F] for queries [b, h, n, d]. See `attend` for the arguments.

        The result may omit a factor that is the same for a whole row, because the normalization cancels it.
        """

    @abstractmethod
    def compute_key_features(
        self, module: Any, key: Tensor, key_mask: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return phi(k) [b, k, m, F] for keys [b, k, m, d], and the logarithm of the divisor of phi(k).

        phi(k) is zero for masked keys. The logarithm has the shape [b, k, 1, 1], or is None if there is no divisor.
        See `attend` for the arguments.
        """

    @abstractmethod
    def get_num_features(self, head_dim: int) -> int:
        """Return F, the number of features for a head of size d."""

    def compute_divisors(self, sums: Tensor) -> Tensor:
        """Return the values by which outputs are divided, given the sums of their weights."""
        return sums.masked_fill(sums == 0, 1)  # the outputs are zero for queries without keys

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
        """Compute attention from running sums of key features.

        See `AttentionKernel.attend` for the arguments. The state is a `KernelState`.
        """
        exact = torch.promote_types(value.dtype, torch.float32)
        with disable_autocast(query):
            features, log_scale = self.compute_key_features(module, key.to(exact), key_mask, scaling)
            values = nn.functional.pad(value.to(exact), (0, 1), value=1.0)
            if not self.is_causal:
                state = KernelState(features.mT @ values, log_scale)
                return self.attend_to_state(module, query, state, scaling), state
            sums, fold = None, QueryFolder(query, key, 1)
            if state is not None:
                features, sums, log_scale = _rescale_to_common_divisor(features, log_scale, state)
            queries = fold.fold_queries(self.compute_query_features(module, query.to(exact), scaling))
            output, sums = compute_causal_linear_attention(queries, features, values, sums, fold.groups)
            return fold.unfold(self.normalize_outputs(output).to(value.dtype)), KernelState(sums, log_scale)

    def attend_to_state(self, module: Any, query: Tensor, state: KernelState, scaling: float) -> Tensor:
        """Return the outputs [b, n, h, d_v] of queries that attend to all keys in a state.

        See `attend` for the arguments.
        """
        fold = QueryFolder(query, state.sums, count_beams(query, state.sums))
        with disable_autocast(query):
            queries = fold.fold_queries(self.compute_query_features(module, query.to(state.sums.dtype), scaling))
            return fold.unfold(self.normalize_outputs(queries @ state.sums).to(query.dtype))

    def normalize_outputs(self, output: Tensor) -> Tensor:
        """Divide weighted sums of values by the sums of weights, which are in the last column."""
        return output[..., :-1] / self.compute_divisors(output[..., -1:])

    def compute_weights(
        self, module: Any, query: Tensor, key: Tensor, key_mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Return the weights [b, h, n, m]. See `AttentionKernel.compute_weights` for the arguments."""
        exact = torch.promote_types(query.dtype, torch.float32)
        if count_beams(query, key) > 1:
            key = repeat_for_beams(key, query.shape[0])
            key_mask = (
                key_mask if key_mask is None or key_mask.shape[0] == 1 else repeat_for_beams(key_mask, query.shape[0])
            )
        with disable_autocast(query):
            queries = self.compute_query_features(module, query.to(exact), scaling)
            features, _ = self.compute_key_features(module, key.to(exact), key_mask, scaling)
            groups = queries.shape[1] // features.shape[1]
            weights = (queries.unflatten(1, (-1, groups)) @ features.mT[:, :, None]).flatten(1, 2)
            weights = self.replace_window_weights(module, weights, query.to(exact), key.to(exact), key_mask, scaling)
            if self.is_causal:
                weights = weights.tril(weights.shape[3] - weights.shape[2])
            return weights / self.compute_divisors(weights.sum(-1, keepdim=True))

    def replace_window_weights(
        self, module: Any, weights: Tensor, query: Tensor, key: Tensor, key_mask: Tensor | None, scaling: float
    ) -> Tensor:
        """Return the given unnormalized weights [b, h, n, m]. Subclasses may replace the weights inside a window."""
        return weights

    def count_flops(self, heads: AttentionHeads, num_keys: int) -> tuple[int, int]:
        """Return the floating-point operations for one key in one key head, and for one query in one query head.

        Both counts include computing the features. The count for a key also includes updating the sums, and the count
        for a query also includes multiplying by the sums.
        """
        count = 2 * self.get_num_features(heads.head_dim) * (heads.value_dim + 1) + self.count_feature_map_flops(
            heads.head_dim
        )
        return count, count

    def count_feature_map_flops(self, head_dim: int) -> int:
        """Return the number of floating-point operations of the feature map for one token and one head."""
        return 2 * self.features * head_dim

    def count_state_values(self, heads: AttentionHeads) -> int:
        """Return the number of values in a state, which contains sums of values and weights per key/value head."""
        return heads.key * self.get_num_features(heads.head_dim) * (heads.value_dim + 1)


@dataclass(frozen=True)
class TokenwiseKernel(FeatureKernel):
    """A kernel whose feature map is applied to each query and key independently."""

    @abstractmethod
    def compute_features(self, module: Any, states: Tensor, role: str) -> Tensor:
        """Return phi(x) [b, heads, n, F] for states x [b, heads, n, d] with the role "query" or "key"."""

    def compute_query_features(self, module: Any, query: Tensor, scaling: float) -> Tensor:
        """Return phi(q). See `FeatureKernel.compute_query_features` for the arguments."""
        return self.compute_features(module, query, "query")

    def compute_key_features(
        self, module: Any, key: Tensor, key_mask: Tensor | None, scaling: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return phi(k) without a divisor. See `FeatureKernel.compute_key_features` for the arguments."""
        features = self.compute_features(module, key, "key")
        return (features if key_mask is None else features * key_mask), None


def _rescale_to_common_divisor(
    features: Tensor, log_scale: Tensor | None, state: KernelState
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rescale new features and earlier sums to a common divisor, and also return its logarithm.

    The common divisor is the larger of the two original divisors.
    """
    if log_scale is None or state.log_scale is None:
        return features, state.sums, None
    common_log_scale = torch.maximum(log_scale, state.log_scale)
    return (
        features * (log_scale - common_log_scale).exp(),
        state.sums * (state.log_scale - common_log_scale).exp(),
        common_log_scale,
    )
