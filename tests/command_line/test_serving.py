"""Check `attn-variants benchmark --serving`: the timed engines, the advice, and the errors."""

import importlib.util
import itertools
import json
import platform
import re
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from architectures import BERT, T5
from relatives import RELATIVES, WHISPER
from torch._dynamo.utils import counters

from hf_attn_variants import cli
from hf_attn_variants.serving import measure, peak_memory
from hf_attn_variants.serving.engines import (
    Engine,
    Workload,
    build_model,
    list_engines,
    make_torch_call,
    make_workload_inputs,
)
from hf_attn_variants.serving.measure import ServingRow, ServingTable, measure_serving, recommend_engine

MARIAN = next(architecture for architecture in RELATIVES if architecture.name == "marian")
HEADS = {"t5": "T5ForConditionalGeneration", "marian": "MarianMTModel", "whisper": "WhisperForConditionalGeneration"}
GENERATE = (T5, MARIAN, WHISPER)
HAS_CTRANSLATE2 = importlib.util.find_spec("ctranslate2") is not None
needs_ctranslate2 = pytest.mark.skipif(not HAS_CTRANSLATE2, reason="CTranslate2 is not installed")
NO = lambda fields: False  # noqa: E731 (reports that CTranslate2 is missing)
SMALL = {"batch_size": 2, "rounds": 1, "max_new_tokens": 3, "peak_memory": False}


def make_config(architecture):
    head = HEADS.get(architecture.name, "BertModel")
    return architecture.make_upstream_model(head).config.to_dict() | {"architectures": [head]}


@pytest.fixture
def serve(tmp_path, capsys):
    """A function that times a small T5 with few tokens like a user, and returns what it prints."""
    T5.make_upstream_model(HEADS["t5"]).save_pretrained(tmp_path)

    def call(*flags, batch_size=1, new_tokens=2, status=0):
        argv = ["benchmark", tmp_path, "--serving", "--batch_size", batch_size, "--length", 8, "--rounds", 1]
        assert cli.main([str(item) for item in [*argv, "--max_new_tokens", new_tokens, *flags]]) == status
        return capsys.readouterr()

    return call


def get_engine_names(table):
    return [row.engine.name for row in table.rows]


@pytest.mark.thorough
@pytest.mark.usefixtures("small_maps")
@pytest.mark.parametrize("architecture", GENERATE, ids=lambda row: row.name)
def test_each_engine_generates_the_requested_number_of_tokens(architecture, monkeypatch):
    counted = []

    def spy(model, *arguments):
        serve = make_torch_call(model, *arguments)
        return lambda tokens: (counted.append((type(model).__name__, tokens)), serve(tokens))

    monkeypatch.setattr(measure, "make_torch_call", spy)
    table = measure_serving(make_config(architecture), length=None if architecture is WHISPER else 8, **SMALL)
    engine_names = ["transformers", "share_memory", "int8", "share_memory, int8"]
    actual = get_engine_names(table)
    assert actual[:4] == engine_names and [name for name in actual if name.endswith(", int8")]
    assert {"CTranslate2", "CTranslate2, int8"} <= {*actual} or not HAS_CTRANSLATE2
    assert {tokens for _, tokens in counted} == {3, 1}
    upstream = HEADS[architecture.name]
    assert {name for name, _ in counted} == {upstream, f"AttnVariant{upstream}"}
    for row in table.rows:
        assert row.tokens_per_second == pytest.approx(2 * 3 / row.milliseconds * 1e3)
        assert row.speedup == pytest.approx(table.rows[0].milliseconds / row.milliseconds)
        assert 0 < row.first_milliseconds


@pytest.mark.usefixtures("small_maps")
def test_engines_with_equal_weights_generate_equal_tokens():
    config, load = make_config(T5), Workload(2, 8, 5, 3)
    written = {}
    for engine in list_engines(config, [], NO):
        model, inputs = build_model(config, engine), make_workload_inputs(config, load)
        assert torch.equal(inputs["input_ids"], make_workload_inputs(config, load)["input_ids"])
        written[engine.name] = model.generate(**inputs, num_beams=3, max_new_tokens=5)
    assert torch.equal(written["transformers"], written["share_memory"])
    assert all(item.shape == (2, 6) for item in written.values())  # no text ends early
    make_torch_call(model, inputs, load)(2)


