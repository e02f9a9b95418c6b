"""The page `docs/fields.md`: the text of `field_page.md` with the table of the fields and of their conflicts.

`make fields` writes the page, and `tests/modeling/test_field_table.py` checks that it is up to date.
"""

from pathlib import Path

from hf_attn_variants.modeling.fields.composition import UNSUPPORTED_PAIRS, UNSUPPORTED_WITH_ROTARY
from hf_attn_variants.modeling.fields.field_table import FIELD_TEXTS, VARIANT_FIELDS, VariantField
from hf_attn_variants.modeling.mechanisms.mechanism import Mechanism
from hf_attn_variants.modeling.mechanisms.sinusoidal_positions import RelativePositionBias

PAGE = Path(__file__).resolve().parents[1] / "docs/fields.md"
TEXT = Path(__file__).with_suffix(".md")
HEADER = "| Field | Meaning | Values | Default | Per layer | See |\n| --- | --- | --- | --- | --- | --- |\n"
# The page about a field, by the name of the field or by the first of its tags that is a key.
MORE = {
    "per_layer_values": "[unequal layers](latents.md#unequal-layers)",
    "position_embedding_type": "[positions](#positions)",
    "score_function": "[scores](#scores)",
    "num_key_value_heads": "[tour](tour.md)",
    "value_head_dim": "[size of value heads](#size-of-value-heads)",
    "latent": "[latents](latents.md)",
    "talking": "[talking heads](talking_heads.md)",
    "pattern": "[windows and patterns](sparse.md)",
    "kernel": "[linear attention](linear.md)",
    "extension": "[gates and sinks](gates_and_sinks.md)",
}
PAIRS = "| In one attention module | Not with |\n| --- | --- |\n"
KINDS = {
    int: "integer",
    bool: "`True`, `False`",
    dict: "`{field: [one value per layer]}`",
    tuple: "`[number, number]`",
}
# The values of placeholders in the descriptions of fields that apply to any attention module.
ANY = {"attention": "an attention module", "layer": "a layer"}


def make_page() -> str:
    """Return the text of the page."""
    text = TEXT.read_text(encoding="utf-8")
    return "<!-- generated -->\n" + text.replace("{fields}\n", format_field_table()).replace(
        "{pairs}\n", format_pair_table()
    )


def format_field_table(fields: tuple[VariantField, ...] = VARIANT_FIELDS) -> str:
    """Return the table of the fields as Markdown."""
    return HEADER + "".join(f"| {' | '.join(_make_cells(row))} |\n" for row in fields)


def format_pair_table() -> str:
    """Return the table of the mechanisms that cannot be combined."""
    pairs = [(_format_setting(row.first), _format_setting(row.second)) for row in UNSUPPORTED_PAIRS]
    pairs += [
        (_format_setting(mechanism), "the rotary positions of ModernBERT and NomicBERT")
        for mechanism, _ in UNSUPPORTED_WITH_ROTARY
    ]
    return PAIRS + "".join(f"| {first} | {second} |\n" for first, second in pairs)


def _format_setting(mechanism: type[Mechanism]) -> str:
    """Return the configuration setting that selects a mechanism."""
    if mechanism is RelativePositionBias:
        return "the distance bias of T5 and UMT5"
    name = getattr(mechanism, "name", None)
    return f"`{mechanism.field}`" if name is None else f'`{mechanism.field}="{name}"`'


def _make_cells(row: VariantField) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in row.names)
    values = ", ".join(f'`"{choice}"`' for choice in row.choices) or KINDS[row.kind]
    values = f"any of {values}" if row.kind is list else values
    default = {None: "none", (): "none"}.get(row.default, f"`{row.default!r}`".replace("'", '"'))
    model_wide_names = [f"`{prefix}{row.name}`" for prefix in row.model_wide_prefixes]
    by_layer = "yes" if "by_layer" in row.tags else ""
    by_layer += f", except {', '.join(model_wide_names)}" if model_wide_names else ""
    more = next(MORE[key] for key in (row.name, *row.tags) if key in MORE)
    return names, FIELD_TEXTS[row.name].help.format(**ANY), values, default, by_layer, more


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
