"""Check configurations with one or two changed fields next to unchanged weights: equal outputs or an error.

The cases are seeded: 130 by default, ten per architecture, and 520 with `-m slow`.
"""

import json
import math
import os
import random
import shutil

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from relatives import RELATIVES
from security.test_hostile_files import limit_time_and_memory

import hf_attn_variants
from hf_attn_variants.conversion import convert_checkpoint

ALL_ARCHITECTURES = {row.name: row for row in (*ARCHITECTURES, *RELATIVES)}
# Values that other tools write, and mistakes of manual edits.
OTHERS = (None, True, False, -1, 0, 1, 2, 3, 7, 0.5, -0.25, 1e-3, 10**12, math.nan, "", "x", "12", [], [1], {}, "gelu")
ACTIVATIONS = ("relu", "gelu", "gelu_new", "silu", "gated-gelu", "tanh", "nothing")
DELETED = object()
HEADS = 12  # all heads of each tiny model, so the conversion does not change its attention
COUNTS = pytest.mark.parametrize("count", [10, pytest.param(40, marks=pytest.mark.slow)])


def edit_config(config, draw):
    """Return a configuration with one or two changed fields, and the changes."""
    changes = {}
    for name in draw.sample(sorted(config), draw.choice((1, 1, 2))):
        value = config[name]
        near = [DELETED, *OTHERS]
        if isinstance(value, bool):
            near += [not value] * 20
        elif isinstance(value, int):
            near += [value + 1, value - 1, 2 * value, value // 2, float(value), str(value)] * 3
        elif isinstance(value, float):
            near += [2 * value, value / 2, -value, str(value)] * 4
        elif isinstance(value, str):
            near += [*ACTIVATIONS, value.upper(), [value]]
        changes[name] = draw.choice(near)
    undeleted = {name: value for name, value in config.items() if changes.get(name) is not DELETED}
    return undeleted | {name: value for name, value in changes.items() if value is not DELETED}, changes


def compute_output(model, batch):
    with torch.no_grad():
        result = model(**batch)
    return next(value for value in result.values() if isinstance(value, torch.Tensor) and value.is_floating_point())


@pytest.fixture(scope="module", params=ALL_ARCHITECTURES)
def source(request, tmp_path_factory):
    """An architecture, the folder of its tiny checkpoint, its saved configuration and a batch."""
    architecture = ALL_ARCHITECTURES[request.param]
    head = next(iter(architecture.heads))
    folder = tmp_path_factory.mktemp("fuzzed") / architecture.name
    architecture.make_upstream_model(head).save_pretrained(folder)
    return (
        getattr(transformers, head),
        folder,
        json.loads((folder / "config.json").read_text()),
        architecture.make_batch(head),
    )


@pytest.mark.thorough
@COUNTS
def test_fuzzed_configuration_converts_with_equal_outputs_or_raises(source, count, tmp_path):
    upstream, folder, config, batch = source
    draw = random.Random(f"{upstream.__name__} {count}")
    ends = {"equal": 0, "refused": 0, "merged": 0, "upstream fails": 0}
    for number in range(count):
        copy, out = tmp_path / f"source-{number}", tmp_path / f"out-{number}"
        shutil.copytree(folder, copy, copy_function=os.link)
        (copy / "config.json").unlink()
        values, changes = edit_config(config, draw)
        (copy / "config.json").write_text(json.dumps(values))
        shown = {name: "deleted" if value is DELETED else value for name, value in changes.items()}
        with limit_time_and_memory():
            ends[describe_outcome(upstream, copy, out, batch, shown)] += 1
    print(ends)
    assert ends["equal"], ends


def describe_outcome(upstream, folder, out, batch, changes):
    try:
        report = convert_checkpoint(folder, out, HEADS)
    except (ValueError, OSError) as error:
        assert str(error).strip() and not out.exists(), changes
        print(f"{changes}: {str(error).replace(str(folder), '')}")
        return "refused"
    if report.is_reduced():  # the edited configuration has more heads of the same total size
        return "merged"
    try:
        model, loading = upstream.from_pretrained(folder, output_loading_info=True)
        expected = compute_output(model.eval(), batch)
    except Exception:
        return "upstream fails"
    assert not loading["missing_keys"] and not loading["mismatched_keys"], f"{changes}: some weights were not loaded"
    actual = compute_output(
        getattr(hf_attn_variants, f"AttnVariant{upstream.__name__}").from_pretrained(out).eval(), batch
    )
    torch.testing.assert_close(
        actual, expected, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda text: f"{changes}: {text}"
    )
    return "equal"
