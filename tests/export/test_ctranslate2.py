"""Check `attn-variants export --to ctranslate2`: it generates the tokens of `generate` and repeats no heads."""

import gzip
import importlib.util
import json
import re
import struct

import numpy
import pytest
import torch
import transformers
from architectures import BERT, T5
from fixtures.ctranslate2_models import (
    ROWS,
    WRITERS,
    cut_generated_tokens,
    generate_with_ctranslate2,
    make_word_tokenizer,
    save_writer,
)
from fixtures.data_files import edit_json
from fixtures.multilingual import LANGUAGES, TOKENIZERS
from fixtures.speech import save_whisper_checkpoint

import hf_attn_variants
from hf_attn_variants import cli
from hf_attn_variants.commands.export import CTRANSLATE2_QUANTIZATIONS
from hf_attn_variants.export.ctranslate2 import export_ctranslate2
from hf_attn_variants.export.ctranslate2_check import check_ctranslate2_support, read_tokenizer_vocab
from hf_attn_variants.inspection.costs import resolve_source_model
from hf_attn_variants.model_properties import set_languages
from hf_attn_variants.modeling.fields.field_table import VARIANT_FIELDS

needs_engine = pytest.mark.skipif(importlib.util.find_spec("ctranslate2") is None, reason="needs ctranslate2")
LINES = ["w4 w9 w12 w30 w7", "w20", "w8 w8 w41 w15 w16 w17 w23 w42 w5 w6 w11 w31", "w33 w34 w40"]
NEW = 12
SEARCHES = [({"num_beams": 1}, {"beam_size": 1})]
# Scores are sums of log-probabilities without a length penalty, because the libraries count lengths differently.
SEARCHES += [({"num_beams": 4, "length_penalty": 0.0, "early_stopping": False}, {"beam_size": 4, "length_penalty": 0})]


# By default, CTranslate2 generates at least one token, and `generate` may generate none.
OURS, THEIRS = {"max_new_tokens": NEW}, {"min_decoding_length": 0, "max_decoding_length": NEW}


def load_with_batch(folder, tokenizer_folder=None):
    """Return a model, a tokenizer and a batch of `LINES`."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder or folder)
    return model, tokenizer, tokenizer(LINES, padding=True, return_tensors="pt", return_token_type_ids=False)


def assert_same_tokens(folder, model, tokenizer, batch, **options):
    """Check that `generate` and CTranslate2 give equal tokens, greedily and with four beams; return the tokens."""
    end = model.config.eos_token_id
    for search, same in SEARCHES:
        expected = cut_generated_tokens(model.generate(**batch, do_sample=False, **search, **OURS), end)
        assert generate_with_ctranslate2(folder, tokenizer, batch, **same, **THEIRS, **options) == expected
    return expected


CASES = [(name, variant) for name in ROWS for variant in (None, "gqa")]


@pytest.mark.thorough
@needs_engine
@pytest.mark.parametrize("name, variant", CASES, ids=[f"{name}-{variant}" for name, variant in CASES])
@torch.no_grad()
def test_ctranslate2_generates_the_tokens_of_generate(name, variant, tmp_path):
    folder = save_writer(tmp_path / "model", name, variant)
    written = export_ctranslate2(folder, tmp_path / "ct2")
    assert written.agreement.same == written.agreement.inputs and written.architecture == WRITERS[name]
    assert json.loads((tmp_path / "ct2/config.json").read_text())["model_type"] == name.replace("m2m100", "m2m_100")
    assert written.heads["num_key_value_heads"] == (12, 4 if variant else 12)
    result = assert_same_tokens(tmp_path / "ct2", *load_with_batch(folder, tmp_path / "ct2"))
    assert len({token for row in result for token in row}) > 2


def read_heads(folder):
    """Return the key/value heads of each attention in a `model.bin`, by the file's names."""
    data, result = (folder / "model.bin").read_bytes(), {}
    for match in re.finditer(rb"\x00?([\w/]+/num_heads_kv)\x00", data):
        rank, kind, size, value = struct.unpack_from("<BBIi", data, match.end())
        assert (rank, kind, size) == (0, 3, 4)
        result[match[1].decode()] = value
    return result


