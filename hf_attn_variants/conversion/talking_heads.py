"""Talking heads in a conversion: new ones are added, and those that the source has go on as they are."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.fields.field_table import row_of
from ..modeling.mechanisms.talking_heads import (
    KIND,
    OUTPUT,
    SOFTMAX,
    dynamic_terms,
    projection_std,
    talking_group,
    talking_places,
    talks,
)

__all__ = [
    "check_memory_terms",
    "check_not_talking_already",
    "check_talking_kept",
    "check_talking_used",
    "drawn_projections",
]


def check_not_talking_already(config_class: Any, config: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check that talking heads are not asked for where the source has them already, the same in all places.

    Args:
        config_class: the source's.
        config: its config.json.
        given: the fields to change.

    Raises:
        ValueError: if there are any.
    """
    fields = config_class.talking_fields()
    asked = [name for name in fields if name in given]
    is_by_place = any(config.get(name) is not None for name in fields if row_of(name)[0])
    if config.get(KIND) is not None and asked and not is_by_place:
        raise _talking_already(config[KIND], asked)


def check_talking_kept(source: Any, new: Any, given: Mapping[str, Any]) -> None:
    """Check that the source's talking heads stay as they are, and that new ones change no tensor of the source.

    Raises:
        ValueError: if fields are given for heads that talk already, or heads of values, or of a T5's softmax, change.
    """
    asked = [name for name in source.talking_fields() if name in {*given, *(given.get("per_layer_values") or {})}]
    pairs = {
        (prefix, layer): (source.talking_heads_of(prefix, layer), new.talking_heads_of(prefix, layer))
        for prefix in talking_places(source)
        for layer in range(source.layer_count(prefix + KIND))
    }
    changed = {place for place, (old, now) in pairs.items() if old != now}
    looked_at = [old.kind for place, (old, _) in pairs.items() if place in changed or not changed]
    kinds = [kind for kind in looked_at if kind is not None]
    if asked and kinds:
        raise _talking_already(kinds[0], asked)
    has_bias = hasattr(new, "relative_attention_num_buckets")
    for (prefix, _), (old, now) in pairs.items():
        if now.output != old.output:
            raise ValueError(
                f"a conversion keeps the value heads: the source has {old.output}, the new config "
                f"{now.output} (`{_said(new, prefix, OUTPUT)}`, or "
                f"`{_said(new, prefix, SOFTMAX)}` with P_l alone)."
            )
        if has_bias and prefix != "cross_" and now.softmax != old.softmax:
            raise ValueError(
                f"a conversion keeps the softmax heads of a T5, whose position bias has a column for each: the source "
                f"has {old.softmax}, the new config {now.softmax} (`{_said(new, prefix, SOFTMAX)}`)."
            )


def _talking_already(kind: str, asked: list[str]) -> ValueError:
    names = ", ".join(f"`{name}`" for name in asked)
    return ValueError(
        f"the source has talking heads already ({kind!r}); they are kept as they are: leave {names} out."
    )


def _said(config: Any, prefix: str, name: str) -> str:
    """Return the field that gives a place its value: with the place's prefix, or without one."""
    return talking_group(config, prefix) + name


def check_memory_terms(site: AttentionSite, source: Any, target: Any) -> None:
    """Check that no input-dependent term is made from a latent that changes: another latent is another memory.

    Args:
        site: of attentions whose shared latent gets another rank.
        source, target: the configurations before and after.

    Raises:
        ValueError: naming the terms.
    """
    dynamic = {name for config in (source, target) for name in dynamic_terms(config, site.place_prefix)}
    terms = {name for name in dynamic if name.startswith("m")}
    if terms:
        raise ValueError(
            f"`{site.rank_field}` cannot change where `talking_heads_dynamic` has {' and '.join(sorted(terms))}: such "
            "terms are made from the latent that all layers share, and would be of another one."
        )


def check_talking_used(name: str, given: Mapping[str, Any], config: Any, places: Collection[str]) -> None:
    """Check that each field of talking heads that is given changes an attention.

    Args:
        name: of the model's class.
        given: the fields to change.
        config: the converted model's.
        places: the prefixes of the attentions that it has.

    Raises:
        ValueError: for a field of attentions that it has none of, or without `talking_heads`.
    """
    for field in (field for field in config.talking_fields() if field in given):
        prefix, _ = row_of(field)
        if prefix and prefix not in places:
            raise ValueError(f"`{field}` is of attentions that {name} does not have: leave it out.")
        if field.endswith(KIND):
            if not talks(config):
                raise ValueError(f"nothing to convert: `{field}` is {given[field]!r}, and no heads talk.")
        elif not talks(config, prefix or None):
            raise ValueError(f"`{field}` is of talking heads: give `{prefix}talking_heads` as well.")


def drawn_projections(
    shapes: Mapping[str, tuple[int, ...]], initialization: str, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield new talking-heads parameters, as a new model initialises them (`AttentionVariantMixin.init_projections`).

    Args:
        shapes: of each, by its name in the checkpoint.
        initialization: the attention's `talking_heads_init`.
        generator: draws them.
    """
    for name, shape in shapes.items():
        std = projection_std(name.rsplit(".", 1)[-1], shape, initialization)
        yield name, torch.eye(*shape) if std is None else torch.empty(shape).normal_(0.0, std, generator=generator)
