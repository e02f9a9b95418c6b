"""What the attention of a model costs, counted from its shapes."""

from ...modeling.variant_mixins import AttnVariantModelMixin

__all__ = ["attention_projection_flops"]


def attention_projection_flops(model: AttnVariantModelMixin) -> int:
    """Return the floating-point operations a token that the query, key, value and output maps of all layers take.

    Two (a multiplication and an addition) for each weight; what depends on the sequence length is not in it.

    Args:
        model: a variant model; the multi-head one counts as upstream's does.
    """
    return sum(
        2 * model.module_runs(model.config, path) * module.get_submodule(linear).weight.numel()
        for site, path, module in model.named_attentions()
        for linear in site.projections.values()
    )
