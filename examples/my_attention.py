"""Two mechanisms: scores that are cosine similarities, and a kernel with squared features."""

import torch
from torch import nn
from transformers import initialization as init

from hf_attn_variants import ScoreFunction, TokenwiseKernel, register_kernel, register_score


@register_score
class CosineScore(ScoreFunction):
    """Scaled cosine similarities of queries and keys, with one learned scale per query head."""

    name = "cosine"
    paper = ("Query-key normalization for transformers", "2010.04245")

    def __init__(self, heads, key_heads, head_dim, like):
        super().__init__(heads, key_heads, head_dim, like)
        self.scale = nn.Parameter(torch.empty(heads, 1, 1, dtype=like.dtype, device=like.device))

    def init_variant_parameters(self):
        init.constant_(self.scale, 10.0)

    def forward(self, query, key):  # [b, h, n, d], [b, k, m, d]
        query, key = nn.functional.normalize(query, dim=-1), nn.functional.normalize(key, dim=-1)
        return self.scale * query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT


@register_kernel
class SquareKernel(TokenwiseKernel):
    """The kernel with the features phi(x) = relu(x) ^ 2."""

    name = "square"
    paper = ("Primer: searching for efficient transformers", "2109.08668")

    def compute_features(self, module, states, role):
        return states.relu().square()

    def get_num_features(self, head_dim):
        return head_dim
