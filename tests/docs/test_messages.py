"""Check the pattern of error and warning messages with message_rules.py; the number of violations may only shrink."""

import ast
import json

import message_rules
import pytest
from docs.test_prose import list_more_violations

UPDATE = "Run `python tests/message_rules.py --write` and commit tests/docs/message_baseline.json."


def test_messages_have_no_new_violations():
    counts, baseline = message_rules.count_violations(), json.loads(message_rules.BASELINE.read_text(encoding="utf-8"))
    new, fixed = list_more_violations(counts, baseline), list_more_violations(baseline, counts)
    assert not new, "\n".join([*new, "`python tests/message_rules.py` lists all violations of the pattern."])
    assert not fixed, "\n".join(["These files have fewer violations than the baseline:", *fixed, UPDATE])


@pytest.mark.parametrize(
    ("code", "rules"),
    [
        ("raise ValueError(f'`size` must be positive, got {size}.')", []),
        ("raise ValueError(f'{path}: The size must be positive, got {size}')", []),
        ("raise ValueError('the size must be positive.')", ["start"]),
        ("raise ValueError('Give a positive size')", ["end"]),
        ("raise ValueError('The size is negative.')", ["no rule or advice"]),
        ("raise OSError('The file is damaged.')", []),
        ("raise OSError('The file lies in another folder.')", ["stand or lie"]),
        ("raise ValueError('--size must be given:\\n    convert --size 2')", []),
        ("warnings.warn('The host has no size.')", ["forbidden term"]),
        ("logger.warning('%s: %d rows are left out', path, rows)", ["end"]),
        ("logger.warning('This is a ' + f'{kind}: ' + 'left out.')", []),
        ("def load(path):\n    raise ValueError('path must be a folder.')", []),
    ],
)
def test_message_rules_find_violations(code, rules):
    result = [rule for _, rule, _ in message_rules.iterate_violations(code)]
    assert [rule for rule in result if rule != "glossary term"] == rules


def test_messages_of_all_kinds_are_read():
    code = "raise errors.LoadError(f'a {b} ' 'c')\nlogger.warning_once('d e')\nraise ValueError(text)\n"
    texts = [(kind, text) for _, kind, text in message_rules.iterate_messages(ast.parse(code))]
    assert texts == [("LoadError", "a {} c"), ("warning", "d e")]
