"""Check the decoder inputs in calibrations of encoder-decoders: generated targets, given targets, or the source."""

import pytest
import torch
from fixtures.calibrations import make_bert, make_calibration, make_texts
from fixtures.multilingual import LANGUAGES, TOKENIZERS
from fixtures.tiny_t5 import make_lines_of_words
from transformers import (
    BartConfig,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
    GenerationMixin,
    M2M100Config,
    M2M100ForConditionalGeneration,
    T5Config,
    T5Model,
)

from hf_attn_variants import convert
from hf_attn_variants.conversion import Calibration

SIZES = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SIZES |= {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64, "init_std": 0.3}
# BART requires the same number of end tokens (1) in each row: the texts have none, and the batches below have one.
BART = BartConfig(vocab_size=60, **SIZES, eos_token_id=1, decoder_start_token_id=1, pad_token_id=0)
T5 = T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)


@pytest.mark.thorough
@pytest.mark.parametrize("head", [BartForQuestionAnswering, BartForSequenceClassification])
def test_classification_head_is_calibrated_on_the_source_text(head):
    torch.manual_seed(0)
    model = head(BART).eval()
    text = make_calibration()
    converted = convert(model, 2, calibration=text)
    averaged = convert(model, 2, method="mean")
    batch = {"input_ids": torch.randint(2, 60, (8, 12)), "attention_mask": torch.ones(8, 12, dtype=torch.long)}
    batch["input_ids"][:, -1] = 1
    with torch.no_grad():
        outputs = [item(**batch)[0] for item in (model, converted, averaged)]
    assert (outputs[1] - outputs[0]).norm() < 0.7 * (outputs[2] - outputs[0]).norm()


@pytest.mark.thorough
def test_encoder_decoder_without_a_head_needs_targets():
    for model in (BartModel(BART), T5Model(T5)):
        with pytest.raises(ValueError, match=r"`target_texts` .* is required"):
            convert(model, 2, calibration=make_calibration())
        converted = convert(model, 2, calibration=make_calibration(target_texts=make_calibration().texts))
        assert converted.config.num_key_value_heads == 2


def test_targets_for_an_encoder_raise_an_error():
    with pytest.raises(ValueError, match=r"`target_texts` .* is not supported for .*Bert"):
        convert(make_bert(), 2, calibration=make_calibration(target_texts=make_texts(seed=1)))


def test_generated_targets_use_the_requested_language(tmp_path, monkeypatch):
    tokenizer = TOKENIZERS["m2m_100"](tmp_path)
    torch.manual_seed(0)
    model = M2M100ForConditionalGeneration(M2M100Config(vocab_size=300, **SIZES))
    written = []

    def generate(self, **inputs):
        written.append(plain(self, **inputs))
        return written[-1]

    plain = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    text = {"tokenizer": tokenizer, "fit_steps": 0, "max_length": 12}
    with pytest.raises(ValueError, match="--source_lang and --target_lang are required"):
        convert(model, 2, calibration=Calibration(make_lines_of_words(200), **text))
    source, target = LANGUAGES["m2m_100"]
    convert(
        model, 2, calibration=Calibration(make_lines_of_words(200), **text, source_lang=source, target_lang=target)
    )
    begins = {row[1].item() for ids in written for row in ids}
    assert begins == {tokenizer.get_lang_id(target)}
