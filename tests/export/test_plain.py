"""Check `attn-variants export --to transformers`: Transformers' classes give equal outputs without our code."""

import json
import logging

import pytest
import torch
import transformers
from architectures import ALBERT, ARCHITECTURES, BERT, T5
from fixtures.elsewhere import WITHOUT_PACKAGE, run_elsewhere
from relatives import RELATIVES, ROTARY
from safetensors import safe_open

import hf_attn_variants
from hf_attn_variants import cli
from hf_attn_variants.export.plain import export_transformers
from hf_attn_variants.files import GENERATED_CARD
from hf_attn_variants.hub.card import generate_model_card

pytestmark = pytest.mark.cross_product

RANKS = {"kv_lora_rank": 16, "encoder_kv_lora_rank": 20, "cross_kv_lora_rank": 24}
HEADS = [
    (row, head, variant)
    for row in (*ARCHITECTURES, *RELATIVES)
    for head in row.heads
    for variant in ("mqa", "latent")
    # Most architectures: the base model with grouped heads, and every head with latents. Architectures with rotary
    # positions have no latents, so every head has grouped heads.
    if head == next(iter(row.heads)) or (variant == "latent") != (row in ROTARY)
    if variant != "latent" or row not in ROTARY
]


def is_pair(row):
    return hasattr(row.config_class, "encoder_decoder_layers")


def get_variant_fields(row, variant):
    return RANKS if variant == "latent" and is_pair(row) else {}


WINDOW = {"attention_pattern": "sliding_window", "attention_window": 4}


def save_and_load(row, head, variant, folder, **fields):
    row.make_model(head, variant, **get_variant_fields(row, variant), **fields).double().save_pretrained(folder)
    return getattr(hf_attn_variants, f"AttnVariant{head}").from_pretrained(folder).eval()


@pytest.mark.thorough
@pytest.mark.parametrize("row, head, variant", HEADS, ids=[f"{head}-{variant}" for _, head, variant in HEADS])
@torch.no_grad()
def test_transformers_class_gives_equal_outputs(row, head, variant, tmp_path):
    variant_model = save_and_load(row, head, variant, tmp_path / "ours")
    written = export_transformers(tmp_path / "ours", tmp_path / "plain")
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert config["model_type"] in row.config_class.transformers_model_types and config["architectures"] == [head]
    assert not {*row.config_class.get_variant_fields(), "auto_map"} & config.keys()
    assert written.architecture == head and written.heads
    # With sdpa, UMT5's decoder is not causal in transformers 5.15 and 5.17. In float64, eager attention returns NaN
    # for padding in the local layers of ModernBERT.
    options = {"output_loading_info": True, "attn_implementation": "sdpa" if row in ROTARY else "eager"}
    plain, info = getattr(transformers, head).from_pretrained(tmp_path / "plain", **options)
    assert type(plain).__module__.startswith("transformers.models.")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    batch = row.make_batch(head)
    batch = {name: item.double() if item.is_floating_point() else item for name, item in batch.items()}
    expected, actual = variant_model(**batch), plain.eval()(**batch)
    assert actual[0].dtype == torch.float64
    torch.testing.assert_close(actual[0], expected[0], atol=1e-9, rtol=0)
    if plain.can_generate() and "encoder_outputs" not in batch:
        prompt = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
        prompt = prompt if is_pair(row) else {"input_ids": batch["input_ids"]}
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 2}
        assert torch.equal(plain.generate(**prompt, **options), variant_model.generate(**prompt, **options))


