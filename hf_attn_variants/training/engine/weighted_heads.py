"""Key and value heads that are weighted sums of more heads during training (WGQA, arXiv 2407.10855).

The head of a group is the sum of w_i times head i over the heads in the group. All heads and one weight w_i per key or
value head are trained. The weights start at 1 / g for g heads per group, which is mean pooling.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...inspection.costs import make_variant_config
from ...modeling.ops.variant_attention import AttentionHeads
from .models import iterate_attention_modules

KEY_WEIGHTS, VALUE_WEIGHTS = "key_head_weights", "value_head_weights"


class WeightedHeadsLinear(nn.Module):
    """A projection to key or value heads that combines the heads of each group with learned weights.

    Args:
        linear: The projection of the multi-head model, whose parameters are trained.
        heads: For each role that the projection computes, "query", "key" or "value", the number of heads in the
            multi-head model and in the grouped model. The numbers of query heads are equal.
        rows: The number of rows of the multi-head projection for each of these roles.
    """

    def __init__(self, linear: nn.Linear, heads: dict[str, tuple[int, int]], rows: list[int]):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.heads, self.rows = heads, rows
        for role, (source, target) in heads.items():
            if role != "query":
                weights = torch.full((source,), target / source, dtype=linear.weight.dtype)
                self.register_parameter({"key": KEY_WEIGHTS, "value": VALUE_WEIGHTS}[role], nn.Parameter(weights))

    def combine(self, projection: Tensor) -> Tensor:
        """Return the weight or bias [k d, ...] of the grouped heads for that of all heads [h d, ...]."""
        parts = []
        for part, (role, (source, target)) in zip(projection.split(self.rows), self.heads.items(), strict=True):
            if role != "query":
                weights = getattr(self, f"{role}_head_weights").view(target, -1)  # [k, g]
                groups = part.unflatten(0, (target, source // target, -1))  # [k, g, d, ...]
                part = torch.einsum("kg,kgd...->kd...", weights, groups).flatten(0, 1)
            parts.append(part)
        return torch.cat(parts)

    def forward(self, states: Tensor) -> Tensor:
        """Return the projections [b, n, k d] of the inputs [b, n, D]."""
        bias = None if self.bias is None else self.combine(self.bias)
        return nn.functional.linear(states, self.combine(self.weight), bias)

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        """Return an equivalent linear layer."""
        weight = self.combine(self.weight)
        linear = nn.Linear(weight.shape[1], weight.shape[0], self.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.combine(self.bias))
        return linear


def add_weighted_heads(model: PreTrainedModel, multi_head_model: PreTrainedModel) -> None:
    """Replace the grouped key and value projections of a model by weighted sums of the heads of another model.

    Args:
        model: The grouped model, which is modified in place. Its outputs do not change.
        multi_head_model: The model from which it was converted with mean pooling.

    Raises:
        ValueError: If a projection is not the mean of the heads of the other model, or no projection has fewer heads.
    """
    config, source_config = (make_variant_config(part.config.to_dict()) for part in (model, multi_head_model))
    sources = {path: module for _, path, module in iterate_attention_modules(multi_head_model)}
    replaced = False
    for site, path, module in iterate_attention_modules(model):
        heads = site.get_heads(config, path)
        if path not in sources:
            raise ValueError(f"--multi_head_model must have the attention module `{path}`, like the trained model.")
        source_heads = site.get_heads(source_config, path)
        if heads.key == source_heads.key:
            continue
        for name in dict.fromkeys((site.key, site.value)):
            roles = [role for role, linear in site.projections.items() if linear == name]
            linear: Any = module.get_submodule(name)
            source: Any = sources[path].get_submodule(name)
            weighted = _combine_heads(source, roles, source_heads, heads)
            if weighted is None or not _is_mean_pooled(weighted, linear):
                raise ValueError(
                    "--multi_head_model must be the model from which the trained model was converted with mean "
                    f"pooling, but `{path}.{name}` is not the mean of its heads. Convert the model with --method mean."
                )
            module.set_submodule(name, weighted)
            replaced = True
    if not replaced:
        raise ValueError(
            "--multi_head_model must have more key/value heads than the trained model, but the numbers are equal. "
            "Convert the model to fewer heads first."
        )


def _combine_heads(
    linear: nn.Linear, roles: list[str], source: AttentionHeads, target: AttentionHeads
) -> WeightedHeadsLinear | None:
    """Return the weighted projection, or None if the heads of the source do not form equal groups."""
    counts = {role: (getattr(source, role), getattr(target, role)) for role in roles}
    if any(source_heads % target_heads for source_heads, target_heads in counts.values()):
        return None
    rows = dict(zip(("query", "key", "value"), source.fused_rows, strict=True))
    return WeightedHeadsLinear(linear, counts, [rows[role] for role in roles])


def _is_mean_pooled(weighted: WeightedHeadsLinear, linear: nn.Linear) -> bool:
    """Return whether a projection is the mean of the heads, with a tolerance for checkpoints in half precision."""
    mean = weighted.merge().weight
    return mean.shape == linear.weight.shape and bool((mean - linear.weight).abs().max() <= 0.01 * mean.abs().max())


def merge_weighted_heads(model: PreTrainedModel) -> PreTrainedModel:
    """Replace all weighted projections of a model by equivalent linear layers, and return the model."""
    for path, module in list(model.named_modules()):
        if isinstance(module, WeightedHeadsLinear):
            model.set_submodule(path, module.merge())
    return model