@needs_engine
@torch.no_grad()
def test_exported_attention_modules_have_their_own_head_counts(tmp_path):
    """Check head counts by encoder, decoder and layer: the file repeats no key or value head."""
    values = {"num_key_value_heads": [1, 6]}
    folder = save_writer(tmp_path / "model", "t5", "mha", encoder_num_key_value_heads=3, per_layer_values=values)
    written = export_ctranslate2(folder, tmp_path / "ct2")
    assert written.heads == {"num_key_value_heads": (12, [1, 6]), "encoder_num_key_value_heads": (12, 3)}
    assert "num_key_value_heads         [1, 6] of 12" in written.summary()
    cross = {f"decoder/layer_{layer}/attention/num_heads_kv": heads for layer, heads in enumerate([1, 6])}
    expected_heads = {
        f"decoder/layer_{layer}/self_attention/num_heads_kv": heads for layer, heads in enumerate([1, 6])
    }
    source = {f"encoder/layer_{layer}/self_attention/num_heads_kv": 3 for layer in range(2)}
    assert read_heads(tmp_path / "ct2") == cross | expected_heads | source
    assert_same_tokens(tmp_path / "ct2", *load_with_batch(folder, tmp_path / "ct2"))


def compute_first_logits(folder, tokenizer, lines):
    """Return CTranslate2's logits [b, vocabulary] of the first token."""
    import ctranslate2

    rows = [tokenizer.convert_ids_to_tokens(tokenizer(line).input_ids) for line in lines]
    translator = ctranslate2.Translator(str(folder), intra_threads=1)
    result = translator.translate_batch(
        rows, beam_size=1, return_logits_vocab=True, min_decoding_length=0, max_decoding_length=1
    )
    return torch.stack([torch.from_numpy(numpy.array(item.logits[0][0])).flatten() for item in result])


@pytest.mark.thorough
@needs_engine
@pytest.mark.parametrize("kind", ["mt5", "t5-v1.1", "t5-epsilon"])
@torch.no_grad()
def test_t5_output_scaling_is_exported(kind, tmp_path):
    """Check the field for output scaling; Transformers 5 ties every T5, and mT5 has no such field."""
    torch.manual_seed(0)
    fields = T5.tiny | {"decoder_start_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
    if kind == "mt5":
        model = transformers.MT5ForConditionalGeneration(transformers.MT5Config(**fields)).eval()
    else:
        more = {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}
        more = more if kind == "t5-v1.1" else {"layer_norm_epsilon": 1.0}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields, **more)).eval()
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.save_pretrained(tmp_path / "model")
    make_word_tokenizer().save_pretrained(tmp_path / "model")
    written = export_ctranslate2(tmp_path / "model", tmp_path / "ct2")
    assert written.agreement.first is None
    scale = b"scale_outputs" in (tmp_path / "ct2/model.bin").read_bytes()
    assert scale == (kind == "t5-epsilon")
    model, tokenizer, batch = load_with_batch(tmp_path / "model", tmp_path / "ct2")
    assert_same_tokens(tmp_path / "ct2", model, tokenizer, batch)
    # Output scaling does not change greedy tokens, so the test also compares logits.
    expected = model(**batch, decoder_input_ids=torch.full((len(LINES), 1), 2)).logits[:, 0]
    torch.testing.assert_close(
        compute_first_logits(tmp_path / "ct2", tokenizer, LINES), expected, atol=1e-4, rtol=1e-4
    )


@needs_engine
@pytest.mark.parametrize("name", ["t5", "marian"])
@torch.no_grad()
def test_latents_are_exported_as_full_projections(name, tmp_path):
    ranks = {"kv_lora_rank": 16, "encoder_kv_lora_rank": 20, "cross_kv_lora_rank": 24}
    folder = save_writer(tmp_path / "model", name, "latent", **ranks)
    export_ctranslate2(folder, tmp_path / "ct2")
    assert set(read_heads(tmp_path / "ct2").values()) == {4, 12} or name == "marian"
    assert_same_tokens(tmp_path / "ct2", *load_with_batch(folder, tmp_path / "ct2"))


