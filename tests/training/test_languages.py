"""Check multilingual encoder-decoders: decoder inputs and outputs equal Transformers, and languages are saved."""

import pytest
import torch
from fixtures.commands import run_command
from fixtures.multilingual import LANGUAGES, TOKENIZERS, make_marian_tokenizer
from fixtures.uptraining import make_text
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
)

from hf_attn_variants import convert
from hf_attn_variants.commands import convert as convert_command
from hf_attn_variants.commands.training import seq2seq, uptrain
from hf_attn_variants.model_properties import set_languages
from hf_attn_variants.training.engine.dataloaders import make_source_target_collator
from hf_attn_variants.training.engine.optimization import compute_target_logits, make_cross_entropy_objective

MODELS = {
    "mbart": (MBartConfig, MBartForConditionalGeneration),
    "m2m_100": (M2M100Config, M2M100ForConditionalGeneration),
}
MODELS |= {"mbart50": MODELS["mbart"], "nllb": MODELS["m2m_100"]}
SIZES = {"d_model": 32, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1}
SIZES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64}
EVERY_KIND = pytest.mark.parametrize("kind", TOKENIZERS)


def save(kind, folder, **fields):
    folder.mkdir()
    tokenizer = TOKENIZERS[kind](folder)
    torch.manual_seed(0)
    config_class, model_class = MODELS[kind]
    # As in published checkpoints: mBART-50 starts with the end token, and the configuration of mBART names no start.
    start = {} if kind == "mbart" else {"decoder_start_token_id": 2}
    model = model_class(config_class(vocab_size=300, **SIZES, **start, **fields))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("languages")
    return {kind: save(kind, folder / kind) for kind in TOKENIZERS}


@pytest.fixture
def run(tmp_path):
    source, target = make_text(tmp_path)

    def call(command, model, *more, out="out", length=("--max_train_steps", 2)):
        argv = ["--model_name_or_path", model, "--source_file", source, "--target_file", target, *more]
        argv += ["--validation_source_file", source, "--validation_target_file", target, "--max_eval_samples", 8]
        argv += ["--max_length", 40, "--output_dir", tmp_path / out, *length, "--cpu", "--disable_tqdm"]
        return run_command(command, *argv), tmp_path / out

    return call


def make_flags(kind):
    return ["--source_lang", LANGUAGES[kind][0], "--target_lang", LANGUAGES[kind][1]]


@EVERY_KIND
def test_batches_equal_those_of_the_transformers_collator(folders, kind):
    """Check sources, labels and decoder inputs of rows with unequal lengths, as in `run_translation.py`."""
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    model = AutoModelForSeq2SeqLM.from_pretrained(folders[kind])
    start = set_languages(tokenizer, model.config, *LANGUAGES[kind])
    rows = [("the dog sees", "SEES DOG THE"), ("a cat", "CAT A")]
    actual = make_source_target_collator(tokenizer, 40, None, 40, start.decoder_start_token_id)(
        [(row, (0, 0)) for row in rows]
    )
    upstream_tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    upstream_tokenizer.src_lang, upstream_tokenizer.tgt_lang = LANGUAGES[kind]
    objective = make_cross_entropy_objective(compute_target_logits)
    features = [upstream_tokenizer(source, text_target=target) for source, target in rows]
    expected = DataCollatorForSeq2Seq(upstream_tokenizer, model)(features)
    assert torch.equal(actual["input_ids"], expected["input_ids"])
    assert torch.equal(actual["labels"], expected["labels"])
    with torch.no_grad():
        losses = [objective.loss_sum(model, actual) / objective.count(actual), model(**expected).loss]
    torch.testing.assert_close(*losses)
    target = LANGUAGES[kind][1]
    language = upstream_tokenizer.convert_tokens_to_ids(f"__{target}__" if kind == "m2m_100" else target)
    assert start.decoder_start_token_id == (language if kind == "mbart" else 2)
    assert start.forced_bos_token_id == (None if kind == "mbart" else language)


def check_languages(results, out, kind):
    """Check the languages of a trained model, and return its tokenizer and the ids that surround a target."""
    assert results["steps"] == 2 and "eval_bleu" in results
    tokenizer, settings = AutoTokenizer.from_pretrained(out), GenerationConfig.from_pretrained(out)
    assert (tokenizer.src_lang, tokenizer.tgt_lang) == LANGUAGES[kind]
    marks = tokenizer(text_target="")["input_ids"]
    assert settings.forced_bos_token_id == (None if kind == "mbart" else marks[0])
    assert settings.decoder_start_token_id == (marks[-1] if kind == "mbart" else 2)
    return tokenizer, marks