@pytest.mark.thorough
@pytest.mark.usefixtures("small_maps")
@pytest.mark.parametrize("architecture", GENERATE, ids=lambda row: row.name)
def test_compiled_engines_generate_equal_tokens(architecture, monkeypatch):
    # The captured graph runs without compilation, so no C++ compiler is needed.
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
    config, load = make_config(architecture), Workload(2, 20 if architecture is WHISPER else 8, 5, 1)
    actual = list_engines(config, [], NO, compiles=True)
    assert [item.name for item in actual if item.compiled] == [
        "transformers, compiled",
        "share_memory, compiled",
        "int8, compiled",
        "share_memory, int8, compiled",
    ]
    inputs, graphs = make_workload_inputs(config, load), 0
    for engine in (item for item in actual if item.compiled):
        torch._dynamo.reset()
        counters.clear()
        model, plain = (build_model(config, replace(engine, compiled=is_compiled)) for is_compiled in (True, False))
        expected = plain.generate(**inputs, max_new_tokens=5, do_sample=False)
        actual = model.generate(**inputs, max_new_tokens=5, do_sample=False, cache_implementation="static")
        assert torch.equal(actual, expected), engine.name
        make_torch_call(model, inputs, load, compiled=True)(5)
        assert not counters["graph_break"] and 1 <= counters["stats"]["unique_graphs"] <= 4, engine.name
        graphs += 1
    assert graphs == 4


@pytest.mark.slow
def test_serving_command_times_compiled_engines(serve):
    rows = {row["engine"]["name"]: row for row in json.loads(serve("--compile", "--json", new_tokens=3).out)["rows"]}
    assert rows["share_memory, compiled"]["peak_bytes"] > 2**24


@needs_ctranslate2
def test_ctranslate2_generates_equal_tokens_and_lengths(tmp_path):
    """Check greedy decoding with the results that the timing discards."""
    import ctranslate2

    from hf_attn_variants.serving.peak_memory import write_ctranslate2_folder

    config, load = make_config(T5), Workload(2, 8, 5, 1)
    [engine] = [item for item in list_engines(config, [], lambda fields: True) if item.ctranslate2 and not item.int8]
    model, inputs = build_model(config, engine), make_workload_inputs(config, load)
    expected = model.generate(**inputs, max_new_tokens=5, suppress_tokens=[model.config.eos_token_id])[:, 1:]
    exported = write_ctranslate2_folder(config, model, inputs, tmp_path, False)
    rows = [[f"<{number}>" for number in row] for row in exported.inputs]
    translator = ctranslate2.Translator(str(tmp_path))
    results = translator.translate_batch(rows, beam_size=1, min_decoding_length=5, max_decoding_length=5)
    assert [item.hypotheses[0] for item in results] == [[f"<{number}>" for number in row] for row in expected.tolist()]