@needs_engine
@pytest.mark.parametrize("kind", LANGUAGES)
@torch.no_grad()
def test_target_language_is_generated_first(kind, tmp_path):
    """Check the language as the start token (mBART) or forced first token; the printed code names it."""
    tokenizer = TOKENIZERS[kind](tmp_path)
    source, target = LANGUAGES[kind]
    row = ROWS["mbart" if "mbart" in kind else "m2m100"]
    model = row.make_upstream_model(WRITERS[row.name], vocab_size=len(tokenizer) + 3)
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    start = set_languages(tokenizer, model.config, source, target)
    start.apply_to(model)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    written = export_ctranslate2(tmp_path / "model", tmp_path / "ct2")
    language = tokenizer.convert_ids_to_tokens(start.forced_bos_token_id or start.decoder_start_token_id)
    assert (f"target_prefix=[[{language!r}]]" in written.usage) == (start.forced_bos_token_id is not None)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "ct2")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    batch = saved(["the dog sees a cat", "a"], padding=True, return_tensors="pt")
    options = {} if start.forced_bos_token_id is None else {"target_prefix": [[language]] * 2}
    assert_same_tokens(tmp_path / "ct2", model, saved, batch, **options)
    # Published checkpoints name no target language, so the printed code must ask for it.
    unexported_settings = "pass target_prefix=[["
    assert unexported_settings not in written.usage
    if start.forced_bos_token_id is not None:
        model.generation_config.forced_bos_token_id = model.config.forced_bos_token_id = None
        model.save_pretrained(tmp_path / "model")
        assert unexported_settings in export_ctranslate2(tmp_path / "model", tmp_path / "unexported_settings").usage


@needs_engine
@pytest.mark.parametrize("heads", [None, 2])
@torch.no_grad()
def test_exported_whisper_gives_equal_transcripts(heads, tmp_path, capsys):
    folder = save_whisper_checkpoint(
        tmp_path / "model", {"pad_token_id": 1}, suppress_tokens=[5, 6, *range(30, 60)], begin_suppress_tokens=[7, 8]
    )
    if heads is not None:
        hf_attn_variants.convert(folder, heads, output_dir=tmp_path / "gqa")
        folder = tmp_path / "gqa"
    command = ["export", str(folder), "--to", "ctranslate2", "--output_dir", str(tmp_path / "ct2")]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert f"num_key_value_heads         {heads or 12} of 12" in printed
    config = json.loads((tmp_path / "ct2/config.json").read_text())
    assert config["alignment_heads"] == [[0, 3], [1, 7]] and config["lang_ids"] == [30, 31]
    assert config["suppress_ids_begin"] == [7, 8] and config["suppress_ids"][:2] == [5, 6]
    # The printed code loads AutoProcessor, which finds the class by this name.
    assert json.loads((tmp_path / "ct2/preprocessor_config.json").read_text())["processor_class"] == "WhisperProcessor"
    run_usage(printed.partition("Use it as follows:\n")[2])
    import ctranslate2

    model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    features = torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(3))
    # The prompt names no language, because CTranslate2 treats token ids below the start token (33) as words.
    prompt = [33, 39]
    prompts = torch.tensor([prompt] * 3)
    for step in range(NEW):
        logits = model(input_features=features, decoder_input_ids=prompts).logits[:, -1]
        logits[:, [5, 6, *range(30, 60), *([7, 8] if step == 0 else [])]] = -torch.inf
        prompts = torch.cat([prompts, logits.argmax(-1, keepdim=True)], 1)
    whisper = ctranslate2.models.Whisper(str(tmp_path / "ct2"), intra_threads=1)
    result = whisper.generate(
        ctranslate2.StorageView.from_array(features.numpy()), [prompt] * 3, beam_size=1, max_length=2 * NEW
    )
    expected = [row[: row.index(2)] if 2 in row else row for row in prompts[:, 2:].tolist()]
    assert [item.sequences_ids[0] for item in result] == expected
    assert len({token for row in expected for token in row}) > 2


