"""Check a converted all-MiniLM-L6-v2 as a model of sentence-transformers."""

import json
import textwrap
from pathlib import Path

import datasets
import pytest
import torch
from fixtures.elsewhere import WITHOUT_PACKAGE, run_elsewhere
from hub.local_hub import LocalHub
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

import hf_attn_variants
from hf_attn_variants.inspection import sentence_embeddings

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "push_to_hub.py"
SENTENCES = ["Two dogs run in the snow.", "Dogs are running outside.", "The stock market fell sharply on Monday."]

ELSEWHERE = WITHOUT_PACKAGE + textwrap.dedent(
    """
    import json
    from sentence_transformers import SentenceTransformer

    folder, sentences = sys.argv[1], json.loads(sys.argv[2])
    model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
    print(json.dumps(model.encode(sentences).tolist()))
    """
)


@pytest.fixture(scope="module")
def expected(minilm_gqa4):
    model, tokenizer = AutoModel.from_pretrained(minilm_gqa4), AutoTokenizer.from_pretrained(minilm_gqa4)
    # The last module of the checkpoint scales embeddings to length 1.
    return torch.nn.functional.normalize(sentence_embeddings(model, tokenizer, SENTENCES), dim=-1)


def test_sentence_transformer_equals_our_embeddings(minilm_gqa4, expected):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(minilm_gqa4), trust_remote_code=True, device="cpu")
    assert model[0].auto_model.config.num_key_value_heads == 4
    torch.testing.assert_close(torch.tensor(model.encode(SENTENCES)), expected, atol=1e-5, rtol=0)


def encode_elsewhere(folder, tmp_path):
    """Return the embeddings of `SENTENCES` from a process without this package."""
    printed = run_elsewhere("-c", ELSEWHERE, folder, json.dumps(SENTENCES), cwd=tmp_path)
    return torch.tensor(json.loads(printed.splitlines()[-1]))


@pytest.mark.thorough
def test_sentence_transformer_loads_without_this_package(minilm_gqa4, expected, tmp_path):
    pytest.importorskip("sentence_transformers")
    torch.testing.assert_close(encode_elsewhere(minilm_gqa4, tmp_path), expected, atol=1e-5, rtol=0)