@needs_ctranslate2
@pytest.mark.usefixtures("small_maps")
@pytest.mark.parametrize("architecture", GENERATE, ids=lambda row: row.name)
def test_latents_are_multiplied_in_for_ctranslate2(architecture):
    config = architecture.make_config(cross_kv_lora_rank=4, per_layer_values={"kv_lora_rank": [None, 2]})
    head = f"AttnVariant{HEADS[architecture.name]}"
    table = measure_serving(
        config.to_dict() | {"architectures": [head]}, length=None if architecture is WHISPER else 8, **SMALL
    )
    source_name = get_engine_names(table)[0]
    assert source_name.startswith("MHA + ") and source_name.count("latent") == 2
    assert get_engine_names(table) == [
        source_name,
        *(f"{source_name}, {suffix}" for suffix in ("int8", "CTranslate2", "CTranslate2, int8")),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", GENERATE, ids=lambda row: row.name)
def test_each_engine_reports_its_peak_memory(architecture, tmp_path):
    table = measure_serving(
        make_config(architecture), length=None if architecture is WHISPER else 8, **SMALL | {"peak_memory": True}
    )
    assert all(2**24 < row.peak_bytes < 2**33 for row in table.rows)
    # The process with CTranslate2 does not import torch.
    smallest = min(table.rows, key=lambda row: row.peak_bytes)
    assert smallest.engine.ctranslate2 or not HAS_CTRANSLATE2


def test_model_too_small_for_int8_is_timed_without_int8(serve):
    printed = serve("--no_peak_memory").out
    assert "int8 was skipped: T5ForConditionalGeneration has no linear layer" in " ".join(printed.split())
    assert "share_memory" in printed


def test_peak_memory_of_an_engine_is_measured_in_another_process():
    if not peak_memory.CLEAR_FILE.exists():
        pytest.skip("this system does not report peak memory")
    engine, load = Engine("transformers"), Workload(1, 8, 3, 1)
    assert 2**24 < peak_memory.measure_peak_bytes(make_config(T5), engine, load, 1, None) < 2**33


@pytest.mark.thorough
def test_failure_of_the_only_engine_raises_an_error():
    if not peak_memory.CLEAR_FILE.exists():
        pytest.skip("this system does not report peak memory")
    engine, load = Engine("transformers"), Workload(1, 8, 3, 1)
    with pytest.raises(ValueError, match=r"The process for transformers failed \(status 1\).*no_such_model"):
        peak_memory.measure_peak_bytes({"model_type": "no_such_model"}, engine, load, 1, None)


def test_times_are_kept_if_a_memory_measurement_fails(serve, monkeypatch):
    """Check a process that the system kills, because a second copy of a model may exceed the memory."""

    class Killed:
        returncode, stderr = -9, "cut off"

    if not peak_memory.CLEAR_FILE.exists():
        pytest.skip("this system does not report peak memory")
    platform.processor()  # this starts a program at the first call
    monkeypatch.setattr(peak_memory.subprocess, "run", lambda *args, **kwargs: Killed())
    printed = " ".join(serve("--engines", "share_memory").out.split())
    for name in ("transformers", "share_memory"):
        why = f"The process for {name} failed (status -9): it was killed, probably because of a lack of memory"
        assert f"The peak memory of {name} could not be measured: {why}" in printed
    assert "Recommended for batch 1" in printed and "tokens/s" in printed


def test_order_of_engines_varies_between_rounds():
    order = []
    runs = {name: (lambda tokens, name=name: order.append(name)) for name in "abcd"}
    measure._time_engines(runs, Workload(1, 1, None, 1), rounds=4)
    assert sorted(order) == sorted("abcd" * 5)  # the first of five rounds warms up
    rounds = [order[start : start + 4] for start in range(0, len(order), 4)]
    pairs = {pair for item in rounds for pair in itertools.pairwise(item)}
    assert all(len({previous for previous, following in pairs if following == name}) > 1 for name in runs)
    assert len({item[0] for item in rounds}) > 2


@pytest.mark.usefixtures("small_maps")
def test_encoder_only_model_and_variants_are_served(tmp_path, capsys):
    BERT.make_upstream_model("BertModel").save_pretrained(tmp_path / "bert")
    BERT.make_model("BertModel", "gqa").save_pretrained(tmp_path / "ours")
    flags = ["--serving", "--batch_size", "2", "--length", "8", "--rounds", "1", "--no_peak_memory", "--json"]
    assert cli.main(["benchmark", str(tmp_path / "bert"), *flags]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [row["engine"]["name"] for row in table["rows"][:2]] == ["transformers", "int8"]
    assert table["rows"][0]["first_milliseconds"] is None and "cannot be exported" in table["left_out"]["CTranslate2"]
    assert table["rows"][0]["tokens_per_second"] == pytest.approx(16 / table["rows"][0]["milliseconds"] * 1e3)
    assert cli.main(["benchmark", str(tmp_path / "ours"), *flags]) == 0
    table = json.loads(capsys.readouterr().out)
    source_name = table["rows"][0]["engine"]["name"]
    assert source_name.startswith("GQA")
    assert [row["engine"]["name"] for row in table["rows"]] == [source_name, f"{source_name}, int8"]


@pytest.mark.usefixtures("small_maps")
def test_requested_conversions_are_timed(serve):
    flags = ["--no_peak_memory", "--json", "--variants"]
    latents = {"cross_kv_lora_rank": 8, "kv_lora_rank": 4}
    printed = serve(*flags, json.dumps(latents), '{"cross_kv_lora_rank": 4}').out
    rows = {row["engine"]["name"]: row["engine"] for row in json.loads(printed)["rows"]}
    fields_by_name = {name: engine["fields"] for name, engine in rows.items() if "latent" in name}
    both = "MHA + cross latent 8 + latent 4"
    one = "MHA + cross latent 4"
    assert {name.split(",")[0] for name, engine in rows.items() if engine["fields"]} == {both, one}  # no others
    expected = {both: latents, f"{both}, int8": latents}
    expected |= {one: {"cross_kv_lora_rank": 4}, f"{one}, int8": {"cross_kv_lora_rank": 4}}
    assert fields_by_name == expected  # no rows for CTranslate2, which has no latents
    for wrong, message in (
        (['{"kv_lora": 3}'], "kv_lora"),
        (['{"num_key_value_heads": 5}'], "must divide"),
        (['{"kv_lora_rank": 4}'] * 2, "must be different, got MHA + latent 4 twice"),
    ):
        printed = serve(*flags, *wrong, status=2)
        assert message in printed.err and printed.err.count("\n") == 1 and not printed.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--serving", "--variants", "3"], "--variants.* must be a JSON object"),
        (["--serving", "--variants", "{}"], "--variants.* must be a JSON object"),
        (["--serving", "--variants", "{"], r"--variants: .*JSON: .*column 2"),
    ],
)
def test_invalid_conversion_of_serving_raises_an_error(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["benchmark", "a", *flags])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.usefixtures("small_maps")
def test_only_selected_engines_are_timed(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(make_config(T5)))
    flags = ["--batch_size", "2", "--rounds", "1", "--max_new_tokens", "3", "--no_peak_memory", "--json"]
    chosen = ["--engines", "share_memory, int8", "int8"]
    cli.main(["benchmark", str(tmp_path), "--serving", "--length", "8", *flags, *chosen])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["engine"]["name"] for row in rows] == ["transformers", "int8", "share_memory, int8"]
    with pytest.raises(ValueError, match=r"int4.*transformers; share_memory; int8; "):
        measure_serving(make_config(T5), length=8, engines=["int4"], **SMALL)


