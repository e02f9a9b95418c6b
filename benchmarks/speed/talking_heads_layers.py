"""Whole attention layers (also of x-transformers, if it is installed) and training steps, for `talking_heads.py`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import torch
from torch import nn

import hf_attn_variants
from benchmarks.speed.talking_heads_peers import make_peers, measure_interleaved, step_of

try:  # an optional package that is used only for comparisons
    from x_transformers.x_transformers import Attention as PeerAttention
except ImportError:
    PeerAttention = None

PEER = "x-transformers talking heads"
PEER_FLASH = "x-transformers flash"
# The models of `measure_training_steps`: name -> talking heads and attention implementation.
MODELS = {
    "MHA": (None, "sdpa"),
    "talking heads": ("both", "sdpa"),
    "talking heads, eager": ("both", "eager"),
}


class Layer(nn.Module):
    """The four projections around one of the attention functions of `make_peers`, without biases."""

    def __init__(self, attend: Callable, heads: int, head_dim: int):
        super().__init__()
        self.attend, self.heads, self.head_dim = attend, heads, head_dim
        size = heads * head_dim
        self.maps = nn.ModuleList([nn.Linear(size, size, bias=False) for _ in range(4)])
        self.logits_proj = nn.Parameter(torch.eye(heads))
        self.weights_proj = nn.Parameter(torch.eye(heads))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs [b, n, h * d] of the layer for hidden states of the same shape."""
        query, key, value = (
            linear(states).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2) for linear in self.maps[:3]
        )
        options = {"scaling": self.head_dim**-0.5, "is_causal": False, "dropout": 0.0, "bias": None}
        options |= {"logits_proj": self.logits_proj, "weights_proj": self.weights_proj}
        return self.maps[3](self.attend(query, key, value, **options).flatten(2))


def get_peer_version() -> str:
    """Return the version of x-transformers, or "absent"."""
    return "absent" if PeerAttention is None else version("x-transformers")


def make_layers(peers: dict[str, Callable], heads: int, head_dim: int) -> dict[str, nn.Module]:
    """Return a whole attention layer for each peer, and two layers of x-transformers if it is installed."""
    layers: dict[str, nn.Module] = {name: Layer(attend, heads, head_dim) for name, attend in peers.items()}
    if PeerAttention is not None:
        size = {"dim": heads * head_dim, "dim_head": head_dim, "heads": heads}
        layers[PEER] = PeerAttention(**size, pre_talking_heads=True, post_talking_heads=True)
        layers[PEER_FLASH] = PeerAttention(**size, flash=True)
    return layers


def measure_layers(peers: list[str], shape: tuple[int, int, int, int], device: str, dtype, rounds: int) -> dict:
    """Return the median milliseconds of whole attention layers.

    Returns:
        {"forward" | "training": {layer: ms}, "usage": {"forward" | "training": {layer: page faults and system time}}}.
    """
    b, h, n, d = shape
    states = torch.randn(b, n, h * d, device=device, dtype=dtype, requires_grad=True)
    layers = make_layers(make_peers(device, peers), h, d)
    for layer in layers.values():
        layer.to(device, dtype)
    times: dict = {"usage": {}}
    for mode in ("forward", "training"):
        steps = {
            name: step_of(
                lambda layer=layer: layer(states),
                [states, *layer.parameters()],
                torch.randn_like(states),
                mode == "training",
            )
            for name, layer in layers.items()
        }
        times[mode], times["usage"][mode] = measure_interleaved(steps, device, rounds)
    return times


def measure_training_steps(
    layers: int, batch: int, length: int, device: str, dtype, rounds: int, **config_fields: int
) -> tuple[dict, dict]:
    """Return the median milliseconds of a training step (forward, backward, AdamW) of BERT-base-shaped encoders.

    The models have no dropout, no language-model head and a small vocabulary, so that the ratio of the times is mostly
    that of the layers. The ratio for a whole 12-layer BERT-base is closer to 1.

    Args:
        layers: the number of layers of each model.
        batch, length: the size of the batch of random tokens, which has no padding.
        device, dtype: the device and the data type of the models.
        rounds: the number of rounds, in each of which the models take turns.
        config_fields: configuration fields that differ from those of BERT-base.

    Returns:
        The times, and the page faults and system time, as `measure_interleaved` returns them.
    """
    ids = torch.randint(5, 1000, (batch, length), device=device)
    steps = {}
    for name, (talking_heads, implementation) in MODELS.items():
        config = hf_attn_variants.AttnVariantBertConfig(
            num_hidden_layers=layers,
            vocab_size=1000,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            talking_heads=talking_heads,
            **config_fields,
        )
        model = hf_attn_variants.AttnVariantBertModel(config, add_pooling_layer=False).to(device, dtype).train()
        model.set_attn_implementation(implementation)
        steps[name] = _run_training_step(model, ids)
    return measure_interleaved(steps, device, rounds)


def _run_training_step(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        model(input_ids=ids).last_hidden_state.square().mean().backward()
        optimizer.step()

    return step
