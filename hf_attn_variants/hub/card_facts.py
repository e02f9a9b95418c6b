"""The facts about a variant on its model card; `templates/model_card.md` has the sentences."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..inspection.costs import CostTable, score_parts, values_by_layer
from ..inspection.talking_places import talking_parts
from ..modeling.fields.field_table import FIELDS, PLACES, row_of
from ..modeling.mechanisms.head_sharing import GroupedQuery, HeadSharing, MultiQuery, sharing_of
from ..modeling.mechanisms.kernels.kernel_table import kernel_class
from ..modeling.mechanisms.latents import Latent
from ..modeling.mechanisms.patterns.pattern_table import pattern_class
from ..modeling.mechanisms.talking_heads import TalkingHeads, talks
from ..registration import supported_model_types, variant_config_class
from .card_steps import Step
from .heads_diagram import heads_diagram

__all__ = ["OWN_TAGS", "auto_class", "code", "is_exact", "plain", "variant_facts"]

# The prefixes of the fields of a stack, by that of its key/value heads; cross-attention is in the decoder's.
OF_STACKS = {"num_key_value_heads": ("", "cross_"), "encoder_num_key_value_heads": ("encoder_",)}
OWN_TAGS = (
    "attn-variants",
    "multi-query-attention",
    "grouped-query-attention",
    "multi-head-latent-attention",
    "talking-heads-attention",
)
ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
MARKS = re.compile(r"[\\`*\[\]|$~]|(?<![^\W_])_|_(?![^\W_])|^[#+=-]")


def plain(value: Any) -> str:
    """Return a value as one line of text in which nothing is Markdown or HTML."""
    return MARKS.sub(r"\\\g<0>", " ".join(str(value).split()).translate(ENTITIES))


def code(value: Any) -> str:
    """Return a value as one line of Markdown code, between as many backticks as it takes."""
    text = " ".join(str(value).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def variant_facts(variant: Any, fields: Sequence[str], table: CostTable) -> dict[str, Any]:
    """Return what the template says about a variant, with its "tags" on the Hub and its "papers".

    Args:
        variant: its configuration.
        fields: those of key/value heads and ranks that the model has attentions for, the decoder's first.
        table: its costs.
    """
    kv_fields = [name for name in variant.kv_heads_fields() if name in fields]
    names = [name for name in variant.rank_fields() if name in fields and getattr(variant, name) is not None]
    latents, talking = [_latent(variant, name) for name in names], talking_parts(variant, fields)
    patterns, kernels = (_on_card(variant, fields, fact) for fact in ("pattern", "kernel"))
    shared = {
        count for name in kv_fields for count in values_by_layer(variant, name) if count != variant.query_heads(name)
    }
    ranks = {rank for each in latents for rank in each["ranks"]}
    have_tags = (True, 1 in shared, bool(shared - {1}), bool(latents), bool(talking))
    papers = [MultiQuery.paper] * (1 in shared) + [GroupedQuery.paper] * bool(shared)
    papers += [Latent.paper] * bool(ranks - {variant.hidden_size})
    papers += [Latent.paper_of_input] * (variant.hidden_size in ranks) + [TalkingHeads.paper] * bool(talking)
    of_stacks = [getattr(variant, f"{name.removesuffix(HeadSharing.field)}attention_pattern") for name in kv_fields]
    papers += [pattern_class(name).paper for name in of_stacks if name is not None]
    papers += [kernel_class(each["name"]).paper for each in kernels]
    now, full = table.current, table.rows[0].kv_cache_bytes_per_token or {}
    given_ranks = {getattr(variant, name) for name in variant.rank_fields()} - {None}
    return {
        "stacks": [_stack(variant, name) for name in kv_fields],
        "value_head_dim": variant.value_head_dim,
        "latents": latents,
        "scores": score_parts(variant, kv_fields),
        "talking": talking,
        "patterns": patterns,
        "kernels": kernels,
        "head_counts": {name: _value(variant, name) for name in variant.head_fields(fields)},
        "parameters": now.parameters,
        "attention_parameters": now.attention_parameters,
        "caches": [(site, count, full[site]) for site, count in (now.kv_cache_bytes_per_token or {}).items()],
        "dtype": table.dtype,
        "decodes": "decoder" in now.flops_per_token,
        "has_cache": now.kv_cache_bytes_per_token is not None,
        "shares": bool(given_ranks or HeadSharing.asked_for(variant, row_of(fields[0])[0])),
        "keeps_inputs": variant.hidden_size in given_ranks,
        "talks": talks(variant),
        "diagram": heads_diagram(variant, fields),
        "papers": list(dict.fromkeys(papers)),
        "tags": [tag for tag, is_true in zip(OWN_TAGS, have_tags, strict=True) if is_true],
    }


def is_exact(variant: Any, steps: Sequence[Step]) -> bool:
    """Return whether the last conversion changed no output: it cached inputs instead of keys and values, no more.

    A variant with a pattern or a kernel never counts, because the steps do not name these.
    """
    conversion = [step for step in steps if step["kind"] == "conversion"][-1:]
    changes = [pair for step in conversion for pair in step.get("heads", {}).values() if pair[0] != pair[1]]
    names = [f"{prefix}attention_{kind}" for prefix in PLACES for kind in ("pattern", "kernel")]
    is_plain = not any(getattr(variant, name, None) for name in names)
    return bool(changes) and is_plain and all(pair == [None, variant.hidden_size] for pair in changes)


def auto_class(architecture: str, config: Mapping[str, Any]) -> str:
    """Return the auto class of Transformers that loads a model."""
    name = f"AttnVariant{architecture.removeprefix('AttnVariant')}"
    if config["model_type"] in supported_model_types():
        auto_classes = variant_config_class(config["model_type"]).auto_classes
        # A BART that generates has a masked-language-model class too, and every pretrained model one for pretraining.
        seldom = ("AutoModelForMaskedLM", "AutoModelForTextEncoding", "AutoModelForPreTraining")
        found = [each for each, model in auto_classes.items() if model == name]
        if found:
            return min(found, key=lambda each: seldom.index(each) if each in seldom else -1)
    heads = "MaskedLM|CausalLM|SequenceClassification|TokenClassification|QuestionAnswering"
    match = re.search(rf"For({heads})$", architecture)
    return f"AutoModelFor{match[1]}" if match else "AutoModel"


def _on_card(variant: Any, fields: Sequence[str], fact: str) -> list[dict[str, Any]]:
    """Return `_named` of the fields with a fact that are set in the stacks of `fields`."""
    prefixes = [prefix for heads, each in OF_STACKS.items() if heads in fields for prefix in each]
    rows = [row for row in FIELDS if fact in row.facts and row.card is not None]
    names = [prefix + row.name for prefix in prefixes for row in rows if prefix in row.prefixes]
    return [_named(variant, name) for name in names if getattr(variant, name, None) is not None]


def _stack(variant: Any, name: str) -> dict[str, Any]:
    heads, counts = variant.query_heads(name), set(values_by_layer(variant, name)) or {getattr(variant, name)}
    kind, where = sharing_of(counts, heads).words, "encoder" if name.startswith("encoder_") else "decoder"
    return {"kind": kind, "least": min(counts), "most": max(counts), "heads": heads, "where": where}


def _latent(variant: Any, name: str) -> dict[str, Any]:
    prefix, row = row_of(name)
    layers = values_by_layer(variant, name)
    ranks = sorted({rank for rank in layers if rank is not None})
    place = {"here": PLACES[prefix].here, "token": PLACES[prefix].token, "is_one_for_all": prefix in row.one_for_all}
    return _named(variant, name) | place | {"ranks": ranks, "is_input": ranks == [variant.hidden_size]}


def _named(variant: Any, name: str) -> dict[str, Any]:
    """Return a field's value, the words for it, and in which layers it has one; of a kernel `value` is its name."""
    prefix, row = row_of(name)
    layers = values_by_layer(variant, name)
    having = [layer for layer, value in enumerate(layers) if value is not None]
    facts = {"value": _value(variant, name), "words": row.on_card(prefix), "layers": len(layers), "having": having}
    return facts | {"name": getattr(variant, name)}


def _value(variant: Any, name: str) -> Any:
    """Return a field's value, or the list of those of the layers."""
    values = (variant.per_layer_values or {}).get(name)
    return getattr(variant, name) if values is None else values