@pytest.mark.parametrize("row", [BERT, T5], ids=lambda row: row.name)
@torch.no_grad()
def test_per_layer_heads_are_expanded_to_equal_counts(row, tmp_path):
    head = {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration"}[row.name]
    values = {"num_key_value_heads": [4, 1], "kv_lora_rank": [None, 16]}
    variant_model = row.make_model(head, per_layer_values=values)
    variant_model.save_pretrained(tmp_path / "ours")
    written = export_transformers(tmp_path / "ours", tmp_path / "plain")
    assert written.heads == {"num_key_value_heads": ([4, 1], 12), "kv_lora_rank": ([None, 16], None)}
    plain = getattr(transformers, head).from_pretrained(tmp_path / "plain").eval()
    batch = row.make_batch(head)
    torch.testing.assert_close(plain(**batch).logits, variant_model(**batch).logits, atol=2e-6, rtol=1e-5)


@torch.no_grad()
def test_mt5_is_exported_without_output_scaling(tmp_path):
    torch.manual_seed(0)
    mt5 = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**T5.tiny)).eval()
    mt5.save_pretrained(tmp_path / "mt5")
    hf_attn_variants.convert(tmp_path / "mt5", 12, output_dir=tmp_path / "ours")
    export_transformers(tmp_path / "ours", tmp_path / "plain")
    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "plain").eval()
    assert plain.config.model_type == "t5"
    batch = T5.make_batch("T5ForConditionalGeneration")
    torch.testing.assert_close(plain(**batch).logits, mt5(**batch).logits, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "architecture, head, variant, fields, message",
    [
        (BERT, "BertForMaskedLM", "talking", {}, "`talking_heads`"),
        (BERT, "BertModel", "gqa_talking", {}, "`talking_heads`"),
        (BERT, "BertModel", "gqa", {"attention_kernel": "elu"}, "`attention_kernel`"),
        (BERT, "BertModel", "gqa", WINDOW, "`attention_pattern`"),
        (
            T5,
            "T5Model",
            "mha",
            {f"encoder_{name}": value for name, value in WINDOW.items()},
            "`encoder_attention_pattern`",
        ),
    ],
)
def test_variant_without_a_transformers_form_raises_an_error(architecture, head, variant, fields, message, tmp_path):
    architecture.make_model(head, variant, **fields).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        export_transformers(tmp_path / "ours", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_plain_source_and_invalid_dtype_raise_an_error(tmp_path):
    BERT.make_upstream_model("BertModel").save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match="'bert'"):
        export_transformers(tmp_path / "bert", tmp_path / "plain")
    with pytest.raises(ValueError, match="`dtype`"):
        export_transformers(tmp_path / "bert", tmp_path / "plain", dtype="int8")
    assert not (tmp_path / "plain").exists()


def test_shards_are_kept_and_half_precision_gives_a_note(tmp_path, caplog):
    model = ALBERT.make_model("AlbertForMaskedLM", "latent").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    with caplog.at_level(logging.WARNING):
        export_transformers(tmp_path / "ours", tmp_path / "plain")
    assert "`kv_lora_rank`: multiplying latent projections in bfloat16" in caplog.text
    names = [sorted(path.name for path in (tmp_path / folder).glob("*.safetensors")) for folder in ("ours", "plain")]
    assert names[0] == names[1] and len(names[0]) > 1
    assert (tmp_path / "plain/model.safetensors.index.json").is_file()
    caplog.clear()
    export_transformers(tmp_path / "ours", tmp_path / "wide", dtype="float32")
    assert "loses precision" not in caplog.text
    with safe_open(next((tmp_path / "wide").glob("*.safetensors")), "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}
    plain = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "wide").eval()
    batch = ALBERT.make_batch("AlbertForMaskedLM")
    with torch.no_grad():
        expected = model.float()(**batch).logits
        torch.testing.assert_close(plain(**batch).logits, expected, atol=2e-6, rtol=1e-5)


def test_export_drops_remote_code_and_rewrites_the_card(tmp_path, capsys):
    save_and_load(BERT, "BertForSequenceClassification", "gqa", tmp_path / "ours")
    (tmp_path / "ours/README.md").write_text(str(generate_model_card(tmp_path / "ours", "me/ours")))
    (tmp_path / "ours/tokenizer_config.json").write_text("{}")
    (tmp_path / "ours/own.py").write_text("pass")
    assert GENERATED_CARD in (tmp_path / "ours/README.md").read_text()
    assert (
        cli.main(["export", str(tmp_path / "ours"), "--to", "transformers", "--output_dir", str(tmp_path / "p")]) == 0
    )
    printed = capsys.readouterr().out
    assert "BertForSequenceClassification without remote code" in printed and "4 -> 12" in printed
    assert "left out                    README.md\n" in printed
    actual = sorted(path.name for path in (tmp_path / "p").iterdir())
    assert actual == ["config.json", "model.safetensors", "model_history.json", "own.py", "tokenizer_config.json"]
    assert json.loads((tmp_path / "p/tokenizer_config.json").read_text()) == {}
    (tmp_path / "ours/README.md").write_text("by hand")
    export_transformers(tmp_path / "ours", tmp_path / "again")
    assert (tmp_path / "again/README.md").read_text() == "by hand"


@pytest.mark.thorough
def test_exported_model_loads_without_this_package(tmp_path):
    variant_model = save_and_load(T5, "T5ForConditionalGeneration", "latent", tmp_path / "ours")
    export_transformers(tmp_path / "ours", tmp_path / "plain")
    script = f"""{WITHOUT_PACKAGE}
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])
print(type(model).__name__, model.num_parameters())
"""
    printed = run_elsewhere("-c", script, tmp_path / "plain", cwd=tmp_path)
    plain = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5.tiny))
    assert printed.split() == ["T5ForConditionalGeneration", str(plain.num_parameters())]
    assert plain.num_parameters() > variant_model.num_parameters()
