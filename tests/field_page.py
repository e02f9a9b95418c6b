"""The table of `docs/fields.md`, made from the table of the fields: a row each, with its twins.

`make fields` writes it into the page; `tests/modeling/test_field_table.py` compares the two.
"""

from pathlib import Path

from hf_attn_variants.modeling.fields.field_table import FIELDS, Field

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
KINDS = {int: "a whole number", bool: "`True`, `False`", dict: "`{field: [a value for each layer]}`"}
# What a description says of attentions of any place.
ANY = {"attention": "an attention", "layer": "a layer"}


def table_of(fields: tuple[Field, ...] = FIELDS) -> str:
    """Return the table."""
    return HEADER + "".join(f"| {' | '.join(_cells(row))} |\n" for row in fields)


def table_in(page: str) -> str:
    """Return the table in the text of the page."""
    return page[slice(*_place(page))]


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


def _place(page: str) -> tuple[int, int]:
    start = page.index(HEADER)
    return start, page.index("\n\n", start) + 1


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    start, end = _place(text)
    PAGE.write_text(text[:start] + table_of() + text[end:], encoding="utf-8")