def run_usage(lines):
    """Run the printed code like a user, in a new namespace."""
    text = "\n".join(line.strip() for line in lines.strip().splitlines())
    assert "ctranslate2" in text
    exec(compile(text, "usage", "exec"), {})


@needs_engine
def test_generation_settings_are_in_the_printed_code_or_listed(tmp_path, capsys):
    folder = save_writer(tmp_path / "model", "marian", "gqa")
    settings = {"num_beams": 3, "max_length": 9, "no_repeat_ngram_size": 2, "length_penalty": 0.8}
    settings |= {"bad_words_ids": [[1], [4, 5]], "forced_bos_token_id": 17, "encoder_no_repeat_ngram_size": 3}
    edit_json(folder / "generation_config.json", **settings)
    command = ["export", str(folder), "--to", "ctranslate2", "--output_dir", str(tmp_path / "ct2")]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    for option in (
        "beam_size=3",
        "max_decoding_length=8",
        "no_repeat_ngram_size=2",
        "length_penalty=0.8",
        "suppress_sequences=[['w4', 'w5']]",
        "target_prefix=[['w17']]",
        "settings not exported       encoder_no_repeat_ngram_size=3",
    ):
        assert option in printed, option
    run_usage(printed.partition("Use it as follows:\n")[2])
    assert printed.index("comparison") < printed.index("Use it as follows")


HEARD = [
    ({}, ["beam_size=1", "'<|en|>', '<|transcribe|>'", "# replace <|en|> by the spoken language"]),
    ({"language": "german", "num_beams": 3, "max_new_tokens": 6}, ["beam_size=3", "'<|de|>'", "max_length=12)"]),
    ({"language": "de", "max_length": 10, "length_penalty": 0.5}, ["length_penalty=0.5", "max_length=12)"]),
    ({"forced_decoder_ids": [[1, 31], [2, 32]]}, ["'<|startoftranscript|>', '<|de|>', '<|transcribe|>'"]),
    (
        {"task": "transcribe", "no_repeat_ngram_size": 2, "bad_words_ids": [[4, 5]], "return_timestamps": True},
        ["no_repeat_ngram_size=2", "settings not exported", "bad_words_ids=[[4, 5]]", "return_timestamps=True"],
    ),
]


@needs_engine
@pytest.mark.parametrize("settings, output_text", HEARD, ids=lambda item: "-".join(item) or "none")
def test_whisper_settings_are_in_the_printed_code_or_listed(settings, output_text, tmp_path, capsys):
    folder = save_whisper_checkpoint(tmp_path / "model", suppress_tokens=[*range(30, 60)])
    edit_json(folder / "generation_config.json", **settings)
    command = ["export", str(folder), "--to", "ctranslate2", "--output_dir", str(tmp_path / "ct2")]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    assert not [item for item in output_text if item not in printed], printed
    assert ("# replace <|en|>" in printed) == ("language" not in settings and "forced_decoder_ids" not in settings)
    unexported_settings = {"bad_words_ids", "return_timestamps"} & settings.keys()
    assert ("settings not exported" in printed) == bool(unexported_settings)
    run_usage(printed.partition("Use it as follows:\n")[2])


@needs_engine
@torch.no_grad()
def test_suppressed_tokens_are_never_generated(tmp_path):
    """Check a Marian, which must not generate its padding token, at any position of its vocabulary."""
    folder = save_writer(tmp_path / "model", "marian", "gqa")
    model, tokenizer, batch = load_with_batch(folder)
    free = {token for row in model.generate(**batch, max_new_tokens=NEW).tolist() for token in row[1:]}
    model.generation_config.bad_words_ids = [[token] for token in sorted({1, 2, *free})]  # 2 is the end token
    edit_json(folder / "generation_config.json", bad_words_ids=model.generation_config.bad_words_ids)
    export_ctranslate2(folder, tmp_path / "ct2")
    result = generate_with_ctranslate2(tmp_path / "ct2", tokenizer, batch, beam_size=1, **THEIRS)
    expected = model.generate(**batch, max_new_tokens=NEW, num_beams=1, do_sample=False)
    assert result == cut_generated_tokens(expected, 2)
    assert not free & {token for row in result for token in row}


