"""Check the relatives of BERT, including NomicBERT, in the training commands, plain and converted to fewer heads."""

import json

import pytest
import torch
from fixtures.squad import write_questions
from fixtures.uptraining import make_text
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModel,
    AutoTokenizer,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    NomicBertConfig,
    NomicBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaTokenizerFast,
)

from hf_attn_variants import convert
from hf_attn_variants.commands.training import glue as glue_command
from hf_attn_variants.commands.training import ner, squad, uptrain

pytestmark = pytest.mark.cross_product

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"initializer_range": 0.3}  # attention affects the outputs
MODELS = {
    "roberta": lambda size: RobertaForMaskedLM(
        RobertaConfig(**SIZES, vocab_size=size, pad_token_id=0, type_vocab_size=1, max_position_embeddings=65)
    ),
    "electra": lambda size: ElectraForMaskedLM(ElectraConfig(**SIZES, vocab_size=size, embedding_size=16)),
    "distilbert": lambda size: DistilBertForMaskedLM(
        DistilBertConfig(vocab_size=size, dim=32, n_layers=2, n_heads=4, hidden_dim=48, initializer_range=0.3)
    ),
    "modernbert": lambda size: ModernBertForMaskedLM(
        ModernBertConfig(
            **SIZES | {"initializer_range": 0.1},
            vocab_size=size,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
            local_attention=16,
        )
    ),
    "nomic_bert": lambda size: NomicBertForMaskedLM(NomicBertConfig(**SIZES, vocab_size=size)),
}
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
QUICK = ["--max_train_steps", 2, "--per_device_train_batch_size", 4, "--cpu", "--disable_tqdm"]


@pytest.fixture(scope="module")
def folders(tiny_bert, tmp_path_factory):
    """Two folders per architecture, with BERT's tokenizer: Transformers' model, and one with two key/value heads."""
    folder, folders_by_name = tmp_path_factory.mktemp("relatives"), {}
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    for name, make in MODELS.items():
        torch.manual_seed(0)
        make(len(tokenizer)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        convert(folder / name, 2, method="mean", output_dir=folder / f"{name}-2")
        folders_by_name[name] = folder / name, folder / f"{name}-2"
    return folders_by_name


@pytest.mark.thorough
@EVERY_MODEL
def test_encoder_relatives_classify_pairs(call, folders, glue, name):
    for folder in folders[name]:
        task = ["--task_name", "stsb", "--data_dir", glue / "STS-B", "--max_length", 48]
        results, out = call(glue_command, folder, *task, *QUICK)
        assert results["steps"] == 2 and "eval_spearmanr" in results
        # The saved tokenizer returns only inputs that the model accepts.
        tokenizer, model = AutoTokenizer.from_pretrained(out), AutoModel.from_pretrained(out)
        inputs = tokenizer("A dog.", "A cat.", return_tensors="pt")
        assert ("token_type_ids" in inputs) is (name in ("electra", "nomic_bert"))
        assert model(**inputs).last_hidden_state.shape[-1] == 32


@pytest.mark.thorough
@EVERY_MODEL
@pytest.mark.parametrize("objective", ["mlm", "distill"])
def test_converted_encoder_relatives_are_uptrained(call, folders, tmp_path, name, objective):
    source, grouped = folders[name]
    text = make_text(tmp_path)[0]
    flags = ["--teacher", source, "--objective", objective, "--train_file", text, *QUICK, "--max_train_steps", 12]
    results, out = call(uptrain, grouped, *flags)
    assert results["steps"] == 12 and results["eval_loss"] < results["initial_eval_loss"]
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    known = tokenizer.get("model_input_names", ["token_type_ids"])
    assert ("token_type_ids" in known) is (name in ("electra", "nomic_bert"))


def test_encoder_relatives_answer_questions(call, folders, tmp_path):
    data = write_questions(tmp_path / "questions.json", False)
    lengths = ["--max_length", 48, "--max_query_length", 12, "--doc_stride", 8]
    for folder in folders["roberta"]:
        results, _ = call(squad, folder, "--train_file", data, "--validation_file", data, *lengths, *QUICK)
        assert results["steps"] == 2 and "eval_f1" in results
    with pytest.raises(ValueError, match=r"--max_length must be at most 64, .* got 65"):
        call(squad, folder, "--train_file", data, "--validation_file", data, "--max_length", 65, *QUICK)


def test_byte_level_tokenizer_reads_lists_of_words(call, tmp_path):
    """Check RoBERTa's tokenizer, which marks the beginning of a word with a space."""
    backend = ByteLevelBPETokenizer()
    words = ["Rome", "Ann", "visits"]
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend.train_from_iterator([" ".join(words * 40)], vocab_size=400, special_tokens=special)
    (tmp_path / "files").mkdir()
    backend.save_model(str(tmp_path / "files"))
    files = {name: str(tmp_path / "files" / f) for name, f in (("vocab", "vocab.json"), ("merges", "merges.txt"))}
    tokenizer = RobertaTokenizerFast(**files)
    tokenizer.save_pretrained(tmp_path / "roberta")
    RobertaForMaskedLM(RobertaConfig(**SIZES, vocab_size=len(tokenizer))).save_pretrained(tmp_path / "roberta")
    rows = "".join(f"{word} {tag}\n" for word, tag in zip(words, ("B-LOC", "B-PER", "O"), strict=True)) + "\n"
    (tmp_path / "rows.txt").write_text(rows * 8)
    data = ["--train_file", tmp_path / "rows.txt", "--validation_file", tmp_path / "rows.txt", "--max_length", 16]
    _, out = call(ner, tmp_path / "roberta", *data, *QUICK)
    saved = AutoTokenizer.from_pretrained(out)
    assert saved.tokenize(words, is_split_into_words=True) == [f"Ġ{word}" for word in words]
    assert tokenizer.tokenize(words, is_split_into_words=True) != [f"Ġ{word}" for word in words]
