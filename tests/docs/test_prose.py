"""Check the text of the repository with the rules of prose_rules.py; the number of violations may only shrink."""

import json

import prose_rules
import pytest

UPDATE = "Run `python tests/prose_rules.py --write` and commit tests/docs/prose_baseline.json."
MOST_UNCLEAR_NAMES = 20


@pytest.fixture(scope="module")
def counts():
    return prose_rules.count_violations()


@pytest.fixture(scope="module")
def baseline():
    return json.loads(prose_rules.BASELINE.read_text(encoding="utf-8"))


def list_more_violations(counts, others):
    """Return the places where `counts` has more violations than `others`, as texts."""
    return [
        f"{path}: {rule}: {others.get(path, {}).get(rule, 0)} -> {number}"
        for path, rules in counts.items()
        for rule, number in rules.items()
        if number > others.get(path, {}).get(rule, 0)
    ]


def test_text_has_no_new_violations(counts, baseline):
    more = list_more_violations(counts, baseline)
    assert not more, "\n".join(
        [*more, "Reword the text (`python tests/prose_rules.py FILE` lists the violations of a file)."]
    )


def test_prose_baseline_is_up_to_date(counts, baseline):
    fewer = list_more_violations(baseline, counts)
    assert not fewer, "\n".join(["These files have fewer violations than the baseline:", *fewer, UPDATE])


def test_package_has_few_unclear_names(counts, baseline):
    now, before = (sum(rules.get("unclear name", 0) for rules in table.values()) for table in (counts, baseline))
    assert now <= max(MOST_UNCLEAR_NAMES, before)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("passive without an actor", "The user is told about the error."),
        ("refuse", "The command refuses such a file."),
        ("is no", "A missing value is no error."),
        ("alone", "The encoder alone has them."),
        ("in the place of", "A stub is in its place."),
        ("because, not for", "It is slow, for it reads all files."),
        ("as usual", "The other weights stay as they are."),
        ("per", "The cache has 32 numbers a token."),
        ("old word", "The kernel is compiled anew."),
        ("stand or lie", "The file lies in the folder."),
        ("glossary term", "Each host has its own table."),
        ("Transformers' own", "The class calls upstream's own function."),
        ("first word", "Whether the file exists."),
        ("long sentence", "This sentence has " + "many and " * 12 + "too many words."),
    ],
)
def test_prose_rule_finds_its_violation(rule, text, tmp_path, monkeypatch):
    monkeypatch.setattr(prose_rules, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{text}\n\n```\n{text}\n```\n", encoding="utf-8")
    assert [(line, name) for line, name, _ in prose_rules.iterate_violations(page.relative_to(tmp_path))] == [
        (3, rule)
    ]


def test_python_rules_find_names_docstrings_and_comments(tmp_path, monkeypatch):
    monkeypatch.setattr(prose_rules, "ROOT", tmp_path)
    (tmp_path / prose_rules.PACKAGE).mkdir()
    module = tmp_path / prose_rules.PACKAGE / "module.py"
    source = (
        '"""Which file."""\n\n\ndef test_the_file(told):\n    # It is no file.\n    for each in told:\n        pass\n'
    )
    module.write_text(source, encoding="utf-8")
    rules = [(line, rule) for line, rule, _ in prose_rules.iterate_violations(module.relative_to(tmp_path))]
    assert sorted(rules) == [
        (1, "first word"),
        (4, "test name"),
        (4, "unclear name"),
        (5, "is no"),
        (6, "unclear name"),
    ]


def test_repeated_names_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(prose_rules, "ROOT", tmp_path)
    (tmp_path / prose_rules.PACKAGE / "reference").mkdir(parents=True)
    for name in ("one.py", "two.py", "reference/three.py"):
        (tmp_path / prose_rules.PACKAGE / name).write_text("SIZE = 1\nlogger = 2\n_own = 3\n", encoding="utf-8")
    assert prose_rules.find_repeated_names() == {"SIZE": ["one.py", "two.py"]}