@pytest.mark.thorough
@needs_engine
@pytest.mark.parametrize("quantization", CTRANSLATE2_QUANTIZATIONS)
def test_quantized_export_is_smaller_and_loads(quantization, tmp_path):
    folder = save_writer(tmp_path / "model", "t5", "gqa")
    written = export_ctranslate2(folder, tmp_path / "ct2", quantization=quantization)
    size = (tmp_path / "ct2/model.bin").stat().st_size
    full = sum(item.numel() * 4 for item in transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).parameters())
    share = {"float32": 1, "float16": 0.5, "bfloat16": 0.5, "int16": 0.5}.get(quantization, 0.25)
    assert size < full * (share + 0.06)
    assert written.agreement.same_tokens >= written.agreement.tokens * (1 if quantization == "float32" else 0.2)
    assert f"for CTranslate2, {quantization}" in written.summary()
    result, output_text = written.agreement, " ".join(written.summary().split())
    tokens = f"{result.same_tokens} of {result.tokens}"
    if quantization == "float32":
        assert f"comparison {tokens} greedy tokens for 4 inputs" in output_text and "rounds" not in output_text
        return
    assert f"comparison {result.same} of 4 greedy outputs are identical to the model's ({tokens} tokens" in output_text
    assert f"{quantization} rounds" in output_text and "check the quality on your own data" in output_text


@needs_engine
def test_quantization_names_equal_those_of_ctranslate2():
    from ctranslate2.specs.model_spec import ACCEPTED_MODEL_TYPES

    assert sorted(CTRANSLATE2_QUANTIZATIONS) == sorted(ACCEPTED_MODEL_TYPES)


