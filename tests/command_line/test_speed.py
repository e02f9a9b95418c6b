"""Check `attn-variants benchmark`: the timed models, the table, and the errors."""

import functools
import json

import pytest
from architectures import BERT, T5
from fixtures.caches import get_cache_name
from relatives import RELATIVES, WHISPER

import hf_attn_variants
from hf_attn_variants import cli
from hf_attn_variants.inspection.speed import BreakEven, VariantSpeed, _compute_break_even, measure_speed

MARIAN = next(architecture for architecture in RELATIVES if architecture.name == "marian")
SMALL = ["--batch_size", "2", "--length", "8", "--rounds", "2", "--max_new_tokens", "3", "--device", "cpu"]


@pytest.mark.thorough
def test_benchmark_times_transformers_and_every_variant(tmp_path, capsys):
    T5.make_upstream_model("T5ForConditionalGeneration").save_pretrained(tmp_path)
    assert cli.main(["benchmark", str(tmp_path), *SMALL, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert next(iter(rows)) == "transformers" and {"MHA", "MQA", "MHA + talking heads"} <= rows.keys()
    assert rows["transformers"]["speedup"] == 1.0
    for row in rows.values():
        assert len(row["all_milliseconds"]) == 2
        assert min(row["all_milliseconds"]) <= row["milliseconds"] <= max(row["all_milliseconds"])
        assert row["tokens_per_second"] == pytest.approx(2 * 3 / row["milliseconds"] * 1e3)


def test_variant_checkpoint_is_compared_with_its_multi_head_model(tmp_path, capsys):
    T5.make_model("T5ForConditionalGeneration", "gqa").save_pretrained(tmp_path)
    command = ["benchmark", str(tmp_path), *SMALL, "--no_talking_heads", "--no_latents"]
    assert cli.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "AttnVariantT5ForConditionalGeneration" in lines[0] and lines[3].startswith("MHA")
    assert "  1.00x  " in lines[3]
    assert not any("talking" in line or "transformers" in line for line in lines)
    assert cli.main([*command, "--num_key_value_heads", "2", "1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:6]] == ["MHA", "GQA-2", "MQA"]


@pytest.mark.parametrize("head", ["BertModel", "BertLMHeadModel"])
def test_models_without_generation_from_an_encoder_raise_an_error(head):
    config = BERT.make_config().to_dict() | {"architectures": [head]}
    with pytest.raises(ValueError, match="encoder-decoder"):
        measure_speed(config, length=8)


@pytest.mark.thorough
def test_whisper_is_timed_with_its_full_window():
    head = "WhisperForConditionalGeneration"
    config = WHISPER.make_upstream_model(head).config.to_dict() | {"architectures": [head]}
    small = {"batch_size": 2, "rounds": 1, "max_new_tokens": 3, "talking_heads": False}
    table = measure_speed(config, **small)
    assert (table.length, table.architecture) == (20, f"AttnVariant{head}")
    assert [row.name for row in table.rows][:2] == ["transformers", "MHA"]
    with pytest.raises(ValueError, match=r"`length` must be at most 20.* got 21"):
        measure_speed(config, length=21, **small)


def test_decoder_without_cache_support_is_timed_without_a_cache():
    config = T5.make_config(talking_heads="both", talking_heads_dynamic=["m2w"]).to_dict()
    assert measure_speed(config, batch_size=2, length=8, max_new_tokens=2, rounds=1).rows


@pytest.mark.thorough
def test_latents_of_an_encoder_decoder_are_timed_per_token(tmp_path, capsys):
    T5.make_upstream_model("T5ForConditionalGeneration").save_pretrained(tmp_path)
    assert cli.main(["benchmark", str(tmp_path), *SMALL, "--no_talking_heads", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in table["rows"]}
    names = [f"MHA + {text}" for text in ("cached encoder outputs", "cross latent 10", "cross latent 10 + latent 16")]
    assert [name for name in rows if "latent" in name or "cached" in name] == names
    for row in rows.values():
        assert 0 < row["first_milliseconds"] < row["milliseconds"] and row["step_milliseconds"] > 0
    assert (table["break_even"]["exact"], table["break_even"]["multi_head"]) == (names[0], "MHA")
    assert cli.main(["benchmark", str(tmp_path), *SMALL, "--no_talking_heads", "--no_latents"]) == 0
    printed = capsys.readouterr().out
    assert "cross latent" not in printed and "cached" not in printed and "ms per further token" in printed


@pytest.mark.parametrize(
    "exact, tokens",
    [
        ((10, 3), 7),  # saves 10 and loses 2 per step: equal after 5 steps (6 tokens)
        ((11, 3), 6),
        ((20, 3), 2),
        ((21, 3), 1),
        ((21, 1), 1),
        ((20, 1), None),
        ((21, 0.5), None),
        ((10, 0.5), None),
    ],
)
def test_break_even_is_the_step_at_which_the_total_times_are_equal(exact, tokens):
    def row(name, fields, first, step):
        return VariantSpeed(name, fields, 0, [], 0, 1, first, step)

    rows = [row("transformers", {}, 1, 1), row("MHA", {"num_key_value_heads": 12}, 20, 1)]
    rows.append(row("exact", {"cross_kv_lora_rank": 40}, *exact))
    assert _compute_break_even(T5.make_config(), rows) == BreakEven("exact", "MHA", tokens)
    assert _compute_break_even(T5.make_config(), rows[:2]) is None


@pytest.mark.thorough
def test_beams_are_timed_and_reported(tmp_path, capsys, monkeypatch):
    from transformers import GenerationMixin

    T5.make_upstream_model("T5ForConditionalGeneration").save_pretrained(tmp_path)
    actual, generate = [], GenerationMixin.generate

    def spy(self, *args, **options):
        result = generate(self, *args, **options)
        if options["num_beams"] == 3:  # an earlier check decodes greedily
            actual.append((options["encoder_outputs"].last_hidden_state.shape[0], tuple(result.shape)))
        return result

    monkeypatch.setattr(GenerationMixin, "generate", spy)
    argv = ["benchmark", str(tmp_path), *SMALL, "--no_talking_heads", "--num_beams", "3"]
    assert cli.main([*argv, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["num_beams"] == 3 and table["rows"][0]["name"] == "transformers"
    for row in table["rows"]:
        assert row["tokens_per_second"] == pytest.approx(2 * 3 / row["milliseconds"] * 1e3)
    # Each call starts with the encoder outputs of 2 texts and returns 2 texts of 1 + 3 tokens. Transformers repeats
    # the encoder outputs for each beam, and our beams share them.
    assert set(actual) == {(6, (2, 4)), (2, (2, 4))}
    assert cli.main(argv) == 0
    assert "3 new tokens, 3 beams" in capsys.readouterr().out
    assert cli.main(["benchmark", str(tmp_path), *SMALL, "--no_talking_heads"]) == 0
    assert "3 new tokens, greedy" in capsys.readouterr().out


def drop_argument(argument):
    """Return a wrapper of a forward that drops an argument."""

    def wrapper(forward):
        @functools.wraps(forward)  # `generate` reads its signature
        def wrapped(self, *args, **kwargs):
            return forward(self, *args, **kwargs | {argument: None})

        return wrapped

    return wrapper


@pytest.mark.parametrize(
    ("row", "head", "argument", "message"),
    [
        (
            T5,
            "T5ForConditionalGeneration",
            get_cache_name(),
            "T5ForConditionalGeneration with the same weights decode differ",
        ),
        (T5, "T5ForConditionalGeneration", "attention_mask", "with the same weights decode differently"),
        (MARIAN, "MarianMTModel", get_cache_name(), "MarianMTModel with the same weights decode differently"),
        (WHISPER, "WhisperForConditionalGeneration", get_cache_name(), "with the same weights decode differently"),
    ],
)
def test_benchmark_raises_for_a_model_with_other_outputs(row, head, argument, message, monkeypatch):
    from hf_attn_variants.inspection import speed

    monkeypatch.setattr(speed, "time_run", lambda *args: pytest.fail("a model was timed"))
    model = getattr(hf_attn_variants, f"AttnVariant{head}")
    monkeypatch.setattr(model, "forward", drop_argument(argument)(model.forward))
    config = row.make_upstream_model(head).config.to_dict() | {"architectures": [head]}
    with pytest.raises(ValueError, match=rf"{message}.*Nothing was timed"):
        measure_speed(config, length=8, batch_size=2, rounds=1, talking_heads=False, latents=False)


@pytest.mark.thorough
def test_benchmark_raises_for_a_variant_that_loses_its_cache(monkeypatch):
    """Check a variant checkpoint, which has no Transformers model to compare with."""
    model = hf_attn_variants.AttnVariantT5ForConditionalGeneration
    config = T5.make_config(num_key_value_heads=4).to_dict()
    options = {"batch_size": 2, "length": 8, "rounds": 1, "talking_heads": False, "latents": False}
    assert measure_speed(config, **options).rows
    monkeypatch.setattr(model, "forward", drop_argument(get_cache_name())(model.forward))
    with pytest.raises(ValueError, match="MHA decodes differently"):
        measure_speed(config, **options)


def test_decoder_windows_and_kernels_are_timed():
    config = MARIAN.make_upstream_model("MarianMTModel").config.to_dict()
    options = {"batch_size": 1, "length": 8, "rounds": 1, "max_new_tokens": 2}
    options |= {"talking_heads": False, "latents": False}
    table = measure_speed(config, kv_heads=[4], windows=[4, 8], kernels=["elu", "hybrid"], **options)
    window, kernel = "attention_window", "attention_kernel"
    assert [row.fields for row in table.rows[2:]] == [
        {"attention_pattern": "sliding_window", window: 4},
        {"attention_pattern": "sliding_window", window: 8},
        {kernel: "elu"},
        {kernel: "hybrid", window: 4},
        {kernel: "hybrid", window: 8},
    ]
    assert [row.name for row in table.rows][-1] == "MHA + hybrid 8"


def test_unavailable_device_raises_an_error():
    for device in ("xpu", "meta", "nonsense"):
        with pytest.raises(ValueError, match=rf"`device`.*{device}"):
            measure_speed(
                T5.make_upstream_model("T5ForConditionalGeneration").config.to_dict(), length=8, device=device
            )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rounds": 0}, "`rounds` must be at least 1, got 0"),
        ({"num_beams": 0}, "`num_beams` must be at least 1, got 0"),
        ({"kv_heads": [5], "length": 8}, "must divide"),
    ],
)
def test_benchmark_rejects_invalid_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        measure_speed(T5.make_upstream_model("T5ForConditionalGeneration").config.to_dict(), **options)
