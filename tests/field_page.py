"""The tables of `docs/fields.md`: the fields, a row each with its twins, and what does not go together.

`make fields` writes them into the page; `tests/modeling/test_field_table.py` compares them.
"""

from pathlib import Path

from hf_attn_variants.modeling.fields.composition import REFUSED
from hf_attn_variants.modeling.fields.field_table import FIELDS, Field
from hf_attn_variants.modeling.mechanisms.mechanism import Mechanism
from hf_attn_variants.modeling.mechanisms.sinusoidal_positions import DistanceBias

PAGE = Path(__file__).resolve().parents[1] / "docs/fields.md"
HEADER = "| field | what it is | values | not given | by layer | more |\n| --- | --- | --- | --- | --- | --- |\n"
# What a row's page is, by the first of its facts that is here, or by its name.
MORE = {
    "per_layer_values": "[unequal layers](latents.md#unequal-layers)",
    "position_embedding_type": "[positions](#positions)",
    "score_function": "[scores](#scores)",
    "num_key_value_heads": "[tour](tour.md)",
    "value_head_dim": "[size of values](#the-size-of-values)",
    "latent": "[latents](latents.md)",
    "talking": "[talking heads](talking_heads.md)",
    "pattern": "[windows and blocks](sparse.md)",
    "kernel": "[linear attention](linear.md)",
}
PAIRS = "| in one attention | not beside |\n| --- | --- |\n"
KINDS = {int: "a whole number", bool: "`True`, `False`", dict: "`{field: [a value for each layer]}`"}
# What a description says of attentions of any place.
ANY = {"attention": "an attention", "layer": "a layer"}


def table_of(fields: tuple[Field, ...] = FIELDS) -> str:
    """Return the table."""
    return HEADER + "".join(f"| {' | '.join(_cells(row))} |\n" for row in fields)


def pairs_of() -> str:
    """Return the table of the mechanisms that do not go together."""
    return PAIRS + "".join(f"| {_asked(row.one)} | {_asked(row.other)} |\n" for row in REFUSED)


def table_in(page: str, header: str = HEADER) -> str:
    """Return a table in the text of the page."""
    return page[slice(*_place(page, header))]


def _asked(mechanism: type[Mechanism]) -> str:
    """Return what a configuration says that asks for a mechanism."""
    if mechanism is DistanceBias:
        return "the bias by distance of T5 and UMT5"
    name = getattr(mechanism, "name", None)
    return f"`{mechanism.field}`" if name is None else f'`{mechanism.field}="{name}"`'


def _cells(row: Field) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in row.names)
    values = ", ".join(f'`"{choice}"`' for choice in row.choices) or KINDS[row.kind]
    values = f"any of {values}" if row.kind is list else values
    default = {None: "none", (): "none"}.get(row.default, f"`{row.default!r}`".replace("'", '"'))
    whole = [f"`{prefix}{row.name}`" for prefix in row.one_for_all]
    by_layer = "yes" if "by_layer" in row.facts else ""
    by_layer += f", but {', '.join(whole)}" if whole else ""
    more = next(MORE[key] for key in (row.name, *row.facts) if key in MORE)
    return names, row.help.format(**ANY), values, default, by_layer, more


def _place(page: str, header: str) -> tuple[int, int]:
    start = page.index(header)
    return start, page.index("\n\n", start) + 1


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for header, table in ((HEADER, table_of()), (PAIRS, pairs_of())):
        start, end = _place(text, header)
        text = text[:start] + table + text[end:]
    PAGE.write_text(text, encoding="utf-8")
