"""Check attention maps: they equal the attention of the model, have labels, and fit into one HTML file."""

import base64
import json
import re
import shutil
import subprocess

import numpy
import pytest
import torch
import transformers
from architectures import ARCHITECTURES, BERT, T5, VARIANTS
from fixtures.uptraining import make_t5
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_attn_variants.inspection import attention_maps as maps_module
from hf_attn_variants.inspection.attention_maps import (
    HeadProjection,
    _add_difference_matrices,
    attention_maps,
    render_attention_page,
)
from hf_attn_variants.modeling.attention import attention_interface
from hf_attn_variants.modeling.ops.softmax_attention import attention_with_weights

TEXT, TARGET = "the dog sees a small cat", "A MAN FINDS"
HEADS = {"bert": "BertForMaskedLM", "albert": "AlbertForMaskedLM", "t5": "T5ForConditionalGeneration"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return transformers.AutoTokenizer.from_pretrained(make_t5(tmp_path_factory.mktemp("tokenizer")))


def make_model(architecture="bert", variant="gqa_talking"):
    row = next(row for row in ARCHITECTURES if row.name == architecture)
    return row.make_model(HEADS[architecture], variant)


def make_maps(tokenizer, architecture="bert", variant="gqa_talking"):
    target = TARGET if architecture == "t5" else None
    return attention_maps(make_model(architecture, variant), tokenizer, TEXT, target)


@pytest.mark.thorough
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", HEADS)
def test_last_stage_equals_the_returned_weights(tokenizer, architecture, variant):
    model = make_model(architecture, variant)
    inputs = {"input_ids": torch.tensor([tokenizer(TEXT)["input_ids"]])}
    names = {"self": "attentions"}
    if architecture == "t5":
        inputs["decoder_input_ids"] = torch.tensor([[0, *tokenizer(TARGET)["input_ids"][:-1]]])
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    with torch.no_grad():
        outputs = model(**inputs, output_attentions=True, **({"use_cache": False} if architecture == "t5" else {}))
    result = make_maps(tokenizer, architecture, variant).attentions
    assert len(result) == sum(len(getattr(outputs, name)) for name in names.values())
    for maps in result:
        expected = getattr(outputs, names[maps.site])[maps.layer][0]
        torch.testing.assert_close(maps.stages[-1].maps, expected, rtol=1e-5, atol=1e-6)
        assert expected.shape[1:] == (len(maps.query_tokens), len(maps.key_tokens))


@pytest.mark.parametrize(
    "variant, fields",
    [
        ("gqa", {"attention_kernel": "elu"}),
        *(
            (variant, fields)
            for variant in ("gqa", "gqa_talking")
            for fields in (
                {"attention_pattern": "sliding_window", "attention_window": 2},
                {"attention_pattern": "strided", "attention_block_size": 3},
                {"attention_pattern": "memory_compressed", "attention_block_size": 3},
                {"score_function": "additive"},
            )
        ),
    ],
)
def test_patterns_kernels_and_scores_are_shown(tokenizer, fields, variant):
    model, ids = BERT.make_model("BertModel", variant, **fields), torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        expected = model(ids, output_attentions=True).attentions
    result = attention_maps(model, tokenizer, TEXT).attentions
    for maps, weights in zip(result, expected, strict=True):
        torch.testing.assert_close(maps.stages[-1].maps, weights[0], rtol=1e-5, atol=1e-6)
        assert weights.shape[2:] == (len(maps.query_tokens), len(maps.key_tokens))
        if variant == "gqa_talking":
            assert_stages_follow(maps)


def test_block_summaries_are_shown_before_the_tokens(tokenizer):
    fields = {"attention_pattern": "transient_global", "attention_window": 4, "attention_block_size": 3}
    model = T5.make_model(
        "T5ForConditionalGeneration", "gqa", **{f"encoder_{name}": field_value for name, field_value in fields.items()}
    )
    maps = attention_maps(model, tokenizer, TEXT, TARGET).attentions[0]
    assert maps.key_tokens == ("block 1", "block 2", *TEXT.split(), "</s>") and len(maps.query_tokens) == 7
    torch.testing.assert_close(maps.stages[0].maps.sum(-1), torch.ones(12, 7))
    assert not maps.stages[0].maps[:, 0, 5:].any()


@pytest.mark.parametrize("architecture", ["bert", "albert"])
def test_each_stage_follows_from_the_previous_one(tokenizer, architecture):
    for maps in make_maps(tokenizer, architecture).attentions:
        assert_stages_follow(maps)


def assert_stages_follow(maps):
    stages = {stage.name: stage.maps for stage in maps.stages}
    P_l, P_w = (projection.matrix for projection in maps.projections)
    assert [len(stage) for stage in stages.values()] == [12, 6, 6, 8]
    # The mean of each row of logits is subtracted. The logits projection preserves a mean of 0, and the softmax
    # ignores it.
    mixed = torch.einsum("inm,ij->jnm", stages["logits_before"], P_l)
    torch.testing.assert_close(stages["logits_after"], mixed, rtol=1e-4, atol=1e-5, equal_nan=True)
    weights = stages["logits_after"].nan_to_num(-torch.inf).softmax(-1)
    torch.testing.assert_close(stages["weights_before"], weights, rtol=1e-4, atol=1e-5)
    mixed = torch.einsum("inm,ij->jnm", stages["weights_before"], P_w)
    torch.testing.assert_close(stages["weights_after"], mixed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "variant, names",
    [
        ("mha", ["weights"]),
        ("gqa", ["weights"]),
        ("logits", ["logits_before", "logits_after", "weights_before"]),
        ("weights", ["weights_before", "weights_after"]),
        ("dynamic", ["logits_before", "logits_after", "weights_before", "weights_after"]),
    ],
)
def test_stages_match_the_variant(tokenizer, variant, names):
    for maps in make_maps(tokenizer, variant=variant).attentions:
        assert [stage.name for stage in maps.stages] == names
        assert maps.dynamic == (("x2l", "m2l", "x2w", "m2w") if variant == "dynamic" else ())


def test_talking_heads_labels_name_key_value_heads(tokenizer):
    stages = make_maps(tokenizer).attentions[0].stages
    assert [stage.kv_heads for stage in stages[1:3]] == [(), ()]
    assert stages[0].kv_heads == (0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3)
    assert stages[3].kv_heads == (0, 0, 1, 1, 2, 2, 3, 3)


def test_decoder_attends_to_no_later_token(tokenizer):
    maps = next(maps for maps in make_maps(tokenizer, "t5").attentions if maps.site == "decoder")
    ahead = torch.ones(maps.stages[0].maps.shape[1:], dtype=torch.bool).triu(1)
    for stage in maps.stages:
        values = stage.maps[:, ahead]
        assert values.isnan().all() if stage.name.startswith("logits") else (values == 0).all()
        assert not stage.maps[:, ~ahead].isnan().any()


def test_axis_labels_are_the_tokens_of_each_side(tokenizer):
    by_site = {maps.site: maps for maps in make_maps(tokenizer, "t5").attentions}
    text, target = (*TEXT.split(), "</s>"), ("<pad>", *TARGET.split())
    assert (by_site["encoder"].query_tokens, by_site["encoder"].key_tokens) == (text, text)
    assert (by_site["decoder"].query_tokens, by_site["decoder"].key_tokens) == (target, target)
    assert (by_site["cross"].query_tokens, by_site["cross"].key_tokens) == (target, text)
    assert by_site["cross"].name == "decoder layer 1, cross-attention"


@pytest.mark.parametrize("variant", ["gqa_talking", "dynamic"])
def test_missing_target_is_generated_greedily(tokenizer, variant):
    model = make_model("t5", variant)
    maps = attention_maps(model, tokenizer, TEXT, max_length=10)
    inputs = torch.tensor([tokenizer(TEXT)["input_ids"]])
    output = model.generate(inputs, max_new_tokens=10, do_sample=False, num_beams=1, use_cache=False)[0]
    assert maps.target_is_output and maps.target_text == tokenizer.decode(output, skip_special_tokens=True)
    assert len(maps.attentions[-1].query_tokens) == len(output) - 1


def test_recording_attention_maps_does_not_change_the_model(tokenizer, monkeypatch):
    model = make_model().train()
    implementation = model.config._attn_implementation
    attention_maps(model, tokenizer, TEXT)

    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(maps_module, "_iterate_mixing_stages", broken)
    with pytest.raises(RuntimeError, match="broken"):
        attention_maps(model, tokenizer, TEXT)
    assert model.training and model.config._attn_implementation == implementation
    assert attention_interface.attention_with_weights is attention_with_weights


def test_longer_text_is_truncated_with_a_warning(tokenizer):
    model = make_model()
    maps = attention_maps(model, tokenizer, TEXT, max_length=4)
    assert maps.is_cut and len(maps.attentions[0].key_tokens) == 4
    assert not attention_maps(model, tokenizer, TEXT).is_cut


def test_invalid_attention_map_arguments_raise_an_error(tokenizer):
    plain = next(row for row in ARCHITECTURES if row.name == "bert").make_upstream_model("BertForMaskedLM")
    with pytest.raises(ValueError, match=r"`model`.*BertForMaskedLM"):
        attention_maps(plain, tokenizer, TEXT)
    with pytest.raises(ValueError, match="`target_text`"):
        attention_maps(make_model(), tokenizer, TEXT, "a target")
    with pytest.raises(ValueError, match="`text`"):
        attention_maps(make_model(), tokenizer, "  ")


@pytest.mark.parametrize("architecture, variant", [("bert", "gqa_talking"), ("t5", "gqa"), ("albert", "talking")])
def test_page_contains_every_value(tokenizer, architecture, variant):
    maps = make_maps(tokenizer, architecture, variant)
    page = render_attention_page(maps, "</script><b>model</b>")
    assert "http" not in page and page.count("</script>") == 2
    content = json.loads(re.search(r'type="application/json">(.*?)</script>', page, re.DOTALL)[1])
    assert content["model"] == "</script><b>model</b>" and len(content["attentions"]) == len(maps.attentions)
    assert content["attentions"][0]["name"].endswith("layer 0")  # as in reports and cards
    for result, expected in zip(content["attentions"], maps.attentions, strict=True):
        assert result["name"] == expected.name and tuple(result["rows"]) == expected.query_tokens
        for stage, expected_stage in zip(result["stages"], expected.stages, strict=True):
            levels = numpy.frombuffer(base64.b64decode(stage["values"]), dtype="<u2").reshape(
                expected_stage.maps.shape
            )
            values = numpy.where(levels == 0, numpy.nan, stage["lowest"] + (levels.astype(float) - 1) * stage["step"])
            numpy.testing.assert_allclose(values, expected_stage.maps.numpy(), atol=stage["step"])


def test_trained_projections_are_compared_with_the_identity():
    near = HeadProjection("P_l", "query head", "softmax head", torch.eye(3) + 0.01)
    shown = list(
        _add_difference_matrices((near, HeadProjection("P_w", "softmax head", "value head", torch.ones(3, 2))))
    )
    assert [one.name for one in shown] == ["P_l", "100 (P_l - I)", "P_w"]
    torch.testing.assert_close(shown[1].matrix, torch.ones(3, 3))


@pytest.mark.parametrize("width", [420, 1200])
@pytest.mark.parametrize("words", [10, 30])
def test_page_fits_into_a_window(tokenizer, tmp_path, width, words):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("Chromium is not installed")
    maps = attention_maps(make_model(), tokenizer, " ".join([TEXT] * 5).rsplit(" ", 30 - words)[0], max_length=32)
    (tmp_path / "page.html").write_text(
        render_attention_page(maps, "somebody/a-model-with-a-name-of-many-words-" + "x" * 40)
    )
    measured = "document.documentElement, document.getElementById('detail')"
    (tmp_path / "frame.html").write_text(
        f"""<iframe id="frame" src="page.html" style="border:0;width:{width}px;height:900px"></iframe>
<p id="found"></p>
<script>frame.onload = () => {{ const document = frame.contentDocument;
found.textContent = "found " + [{measured}].map(one => one.scrollWidth - one.clientWidth); }};</script>"""
    )
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=5000", "--window-size=1400,1000"]
    command += ["--dump-dom", (tmp_path / "frame.html").as_uri()]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    assert "found 0,0" in printed, re.findall("found [0-9,]+", printed)


def test_stages_are_recorded_after_loading_remote_code(tokenizer, tmp_path):
    model = make_model()
    names = [stage.name for stage in attention_maps(model, tokenizer, TEXT).attentions[0].stages]
    model.save_pretrained(tmp_path)
    get_class_from_dynamic_module(f"{type(model.config).modeling_file}.{type(model).__name__}", str(tmp_path))
    assert [stage.name for stage in attention_maps(model, tokenizer, TEXT).attentions[0].stages] == names
    assert len(names) == 4