@pytest.mark.thorough
@EVERY_KIND
def test_training_saves_the_languages(run, folders, kind):
    results, out = run(seq2seq, folders[kind], *make_flags(kind))
    tokenizer, marks = check_languages(results, out, kind)
    model = AutoModelForSeq2SeqLM.from_pretrained(out)
    ids = model.generate(**tokenizer(["the dog"], return_tensors="pt"), max_new_tokens=4, do_sample=False)[0]
    assert ids[:2].tolist()[kind != "mbart"] == (marks[-1] if kind == "mbart" else marks[0])
    # A trained model remembers its languages. Unknown languages raise an error.
    again, _ = run(seq2seq, out, out="again", length=("--num_train_epochs", 0))
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-5)
    with pytest.raises(ValueError, match=r"--target_lang must be .* got 'xx'. Use one of \w+"):
        run(seq2seq, folders[kind], "--source_lang", LANGUAGES[kind][0], "--target_lang", "xx", out="unknown")


@EVERY_KIND
def test_missing_languages_raise_an_error(run, folders, kind):
    with pytest.raises(ValueError, match=r"--source_lang and --target_lang are required"):
        run(seq2seq, folders[kind])
    with pytest.raises(ValueError, match="--source_lang and --target_lang are required"):
        run(seq2seq, folders[kind], "--target_lang", LANGUAGES[kind][1])


@EVERY_KIND
def test_unknown_languages_and_small_models_are_rejected(folders, kind):
    tokenizer = AutoTokenizer.from_pretrained(folders[kind])
    config = AutoModelForSeq2SeqLM.from_pretrained(folders[kind]).config
    source, target = LANGUAGES[kind]
    with pytest.raises(ValueError, match=r"--target_lang must be a language of .* got 'Klingon'"):
        set_languages(tokenizer, config, source, "Klingon")
    config.vocab_size = 3
    with pytest.raises(ValueError, match=f"must have an embedding for {target}"):
        set_languages(tokenizer, config, source, target)


def test_generation_starts_with_the_requested_token(run, folders):
    target = LANGUAGES["mbart"][1]
    _, out = run(seq2seq, folders["mbart"], *make_flags("mbart"), "--forced_bos_token", target)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert GenerationConfig.from_pretrained(out).forced_bos_token_id == tokenizer.convert_tokens_to_ids(target)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["mbart", "m2m_100"])
def test_uptraining_keeps_the_languages(run, folders, tmp_path, kind):
    convert(folders[kind], 2, method="mean", output_dir=tmp_path / "gqa")
    more = ["--teacher", folders[kind], "--objective", "seq2seq", "--predict_with_generate"]
    with pytest.raises(ValueError, match="--source_lang and --target_lang are required"):
        run(uptrain, tmp_path / "gqa", *more)
    results, out = run(uptrain, tmp_path / "gqa", *more, *make_flags(kind))
    check_languages(results, out, kind)


def test_calibration_needs_the_languages(folders, tmp_path):
    text = make_text(tmp_path, 240)[0]
    argv = ["--model_name_or_path", folders["m2m_100"], "--num_key_value_heads", 2, "--output_dir", tmp_path / "gqa"]
    argv += ["--calibration_file", text, "--fit_steps", 0, "--max_length", 16, "--disable_tqdm"]
    with pytest.raises(ValueError, match="--source_lang and --target_lang are required"):
        run_command(convert_command, *argv)
    run_command(convert_command, *argv, *make_flags("m2m_100"))
    assert (tmp_path / "gqa" / "config.json").is_file()


def test_marian_with_two_vocabularies_trains(run, tmp_path):
    (tmp_path / "marian").mkdir()
    tokenizer = make_marian_tokenizer(tmp_path / "marian")
    target_size, pad = len(tokenizer.target_encoder), tokenizer.pad_token_id
    torch.manual_seed(0)
    fields = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0, "bos_token_id": None}
    config = MarianConfig(
        **SIZES, **fields, vocab_size=len(tokenizer), decoder_vocab_size=target_size,
        share_encoder_decoder_embeddings=False, tie_word_embeddings=False,
    )  # fmt: skip
    MarianMTModel(config).save_pretrained(tmp_path / "marian")
    tokenizer.save_pretrained(tmp_path / "marian")
    convert(tmp_path / "marian", 2, method="mean", output_dir=tmp_path / "gqa")
    for folder in ("marian", "gqa"):
        results, out = run(seq2seq, tmp_path / folder, "--learning_rate", "1e-2", out=f"out-{folder}")
        assert results["steps"] == 2 and results["eval_decode_tokens"] > 0
        assert AutoModelForSeq2SeqLM.from_pretrained(out).config.decoder_vocab_size == target_size
        saved = AutoTokenizer.from_pretrained(out)
        assert saved.decode(saved(text_target="THE DOG")["input_ids"], skip_special_tokens=True) == "THE DOG"
