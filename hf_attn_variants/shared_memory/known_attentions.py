"""Which cross-attentions of upstream's are known: what their parts are called, and what they are called with."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["CROSS_ATTENTIONS", "KNOWN", "CrossAttention", "cross_attentions", "forward_owner", "kind_of"]

# What a decoder's layer of upstream's calls its cross-attention.
CROSS_ATTENTIONS = ("EncDecAttention", "encoder_attn", "cross_attention")


@dataclass(frozen=True)
class CrossAttention:
    """One kind of cross-attention.

    Args:
        query, key, value, output: the names of its linear maps.
        head_dim: the name of the attribute that has d.
        roles: the arguments of its forward that ours reads (`upstream.ROLES`), in the order in which ours has them.
        returns: how many values it returns: the outputs and the weights, with a position bias between where three.
        has_finite_masks: whether a mask is added to a position bias, as the lowest finite number: a query that may
            read nothing then reads all alike, where it gets zeros else.
    """

    query: str
    key: str
    value: str
    output: str
    head_dim: str
    roles: tuple[str, ...] = ("states", "memory", "cache", "mask")
    returns: int = 2
    has_finite_masks: bool = False

    @property
    def attributes(self) -> tuple[str, ...]:
        """What our code reads of such a module."""
        return (
            *(self.query, self.key, self.value, self.output, self.head_dim),
            *("config", "dropout", "layer_idx", "scaling"),
        )


T5_ROLES = ("states", "memory", "cache", "mask", "bias")
T5 = CrossAttention("q", "k", "v", "o", "key_value_proj_dim", roles=T5_ROLES, returns=3, has_finite_masks=True)
UMT5 = CrossAttention("q", "k", "v", "o", "key_value_proj_dim", has_finite_masks=True)
BART = CrossAttention("q_proj", "k_proj", "v_proj", "out_proj", "head_dim")

# By the name of the class that has the forward: of one kind all are the same code under transformers 5.15 and 5.24.
KNOWN: dict[str, CrossAttention] = {
    "LongT5Attention": T5,
    "MT5Attention": T5,
    "SwitchTransformersAttention": T5,
    "T5Attention": T5,
    "UMT5Attention": UMT5,
    "BartAttention": BART,
    "BigBirdPegasusDecoderAttention": BART,
    "BlenderbotAttention": BART,
    "BlenderbotSmallAttention": BART,
    "M2M100Attention": BART,
    "MBartAttention": BART,
    "MarianAttention": BART,
    "NllbMoeAttention": BART,
    "PLBartAttention": BART,
    "PegasusAttention": BART,
    "PegasusXAttention": BART,
    "Speech2TextAttention": BART,
    "WhisperAttention": BART,  # which scales its queries, where the others scale logits
}


def forward_owner(cls: type) -> type:
    """Return the class in whose lines the forward of a module class stands."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def kind_of(cls: type) -> CrossAttention | None:
    """Return what is known of a module class: by whose forward it has; None for one that is not upstream's."""
    owner = forward_owner(cls)
    return KNOWN.get(owner.__name__) if owner.__module__.startswith("transformers.models.") else None


def cross_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and the module of each cross-attention of a model by its name, known or not."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in CROSS_ATTENTIONS:
            yield path, module
