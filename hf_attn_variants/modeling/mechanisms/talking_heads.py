"""The projections of talking heads: names, shapes, and what they begin as (arXiv 2003.02436, section 3)."""

from ..ops.variant_attention import AttentionHeads

__all__ = ["PROJECTIONS", "PROJECTION_KEYS", "projection_shapes", "projection_std"]

# P_l and P_w. Weight decay would pull them away from the identity, towards heads that do not attend at all.
PROJECTIONS = ("logits_proj", "weights_proj")

# The talking-heads parameters among a model's keys.
PROJECTION_KEYS = r"\.(logits|weights|[xm]2[lw])_proj$"


def projection_shapes(heads: AttentionHeads, query_dim: int, memory_dim: int) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each talking-heads parameter of an attention.

    Args:
        heads: the attention's head counts, and how they talk.
        query_dim: the size of the inputs that queries are made from.
        memory_dim: the size of the inputs that keys and values are made from.
    """
    mixed = {"logits": (heads.query, heads.softmax), "weights": (heads.softmax, heads.output)}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}_proj": shape for name, shape in mixed.items() if heads.talking in (name, "both")
    }
    for name in heads.dynamic:
        input_dim = query_dim if name.startswith("x") else memory_dim
        shapes[f"{name}_proj"] = (input_dim, *mixed["logits" if name.endswith("l") else "weights"])
    return shapes


def projection_std(name: str, shape: tuple[int, ...], initialization: str) -> float | None:
    """Return the standard deviation that a new talking-heads parameter is drawn with; None = it is the identity.

    Fan-in scaling, as in the authors' code. A dynamic projection [input size, h_in, h_out], which is added to another
    one, begins as zeros beside an identity, so that no output changes; else it is drawn at variance scale 0.01 / h_in,
    for larger values made training hard.

    Args:
        name: the parameter's name.
        shape: its shape.
        initialization: the attention's `talking_heads_init`.
    """
    if name in PROJECTIONS:
        return None if initialization == "identity" else shape[0] ** -0.5
    return 0.0 if initialization == "identity" else (1e-2 / shape[1] / shape[0]) ** 0.5