def test_unavailable_engine_error_gives_the_reason(monkeypatch):
    monkeypatch.setattr(
        measure, "get_ctranslate2_unsupported_reason", lambda config, fields=None: "CTranslate2 is not installed"
    )
    with pytest.raises(ValueError, match="CTranslate2 cannot be timed: CTranslate2 is not installed"):
        measure_serving(make_config(T5), length=8, engines=["CTranslate2, int8"], **SMALL)
    assert not measure_serving(make_config(T5), length=8, engines=["share_memory"], **SMALL).left_out
    assert measure_serving(make_config(T5), length=8, **SMALL).left_out


@pytest.mark.usefixtures("small_maps")
def test_serving_table_ends_with_advice_and_a_plot(serve, tmp_path):
    flags = ["--num_beams", 2, "--num_key_value_heads", 1, "--no_peak_memory", "--plot", tmp_path / "a.png"]
    lines = serve(*flags, batch_size=2, new_tokens=3).out.splitlines()
    assert "batch 2, length 8, 3 new tokens, 2 beams" in lines[0]
    assert any(line.startswith("MQA, int8") for line in lines)
    assert lines[-1].startswith("Recommended for batch 2, length 8, 3 new tokens (2 beams), this machine: ")
    assert any("CTranslate2" in line for line in lines)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def make_table(peaks=None, rounds=None, **milliseconds):
    known = {
        "transformers": Engine("transformers"),
        "share": Engine("share_memory", shared=True),
        "int8": Engine("int8", int8=True),
        "ct2": Engine("CTranslate2", ctranslate2=True),
        "ct2_int8": Engine("CTranslate2, int8", int8=True, ctranslate2=True),
        "mqa": Engine("MQA", 1),
    }
    first = milliseconds["transformers"]
    rows = [
        ServingRow(
            *(known[name], time, (rounds or {}).get(name, [time]), 1e3 / time, first / time, 1.0),
            None if peaks is None else peaks[name] * 2**20,
        )
        for name, time in milliseconds.items()
    ]
    return ServingTable("t5", Workload(1, 64, 32, 1), rows, {}, {})


