"""Check the conversion of models in memory, and of checkpoints directly into models."""

import inspect

import peft
import pytest
import torch
import transformers
from architectures import BERT, HEAD_IDS, HEADS

import hf_attn_variants
from hf_attn_variants import convert
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.plan import CONVERT_ARGUMENTS
from hf_attn_variants.files import REPORT_NAME
from hf_attn_variants.modeling.fields.field_table import VARIANT_FIELDS
from hf_attn_variants.training.engine.models import enable_gradient_checkpointing


def run(model, **kwargs):
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), **kwargs}
    with torch.no_grad():
        return model(**inputs)


@pytest.mark.thorough
@pytest.mark.parametrize("architecture, head", HEADS, ids=HEAD_IDS)
def test_in_memory_conversion_equals_the_checkpoint_conversion(architecture, head, tmp_path):
    model = architecture.make_upstream_model(head)
    model.save_pretrained(tmp_path / "source")
    alone = head in ("T5EncoderModel", "T5ForTokenClassification")
    heads = {"encoder_num_key_value_heads" if alone else "num_key_value_heads": 4}
    in_memory = convert(model, **heads)
    from_path = convert(tmp_path / "source", method="mean", **heads)
    convert(tmp_path / "source", method="mean", output_dir=tmp_path / "out", **heads)
    model_class = getattr(hf_attn_variants, f"AttnVariant{head}")
    loaded, info = model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.config.architectures == [f"AttnVariant{head}"] and heads.items() <= loaded.config.to_dict().items()
    expected, batch = in_memory.state_dict(), architecture.make_batch(head)
    with torch.no_grad():
        output = in_memory.eval()(**batch).to_tuple()[0]
    assert output.isfinite().all()
    for other in (from_path, loaded):
        assert type(other) is type(in_memory) is model_class
        assert other.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state_dict().items())
        with torch.no_grad():
            assert torch.equal(other.eval()(**batch).to_tuple()[0], output)


def test_unchanged_parameters_share_memory_and_stay_tied():
    model = BERT.make_upstream_model("BertForMaskedLM")
    converted = convert(model, 4)
    source, new = dict(model.named_parameters()), dict(converted.named_parameters())
    shared = {name for name in new if new[name].data_ptr() == source[name].data_ptr()}
    assert new.keys() - shared == {n for n in new if ".self.key." in n or ".self.value." in n}
    assert all(new[name] is not source[name] for name in new)
    assert converted.get_output_embeddings().weight is converted.get_input_embeddings().weight
    copied = convert(model, 4, copy=True)
    pointers = {parameter.data_ptr() for parameter in model.parameters()}
    assert not any(parameter.data_ptr() in pointers for parameter in copied.parameters())
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight


def test_conversion_does_not_change_the_source_model():
    model = BERT.make_upstream_model("BertForMaskedLM")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    convert(model, 4, talking_heads="both", dtype="bfloat16")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.config.to_dict() == config and type(model) is transformers.BertForMaskedLM


def test_buffers_and_other_state_are_copied():
    model = BERT.make_upstream_model("BertLMHeadModel", is_decoder=True).train()
    model.set_attn_implementation("eager")
    model.generation_config.max_new_tokens = 3
    model.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    model.resize_token_embeddings(70)
    enable_gradient_checkpointing(model)
    model.get_input_embeddings().weight.requires_grad_(False)
    converted = convert(model, 2)
    assert all(layer.gradient_checkpointing for layer in converted.bert.encoder.layer)
    converted(input_ids=torch.tensor([[5, 6]]), labels=torch.tensor([[5, 6]])).loss.backward()
    assert converted.training and "eager" in converted.config._attn_implementation
    assert converted.generation_config.max_new_tokens == 3
    assert not converted.get_input_embeddings().weight.requires_grad
    assert converted.bert.encoder.layer[0].attention.self.key.weight.requires_grad
    assert converted.config.vocab_size == converted.get_input_embeddings().num_embeddings == 70
    assert converted.eval().generate(torch.tensor([[5, 6]]), do_sample=False, pad_token_id=0).shape == (1, 5)


def test_converted_model_trains_and_saves(tmp_path):
    converted = convert(BERT.make_upstream_model("BertForSequenceClassification"), 4, copy=True).train()
    loss = converted(input_ids=torch.tensor([[5, 6, 7]]), labels=torch.tensor([1])).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in converted.parameters())
    converted.save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    torch.testing.assert_close(run(again)[0], run(converted.eval())[0], atol=1e-6, rtol=0)


def test_unsupported_models_raise_an_error(tmp_path):
    with pytest.raises(ValueError, match="save_pretrained"):
        convert(BERT.make_upstream_model("BertModel"), 4, output_dir=tmp_path / "out")
    with torch.device("meta"):
        nowhere = transformers.BertModel(transformers.BertConfig(**BERT.tiny))
    with pytest.raises(ValueError, match="must be in memory"):
        convert(nowhere, 4)
    with pytest.raises(ValueError, match=r"`model` must be .* got Linear"):
        convert(torch.nn.Linear(3, 3), 1)
    # `add_adapter` does the same, but requires peft newer than 0.21 in transformers 5.24.
    adapted = peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["query"]), BERT.make_upstream_model("BertModel")
    )
    with pytest.raises(ValueError, match=r"adapter.* Merge it first"):
        convert(adapted, 4)
    with pytest.raises(ValueError, match="`talking_heads_init`"):
        convert(BERT.make_upstream_model("BertModel"), talking_heads_init="random")
    gpt = transformers.GPT2Model(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=10))
    with pytest.raises(ValueError, match="'gpt2' is not supported"):
        convert(gpt, 1)


def test_generation_settings_of_a_folder_are_loaded(tmp_path):
    model = BERT.make_upstream_model("BertLMHeadModel", is_decoder=True)
    model.generation_config.max_new_tokens = 9
    model.save_pretrained(tmp_path / "source")
    assert convert(tmp_path / "source", 4).generation_config.max_new_tokens == 9


def test_convert_with_an_output_folder_is_convert_checkpoint(tmp_path):
    BERT.make_upstream_model("BertModel").save_pretrained(tmp_path / "source")
    report = convert(tmp_path / "source", 4, output_dir=tmp_path / "a")
    other = convert_checkpoint(tmp_path / "source", tmp_path / "b", 4)
    assert report.layers == other.layers
    for path in (tmp_path / "a").iterdir():
        assert path.name == REPORT_NAME or path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ({"methd": "mean"}, "Did you mean `method`"),
        ({"kv_heads": 2}, "Did you mean `num_key_value_heads`"),
        ({"fit_steps": 0}, r"Set it in `Calibration\(..., fit_steps=...\)`"),
    ],
)
def test_unknown_argument_error_suggests_an_argument(argument, advice):
    with pytest.raises(ValueError, match=f"`{next(iter(argument))}` is not a field of 'bert' models. {advice}"):
        convert(BERT.make_upstream_model("BertModel"), 1, **argument)


def test_suggested_arguments_are_the_arguments_of_convert_that_are_not_fields():
    arguments = {*inspect.signature(convert).parameters} - {"model_or_path", "fields"}
    names = {name for row in VARIANT_FIELDS for name in row.names}
    assert {*CONVERT_ARGUMENTS} == arguments - names - {"per_layer_values", "max_position_embeddings"}


def test_conversion_that_changes_nothing_gives_a_warning(caplog):
    model = BERT.make_upstream_model("BertModel")
    convert(model, 1, method="mean")
    assert "does not change the model" not in caplog.text
    convert(model, model.config.num_attention_heads)
    assert "does not change the model" in caplog.text