# Fields that the encoder of Transformers would ignore or could not load.
T5_FIELDS = {
    "windows": {"encoder_attention_pattern": "sliding_window", "encoder_attention_window": 2},
    "talking heads": {"talking_heads": "both", "talking_heads_init": "random"},
    "sinusoids": {"position_embedding_type": "sinusoidal"},
    "additive scores": {"score_function": "additive"},
    "key/value heads": {"encoder_num_key_value_heads": 2},
    "latents": {"encoder_kv_lora_rank": 16},
}
T5_SIZES = {"vocab_size": 60, "d_model": 48, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def save_t5(folder, name, fields):
    """Save and return a sentence-transformers model of an encoder-decoder, and return embeddings of `SENTENCES`."""
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    words = dict.fromkeys(word for sentence in SENTENCES for word in sentence.split())
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}, "<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, model_input_names=["input_ids", "attention_mask"], **special
    )
    torch.manual_seed(0)
    config = getattr(hf_attn_variants, f"AttnVariant{name}Config")(**T5_SIZES, **fields, dropout_rate=0.0)
    model = getattr(hf_attn_variants, f"AttnVariant{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.tie_weights()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states, mask = model.get_encoder()(**batch).last_hidden_state, batch["attention_mask"][..., None]
    model.save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    trusted = {"model_kwargs": {"trust_remote_code": True}, "config_kwargs": {"trust_remote_code": True}}
    encoder = modules.Transformer(str(folder / "t5"), **trusted)
    assert type(encoder.auto_model).__name__ == f"AttnVariant{name}EncoderModel"
    library = pytest.importorskip("sentence_transformers")
    sentence_model = library.SentenceTransformer(modules=[encoder, modules.Pooling(48)], device="cpu")
    sentence_model.save_pretrained(str(folder / "saved"))
    return sentence_model, (states * mask).sum(1) / mask.sum(1)


@pytest.mark.parametrize("name", ["T5", "UMT5"])
@pytest.mark.parametrize("fields", T5_FIELDS.values(), ids=T5_FIELDS)
def test_t5_encoder_of_a_sentence_transformer_is_ours(name, fields, tmp_path):
    model, expected = save_t5(tmp_path, name, fields)
    torch.testing.assert_close(torch.tensor(model.encode(SENTENCES)), expected, atol=1e-5, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["T5", "UMT5"])
def test_t5_encoder_loads_without_this_package(name, tmp_path):
    _, expected = save_t5(tmp_path, name, T5_FIELDS["windows"])
    actual = encode_elsewhere(tmp_path / "saved", tmp_path)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.mark.thorough
def test_sentence_transformer_trainer_saves_the_code(minilm_gqa4, expected, tmp_path):
    library, losses = map(pytest.importorskip, ("sentence_transformers", "sentence_transformers.losses"))
    model = library.SentenceTransformer(str(minilm_gqa4), trust_remote_code=True, device="cpu")
    rows = {"sentence1": SENTENCES, "sentence2": [SENTENCES[1], SENTENCES[1], SENTENCES[0]], "score": [0.0, 1.0, 0.0]}
    arguments = library.SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=2, learning_rate=1e-4, report_to="none", save_strategy="no", use_cpu=True
    )
    loss = losses.CosineSimilarityLoss(model)
    library.SentenceTransformerTrainer(model, arguments, datasets.Dataset.from_dict(rows), loss=loss).train()
    trained = torch.tensor(model.encode(SENTENCES))
    assert (trained[0] @ trained[1]) < (expected[0] @ expected[1]) - 1e-3  # the label of this pair is 0
    model.save_pretrained(str(tmp_path / "trained"))
    torch.testing.assert_close(encode_elsewhere(tmp_path / "trained", tmp_path), trained, atol=1e-5, rtol=0)


# A script that loads a pushed model with both libraries, without this package, and scores it on sentence pairs.
SCORED_ELSEWHERE = WITHOUT_PACKAGE + textwrap.dedent(
    """
    import csv, json
    import torch
    from scipy.stats import spearmanr
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel

    repo_id, revision, path = sys.argv[1:]
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\\t", quoting=csv.QUOTE_NONE))
    model = SentenceTransformer(repo_id, revision=revision, trust_remote_code=True, device="cpu")
    embeddings = [torch.tensor(model.encode([row[name] for row in rows])) for name in ("sentence1", "sentence2")]
    cosines = torch.nn.functional.cosine_similarity(*embeddings)
    plain = AutoModel.from_pretrained(repo_id, revision=revision, trust_remote_code=True)
    print(json.dumps([spearmanr(cosines, [float(row["score"]) for row in rows]).statistic, type(plain).__name__]))
    """
)


@pytest.mark.slow
def test_pushed_sentence_transformer_keeps_its_score(minilm_gqa4, shared_data, tmp_path):
    """Check the Spearman correlation on STS-B dev: 0.804 for 4 heads, see test_sentence_similarity.py."""
    pytest.importorskip("sentence_transformers")
    with LocalHub() as hub:
        flags = ["--model_name_or_path", minilm_gqa4, "--repo_id", "me/minilm-gqa4"]
        run_elsewhere(SCRIPT, *flags, cwd=tmp_path, hub=hub, has_package=True)
        arguments = ["me/minilm-gqa4", hub.head("me/minilm-gqa4"), shared_data / "glue/STS-B/dev.tsv"]
        printed = run_elsewhere("-c", SCORED_ELSEWHERE, *arguments, cwd=tmp_path / "other", hub=hub)
    spearman, loaded = json.loads(printed.splitlines()[-1])
    assert loaded == "AttnVariantBertModel" and spearman == pytest.approx(0.8043, abs=0.0005)