@pytest.mark.parametrize(
    "times, output_text",
    [
        (
            {"transformers": 100, "share": 98, "int8": 96},
            "transformers (1.00 times transformers), which is as fast as share_memory (1.02), int8 (1.04) "
            "within the variation between rounds.",
        ),
        (
            {"transformers": 100, "share": 50, "int8": 49},
            "share_memory (2.00 times transformers), which is as fast as int8 (2.04) "
            "within the variation between rounds.",
        ),
        (
            {"transformers": 100, "share": 80, "int8": 50},
            "int8 (2.00 times transformers); share_memory (1.25) if float32 is required.",
        ),
        ({"transformers": 100, "share": 100, "int8": 50}, "int8 (2.00 times transformers)."),
        (
            {"transformers": 100, "share": 80, "int8": 50, "ct2": 40, "ct2_int8": 25},
            "CTranslate2, int8 (4.00 times transformers); CTranslate2 (2.50) if float32 is required; "
            "int8 (2.00) within Transformers.",
        ),
        (
            {"transformers": 100, "share": 80, "mqa": 60},
            "share_memory (1.25 times transformers); MQA (1.67) after conversion, whose quality must be checked.",
        ),
        ({"transformers": 100, "share": 62, "mqa": 60}, "share_memory (1.61 times transformers)."),
    ],
)
def test_advice_names_the_best_engine(times, output_text):
    prefix = "Recommended for batch 1, length 64, 32 new tokens (greedy), this machine: "
    assert recommend_engine(make_table(**times)) == prefix + output_text


def test_smaller_engine_is_advised_if_times_are_equal_within_noise():
    times = {"transformers": 135, "share": 101, "int8": 93}
    rounds = {"transformers": [135] * 4, "share": [99, 100, 101, 105, 107], "int8": [90, 92, 93, 101, 104]}
    output_text = {}
    for share, int8 in ((700, 300), (300, 700), (300, 290)):
        peaks = {"transformers": 900, "share": share, "int8": int8}
        output_text[share, int8] = recommend_engine(make_table(peaks, rounds, **times)).partition("this machine: ")[2]
    assert output_text[700, 300] == (
        "int8 (1.45 times transformers, 300 MiB), which is as fast as share_memory (1.34, 700 MiB) "
        "within the variation between rounds; share_memory (1.34) if float32 is required."
    )
    assert output_text[300, 700].startswith("share_memory (1.34 times transformers, 300 MiB), which is as fast as")
    assert output_text[300, 290].startswith("share_memory (1.34 times transformers, 300 MiB), which is as fast as")
    apart = rounds | {"share": [101] * 4, "int8": [93] * 4}
    assert recommend_engine(make_table(None, apart, **times)).partition("this machine: ")[2] == (
        "int8 (1.45 times transformers); share_memory (1.34) if float32 is required."
    )


@needs_ctranslate2
def test_missing_decoder_start_token_raises_an_error(tmp_path):
    from hf_attn_variants.serving.peak_memory import write_ctranslate2_folder

    config = make_config(T5) | {"decoder_start_token_id": None}
    model = build_model(config, Engine("CTranslate2", ctranslate2=True))
    with pytest.raises(ValueError, match=r"config\.json must contain `decoder_start_token_id`"):
        write_ctranslate2_folder(config, model, make_workload_inputs(config, Workload(1, 8, 2, 1)), tmp_path, False)


def test_plot_without_matplotlib_raises_before_timing(capsys, monkeypatch):
    actual = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else actual(name))
    with pytest.raises(SystemExit):
        cli.main(["benchmark", "somewhere", "--serving", "--plot", "a.png"])
    assert "--plot requires matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rounds": 0}, "`rounds` must be at least 1"),
        ({"num_beams": 2}, "`num_beams`"),
        ({"kv_heads": [5], "length": 8}, "must divide"),
        ({"length": 10**6}, "`length`"),
    ],
)
def test_serving_rejects_invalid_numbers(options, message, monkeypatch):
    monkeypatch.setattr(measure, "_time_engines", lambda *args: pytest.fail("an engine was timed"))
    with pytest.raises(ValueError, match=message):
        measure_serving(make_config(BERT), **options)