@needs_engine
def test_export_with_other_tokens_raises_an_error(tmp_path, monkeypatch):
    """Check a file with the tensors of another model."""
    from hf_attn_variants.export import ctranslate2

    folder = save_writer(tmp_path / "model", "t5", "gqa")
    build_specification = ctranslate2.build_model_specification

    def with_other_weights(*args):
        spec = build_specification(*args)
        spec.decoder.layer[0].attention.linear[1].weight.tensor.neg_()
        return spec

    monkeypatch.setattr(ctranslate2, "build_model_specification", with_other_weights)
    with pytest.raises(ValueError, match=r"tokens.* 4 of 4 inputs"):
        export_ctranslate2(folder, tmp_path / "ct2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def iterate_table_fields():
    """Yield each field without a counterpart in Transformers, with its prefix, for an encoder-decoder."""
    known = T5.config_class.get_variant_fields()
    for row in VARIANT_FIELDS:
        if "not_in_transformers" in row.tags:
            yield from ((name, row) for name in row.names if name in known)


@pytest.mark.parametrize("name, row", list(iterate_table_fields()), ids=[name for name, _ in iterate_table_fields()])
def test_fields_except_heads_and_latents_raise_an_error(name, row):
    config = T5.make_config("gqa", "T5ForConditionalGeneration")
    model_class = hf_attn_variants.AttnVariantT5ForConditionalGeneration
    check_ctranslate2_support(model_class, config)
    other = {int: 7, str: "another", bool: True, list: ["x2l"], tuple: [-1.0, 1.0]}[row.kind]
    setattr(config, name, other)
    with pytest.raises(ValueError, match=f"`{name}`"):
        check_ctranslate2_support(model_class, config)


@pytest.mark.parametrize(
    "row, head, fields, message",
    [
        (BERT, "BertModel", {}, "BertModel"),
        (ROWS["bart"], "BartForCausalLM", {}, "BartForCausalLM"),
        (ROWS["bart"], "BartForSequenceClassification", {}, "BartForSequenceClassification"),
        (T5, "T5EncoderModel", {}, "T5EncoderModel"),
        (T5, "T5ForConditionalGeneration", {"variant": "talking"}, "`talking_heads`"),
        (
            ROWS["bart"],
            "BartForConditionalGeneration",
            {"per_layer_values": {"attention_kernel": ["elu", None]}},
            "`attention_kernel`",
        ),
        (T5, "T5ForConditionalGeneration", {"feed_forward_proj": "mish"}, "'mish'"),
    ],
)
def test_unsupported_models_raise_before_weights_are_read(row, head, fields, message, tmp_path):
    fields = dict(fields)
    config = row.make_config(fields.pop("variant", "mha"), head, **fields)
    config.architectures = [head]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_ctranslate2_support(*resolve_source_model(json.loads((tmp_path / "config.json").read_text())))


def test_exported_tokens_have_unique_names(caplog):
    """Check that unused token ids get a name, and that tokens beyond the embeddings are dropped with a message."""
    tokenizer = make_word_tokenizer(53)
    config = T5.make_config("gqa", "T5ForConditionalGeneration", eos_token_id=2, vocab_size=60)
    generation = transformers.GenerationConfig(decoder_start_token_id=1, eos_token_id=2)
    tokens = read_tokenizer_vocab(tokenizer, config, generation)
    assert len(tokens.vocabulary) == len({*tokens.vocabulary}) == 60
    assert tokens.vocabulary[56:] == ["w56", "<unused_57>", "<unused_58>", "<unused_59>"] and tokens.prompt == [1]
    tokenizer.add_tokens(["<unused_58>"])
    assert read_tokenizer_vocab(tokenizer, config, generation).vocabulary[57:] == [
        "<unused_58>",
        "_<unused_58>",
        "<unused_59>",
    ]
    config.vocab_size = 50
    assert len(read_tokenizer_vocab(tokenizer, config, generation).vocabulary) == 50
    assert re.search("50 tokens. 8 .* tokens", caplog.text)
    with pytest.raises(ValueError, match="`eos_token_id`"):
        read_tokenizer_vocab(
            tokenizer, config, transformers.GenerationConfig(decoder_start_token_id=1, eos_token_id=[2, 3])
        )
    with pytest.raises(ValueError, match="`decoder_start_token_id`"):
        config.decoder_start_token_id = None
        read_tokenizer_vocab(tokenizer, config, transformers.GenerationConfig(eos_token_id=2))


def test_invalid_options_and_missing_packages_raise_before_any_work(tmp_path, monkeypatch, capsys):
    command = ["export", "x", "--to", "ctranslate2", "--output_dir", "out"]
    with pytest.raises(SystemExit):
        cli.main(["export", "x", "--to", "transformers", "--output_dir", "out", "--quantization", "int8"])
    assert "--quantization is only supported with --to ctranslate2 or onnx" in capsys.readouterr().err
    result = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "ctranslate2" else result(name, *rest)
    )
    assert cli.main(command) == 2
    assert "`pip install ctranslate2`" in capsys.readouterr().err


@needs_engine
@pytest.mark.slow
@pytest.mark.parametrize("decoder, encoder", [(None, None), (2, 8), (1, 4)])
@torch.no_grad()
def test_exported_real_t5_gives_equal_translations(decoder, encoder, shared_data, tmp_path):
    folder = shared_data / "checkpoints/t5-mini-multi30k-en-de"
    if decoder is not None:
        hf_attn_variants.convert(
            folder, decoder, encoder_num_key_value_heads=encoder, method="mean", output_dir=tmp_path / "gqa"
        )
        folder = tmp_path / "gqa"
    export_ctranslate2(folder, tmp_path / "ct2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ct2")
    with gzip.open(shared_data / "multi30k/test_2016_flickr.en.gz", "rt", encoding="utf-8") as file:
        batch = tokenizer([next(file).strip() for _ in range(50)], padding=True, return_tensors="pt")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    assert_same_tokens(tmp_path / "ct2", model, tokenizer, batch)
