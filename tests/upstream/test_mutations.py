"""Check that our models behave like a mutated Transformers, or raise an error that names the change.

`python -m pytest -m slow tests/upstream/test_mutations.py` and `python tests/upstream/mutations.py` run all mutants.
"""

import ast

import pytest
from upstream import mutations, rewriting, rewriting_general
from upstream.architecture_sources import (
    ARCHITECTURES,
    find_role_classes,
    get_classes,
    get_method,
    get_parameter_names,
    iterate_calls,
    parse_modeling_file,
)

CASES, SEED = 24, 0
# Changes of meaning under the same names, which signatures do not show.
UNSEEN = {"meaning"}


def list_silent_mutations(rows):
    return [mutations.format_row(row) for row in rows if row["outcome"] in mutations.BAD and row["kind"] not in UNSEEN]


@pytest.fixture(scope="module")
def rows():
    """The outcomes of a sample of mutants and of unchanged versions, which take less than a minute on one core."""
    every = mutations.list_mutations()
    nothing = [item for item in every if item["kind"] == "nothing"]
    others = [item for item in every if item["kind"] not in {"nothing", *UNSEEN}]
    return mutations.run(nothing + mutations.sample(others, SEED, CASES))


@pytest.fixture
def sampled(rows):
    return [row for row in rows if row["kind"] != "nothing"]


@pytest.mark.thorough
def test_unchanged_transformers_gives_equal_outputs(rows):
    unchanged = [row for row in rows if row["kind"] == "nothing"]
    assert [row["architecture"] for row in unchanged] == list(ARCHITECTURES)
    assert not [mutations.format_row(row) for row in unchanged if row["outcome"] != "equal"]


@pytest.mark.thorough
def test_sampled_mutants_give_equal_outputs_or_a_named_error(sampled):
    assert not list_silent_mutations(sampled), "\n".join(list_silent_mutations(sampled))


def test_sample_covers_every_architecture_and_kind(sampled):
    kinds = {item["kind"] for item in mutations.list_mutations()} - {"nothing", *UNSEEN}
    assert {row["architecture"] for row in sampled} == set(ARCHITECTURES) and {row["kind"] for row in sampled} == kinds
    assert sum(row["outcome"] == "invalid" for row in sampled) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_mutants_give_equal_outputs_or_a_named_error(architecture):
    rows = mutations.run(mutations.list_mutations([architecture]))
    assert not list_silent_mutations(rows), "\n".join(list_silent_mutations(rows))
    invalid = [mutations.format_row(row) for row in rows if row["outcome"] == "invalid"]
    assert len(invalid) <= len(rows) // 20, "\n".join(invalid)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_has_enough_mutations(architecture):
    tree = parse_modeling_file(architecture)
    for kind in ("attention", "embeddings" if architecture in BERTS else "stack"):
        names = find_role_classes(tree, kind)
        assert names and list(iterate_calls(tree, set(names))), kind
    titles = [item["title"] for item in mutations.iterate_architecture_mutations(architecture)]
    assert len(titles) == len(set(titles)) and len(titles) > 30


BERTS = ("bert", "albert", "roberta", "distilbert", "electra", "modernbert", "nomic_bert")

SMALL = """
class Attention(nn.Module):
    def __init__(self):
        self.q, self.k, self.v = nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, states, mask=None, bias=None, **kwargs):
        return states * mask, self.q(bias)

class Layer(nn.Module):
    def __init__(self):
        self.attention = Attention()

    def forward(self, states, mask=None):
        found, _ = self.attention(states, mask, bias=1, other=2)
        return found
"""


def apply_change(op, **arguments):
    tree = ast.parse(SMALL)
    rewriting.ARCHITECTURE_OPS[op](tree, names=["Attention"], method_name="forward", **arguments)
    return ast.unparse(ast.fix_missing_locations(tree))


def test_rename_parameter_changes_uses_and_calls():
    text = apply_change("rename_parameter", old="bias", new="shift")
    assert "def forward(self, states, mask=None, shift=None, **kwargs)" in text and "self.q(shift)" in text
    assert "self.attention(states, mask, shift=1, other=2)" in text


def test_drop_parameter_removes_the_argument_of_calls():
    text = apply_change("drop_parameter", old="mask")
    assert "def forward(self, states, bias=None, **kwargs):\n        mask = None" in text
    assert "self.attention(states, bias=1, other=2)" in text


def test_reorder_swaps_parameters_and_arguments():
    text = apply_change("reorder", old="mask", new="bias", by_place=True)
    assert "def forward(self, states, bias=None, mask=None, **kwargs)" in text
    assert "self.attention(states, 1, mask, other=2)" in text
    assert "self.attention(states, mask=mask, bias=1, other=2)" in apply_change(
        "reorder", old="mask", new="bias", by_place=False
    )


def test_require_adds_an_argument_to_calls():
    text = apply_change("require", new="more", uses=False)
    assert "def forward(self, states, more, mask=None, bias=None, **kwargs)" in text
    assert "self.attention(states, more=1.25, mask=mask, bias=1, other=2)" in text


def test_change_tuple_is_reverted_by_callers():
    assert "return (states * mask, self.q(bias), None)" in apply_change("change_tuple", how="more")
    assert "(lambda each: each[:-1])(self.attention(states, mask, bias=1, other=2))" in apply_change(
        "change_tuple", how="more"
    )


def test_rename_cache_member_changes_only_caches():
    tree = ast.parse("class DynamicCache:\n    def update(self): self.update()\ncache.update()\nnames.update()\n")
    rewriting_general.rename_cache_member(tree, "update", "put")
    assert ast.unparse(tree).split("\n")[1:] == [
        "",
        "    def put(self):",
        "        self.put()",
        "cache.put()",
        "names.update()",
    ]


def test_method_finds_a_method_of_a_modeling_file():
    result = get_classes(ast.parse(SMALL))
    assert get_parameter_names(get_method(result["Attention"], "forward")) == ["states", "mask", "bias"]
    assert get_method(result["Layer"], "update") is None
