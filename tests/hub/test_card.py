"""Check that model cards describe the runs."""

import json
import re

import pytest
import yaml
from architectures import BERT, T5
from fixtures.data_files import edit_json
from fixtures.speech import make_feature_extractor, make_tokenizer
from fixtures.uptraining import make_t5, make_text
from huggingface_hub import ModelCard
from relatives import RELATIVES, WHISPER
from transformers import AutoTokenizer

from hf_attn_variants import cli, convert
from hf_attn_variants.files import GENERATED_CARD
from hf_attn_variants.hub import CardOptions, generate_model_card
from hf_attn_variants.hub.card import add_digest_mark, is_unedited_card, refresh_card
from hf_attn_variants.modeling.variant_names import ATTN_VARIANTS_VERSION, NEWEST_TESTED, OLDEST_TESTED

BART, MARIAN = (next(row for row in RELATIVES if row.name == name) for name in ("bart", "marian"))
RESULTS = {
    "eval_accuracy": 0.81254,
    "eval_f1": 0.5,
    "eval_loss": 0.4,
    "eval_samples": 3,
    "eval_runtime": 1.0,
    "eval_samples_per_second": 3.0,
    "steps": 1200,
    "train_samples": 67349,
    "epoch": 2.0,
    "task_name": "sst2",
    "arguments": {"model_name_or_path": "google-bert/bert-base-uncased", "task_name": "sst2"}
    | {"learning_rate": 2e-5, "output_dir": "/home/somebody/runs/sst2", "seed": 7},
    "versions": {"torch": "2.13.0"},
}


def read_front_matter(card):
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", str(card), re.DOTALL)[1])


def make_card(folder, architecture, *args, **fields):
    architecture.make_model(*args, **fields).save_pretrained(folder)
    return str(generate_model_card(folder, "me/x"))


def test_card_describes_the_conversion_report(folder):
    report = json.loads((folder / "conversion_report.json").read_text())
    text = str(generate_model_card(folder, "me/bert-gqa2", CardOptions(base_model="me/tiny", license="mit")))
    assert "grouped-query attention (2 key/value heads for 4 query heads)" in text
    assert "converted and not trained" in text
    assert f"{report['parameters']['before']:,} | {report['parameters']['after']:,}" in text
    assert "relative error" not in text.lower()
    assert "--method mean" in text and "seed 0" in text
    assert "q0 q1" in text and "kv1" in text
    assert 'from_pretrained("me/bert-gqa2", trust_remote_code=True)' in text
    assert ATTN_VARIANTS_VERSION in text
    # The original model is a local folder, which has no meaning elsewhere.
    assert str(folder.parent) not in text and report["source"] not in text
    data = read_front_matter(text)
    assert data["base_model"] == "me/tiny" and data["license"] == "mit"
    assert data["tags"] == ["attn-variants", "grouped-query-attention"] and data["library_name"] == "transformers"
    assert "model-index" not in data


def test_training_scores_are_in_the_model_index(folder):
    (folder / "all_results.json").write_text(json.dumps(RESULTS))
    card = generate_model_card(folder, "me/bert-sst2")
    text = str(card)
    [entry] = read_front_matter(text)["model-index"]
    metrics = {m["type"]: m["value"] for result in entry["results"] for m in result["metrics"]}
    assert metrics == {"accuracy": 0.8125, "f1": 0.5}
    expected = {"name": "GLUE SST2", "type": "nyu-mll/glue", "config": "sst2", "split": "validation"}
    assert entry["results"][0]["dataset"] == expected
    data = read_front_matter(text)
    assert data["base_model"] == "google-bert/bert-base-uncased" and data["datasets"] == ["nyu-mll/glue"]
    assert "| learning_rate | 2e-05 |" in text and "| seed | 7 |" in text and "1,200 optimizer steps" in text
    assert "/home/somebody" not in text
    # huggingface_hub reads the same metadata.
    again = ModelCard(text).data
    assert {result.metric_type: result.metric_value for result in again.eval_results} == metrics


def test_card_omits_unused_features(folder):
    arguments = RESULTS["arguments"] | {"task_name": "SST-2", "num_train_epochs": 3.0, "max_train_steps": 1200}
    local = "./runs/bert-gqa4"  # save_results writes folders like this
    (folder / "all_results.json").write_text(
        json.dumps(RESULTS | {"arguments": arguments | {"model_name_or_path": local}})
    )
    text = str(generate_model_card(folder, "me/bert-sst2"))
    assert read_front_matter(text)["datasets"] == ["nyu-mll/glue"] and "base_model" not in read_front_matter(text)
    assert "| max_train_steps | 1200 |" in text and "num_train_epochs" not in text


def test_loss_is_a_score_only_without_other_metrics(folder):
    (folder / "all_results.json").write_text(json.dumps({"eval_loss": 2.5, "arguments": {}}))
    [result] = ModelCard(str(generate_model_card(folder, "me/x"))).data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_name) == ("loss", 2.5, "held-out text")


@pytest.mark.parametrize(
    "results, expected",
    [
        (
            {"eval_bleu": 30.0, "eval_bleu_beam4": 31.0, "test_bleu": 29.0, "eval_decode_tokens_per_second": 90.0}
            | {"arguments": {"validation_file": ["/data/multi30k/val.jsonl"], "test_source_file": "d/test2016.en.gz"}},
            {
                ("val.jsonl", "validation", "bleu"),
                ("val.jsonl", "validation", "bleu_beam4"),
                ("test2016.en.gz", "test", "bleu"),
            },
        ),
        (
            {"eval_exact_match": 70.0, "arguments": {"task_name": "squad", "validation_file": ["clinical-dev.json"]}},
            {("clinical-dev.json", "validation", "exact_match")},
        ),
        (
            {"eval_exact": 70.0, "eval_f1": 80.0, "eval_HasAns_total": 5, "eval_best_f1_thresh": 0.1}
            | {"eval_windows": 9, "arguments": {"version_2_with_negative": True}},
            {("SQuAD 2.0", "validation", "exact"), ("SQuAD 2.0", "validation", "f1")},
        ),
    ],
)
def test_scores_of_other_scripts_are_separated_from_counts_and_times(folder, results, expected):
    (folder / "all_results.json").write_text(json.dumps(results))
    actual = ModelCard(str(generate_model_card(folder, "me/x"))).data.eval_results
    assert {(item.dataset_name, item.dataset_split, item.metric_type) for item in actual} == expected


def test_further_evaluations_are_validated(folder):
    row = {"task_type": "sentence-similarity", "dataset_type": "sentence-transformers/stsb", "dataset_name": "STS-B"}
    row |= {"dataset_split": "validation", "metric_type": "spearmanr", "metric_value": 0.862}
    assert "| STS-B | validation | spearmanr | 0.862 |" in str(
        generate_model_card(folder, "me/x", CardOptions(evaluations=[row]))
    )
    for wrong, message in [(row | {"score": 1}, "score"), ({"task_type": "x"}, "missing")]:
        with pytest.raises(ValueError, match=message):
            generate_model_card(folder, "me/x", CardOptions(evaluations=[wrong]))


def test_license_and_languages_of_the_source_are_kept(folder):
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage:\n- en\n- de\n---\n# Source\n")
    data = read_front_matter(generate_model_card(folder, "me/x"))
    assert data["license"] == "apache-2.0" and data["language"] == ["en", "de"]
    (folder / "README.md").unlink()
    assert "license" not in read_front_matter(generate_model_card(folder, "me/x"))
    assert "do not state a license" in str(generate_model_card(folder, "me/x"))
    (folder / "README.md").write_text("---\nlicense: [\n---\n")
    with pytest.raises(ValueError, match=r"Cannot read the metadata of"):
        generate_model_card(folder, "me/x")


def test_evaluation_is_not_training_and_lossless_conversion_is_stated(tmp_path):
    make_t5(tmp_path / "t5")
    source, target = make_text(tmp_path)
    width = json.loads((tmp_path / "t5/config.json").read_text())["d_model"]
    convert(tmp_path / "t5", cross_kv_lora_rank=width, output_dir=tmp_path / "exact")
    argv = ["seq2seq", tmp_path / "exact", "--validation_source_file", source, "--validation_target_file", target]
    argv += ["--num_train_epochs", 0, "--max_length", 16, "--output_dir", tmp_path / "scored", "--cpu"]
    assert cli.main([str(item) for item in argv]) == 0
    text = str(generate_model_card(tmp_path / "scored", "me/t5"))
    assert "It was converted and not trained afterwards." in text and "## Evaluation" in text
    assert "optimizer steps" not in text and "| source.txt | validation | bleu |" in text
    assert "expect a lower quality" not in text and "The scores come from one run" not in text
    convert(tmp_path / "exact", num_key_value_heads=1, method="mean", output_dir=tmp_path / "mqa")
    assert "expect a lower quality" in str(generate_model_card(tmp_path / "mqa", "me/t5"))


def test_card_describes_and_cites_windows(tmp_path):
    window = {"attention_pattern": "sliding_window", "attention_window": 8}
    windows = {f"encoder_{name}": value for name, value in window.items()}
    text = make_card(tmp_path, T5, "T5ForConditionalGeneration", "gqa", **windows)
    assert "and a window size of 8 tokens in the self-attention of the encoder. It is implemented as" in text
    assert "| window size (tokens) in the self-attention of the encoder | 8 |" in text
    assert "2004.05150" in text and "in self-attention" not in text


def test_card_describes_and_cites_kernels(tmp_path):
    text = make_card(tmp_path, T5, "T5ForConditionalGeneration", "gqa", cross_attention_kernel="hedgehog")
    assert "and the kernel hedgehog instead of the softmax in cross-attention. It is implemented as" in text
    assert "| kernel instead of the softmax in cross-attention | hedgehog |" in text
    assert "2402.04347" in text and "2006.16236" not in text
    text = make_card(tmp_path / "bert", BERT, "BertModel", attention_kernel="hybrid", attention_window=4)
    assert "a window size of 4 tokens in self-attention and the kernel hybrid instead of" in text
    assert "2410.10254" in text


def test_card_separates_unequal_heads_of_encoder_and_decoder(tmp_path):
    text = make_card(tmp_path, MARIAN, "MarianMTModel", num_key_value_heads=4)
    assert "| decoder attention heads | 12 |" in text and "| encoder attention heads | 4 |" in text
    assert "| attention heads |" not in text
    text = make_card(tmp_path, MARIAN, "MarianForCausalLM", num_key_value_heads=4)
    assert "| decoder attention heads | 12 |" in text and "encoder attention heads" not in text


@pytest.mark.parametrize("head", ["T5EncoderModel", "T5ForTokenClassification"])
def test_card_of_a_t5_encoder_describes_an_encoder(head, tmp_path):
    text = make_card(tmp_path, T5, head, encoder_num_key_value_heads=4)
    assert "with grouped-query attention (4 key/value heads for 12 query heads). It is implemented as" in text
    assert "decoder" not in text.split("## Use")[0] and "none (encoder)" in text
    assert "An encoder has no cache" in text and "The smaller cache helps" not in text
    assert read_front_matter(text)["tags"] == ["attn-variants", "grouped-query-attention"]


def test_card_of_a_decoder_without_a_cache_states_no_cache(tmp_path):
    fields = {"num_key_value_heads": 4, "talking_heads": "both", "talking_heads_dynamic": ["m2l"]}
    text = make_card(tmp_path, T5, "T5ForConditionalGeneration", **fields)
    assert "| cache | none (the dynamic projections need past inputs) |" in text
    assert "The model decodes slowly, without a cache" in text and "The smaller cache helps" not in text


def test_card_of_a_transformers_model_mentions_no_remote_code(plain_bert):
    text = str(generate_model_card(plain_bert, "me/plain"))
    assert "multi-head attention" in text and "trust_remote_code" not in text
    assert "AutoModelForSequenceClassification.from_pretrained" in text
    assert read_front_matter(text)["pipeline_tag"] == "text-classification"


def test_card_of_a_sentence_transformers_folder_shows_its_usage(folder):
    (folder / "modules.json").write_text("[]")
    text = str(generate_model_card(folder, "me/x"))
    data = read_front_matter(text)
    assert data["library_name"] == "sentence-transformers" and data["pipeline_tag"] == "sentence-similarity"
    assert 'SentenceTransformer("me/x", trust_remote_code=True)' in text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("architecture", "head"),
    [
        *((BERT, head) for head in ("BertModel", "BertForMultipleChoice")),
        *((T5, head) for head in ("T5Model", "T5EncoderModel", "T5ForConditionalGeneration")),
        *((MARIAN, head) for head in ("MarianModel", "MarianMTModel")),
    ],
)
def test_usage_example_of_the_card_runs(architecture, head, converted, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(converted)
    architecture.make_model(head, "gqa", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names
    tokenizer.save_pretrained(tmp_path / "model")
    text = str(generate_model_card(tmp_path / "model", "me/x"))
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("me/x", str(tmp_path / "model"))
    exec(compile(block, "card", "exec"), {})


@pytest.mark.parametrize(
    "head, tag",
    [
        ("ForConditionalGeneration", "automatic-speech-recognition"),
        ("ForAudioClassification", "audio-classification"),
        ("Model", "feature-extraction"),
    ],
)
def test_audio_example_of_the_card_uses_a_recording(head, tag, tmp_path):
    for part in (WHISPER.make_model(f"Whisper{head}", "gqa"), make_feature_extractor(), make_tokenizer()):
        part.save_pretrained(tmp_path)
    text = str(generate_model_card(tmp_path, "me/x"))
    assert read_front_matter(text)["pipeline_tag"] == tag
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1].replace("me/x", str(tmp_path))
    exec(compile(block, "card", "exec"), {})


def test_card_states_the_tested_versions_and_the_code_update(folder):
    text = str(generate_model_card(folder, "me/x"))
    assert f"Transformers {OLDEST_TESTED} or newer. It was tested with Transformers {OLDEST_TESTED} to" in text
    assert f" {NEWEST_TESTED}.\n" in text and "`attn-variants refresh me/x --output_dir NEW`" in text
    assert refresh_card(text) == text and refresh_card(text.replace("me/x", "me/y")) is None
    unpaired = text.replace(f"to {NEWEST_TESTED}.", "to 5.1.")
    body = unpaired[: unpaired.rindex("\n<!-- generated")]
    older = add_digest_mark(body).replace(f"{GENERATED_CARD}{ATTN_VARIANTS_VERSION}", f"{GENERATED_CARD}0.0.1")
    assert is_unedited_card(older) and refresh_card(older) == text


def test_edited_card_is_recognized(folder):
    text = str(generate_model_card(folder, "me/x"))
    assert is_unedited_card(text)
    assert not is_unedited_card(text.replace("## Limits", "## My limits"))
    assert not is_unedited_card("# my own card")


def test_card_contains_no_local_folders(folder):
    arguments = {"dataset_name": "/home/somebody/secret project/corpus", "task_name": None, "train_file": "priv/a.txt"}
    (folder / "all_results.json").write_text(json.dumps({"eval_loss": 1.0, "steps": 3, "arguments": arguments}))
    text = str(generate_model_card(folder, "me/x"))
    assert "secret" not in text and "priv/" not in text
    data = read_front_matter(text)
    assert "datasets" not in data and data["model-index"][0]["results"][0]["dataset"]["name"] == "corpus"


def test_custom_license_is_named_and_language_no_is_norwegian(folder):
    link = "https://example.org/terms"
    (folder / "README.md").write_text(
        f"---\nlicense: other\nlicense_name: terms\nlicense_link: {link}\nlanguage:\n- en\n- no\n---\n"
    )
    text = str(generate_model_card(folder, "me/x"))
    data = read_front_matter(text)
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "terms", link)
    assert data["language"] == ["en", "no"] and f"{link}. The code files are Apache-2.0." in text
    card = str(generate_model_card(folder, "me/x", CardOptions(base_model="me/tiny", license="mit")))
    assert "mit. The code files" in card and "license_name" not in read_front_matter(card)
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage: no\n---\n")
    text = str(generate_model_card(folder, "me/x"))
    assert "mit, the license of the original model." in text and read_front_matter(text)["language"] == "no"


@pytest.mark.parametrize(
    "fields, tags, papers, printed",
    [
        (
            {"cross_kv_lora_rank": 40},
            ["multi-head-latent-attention"],
            ["2503.05840"],
            "cached encoder outputs instead of keys and values (40 numbers per source token) in the cross-attention",
        ),
        (
            {"cross_kv_lora_rank": 10, "num_key_value_heads": 4},
            ["grouped-query-attention", "multi-head-latent-attention"],
            ["2305.13245", "2405.04434"],
            "latents of dimension 10 per source token in the cross-attention of all layers",
        ),
        (
            {"per_layer_values": {"kv_lora_rank": [8, None], "num_key_value_heads": [4, 1]}},
            ["multi-query-attention", "grouped-query-attention", "multi-head-latent-attention"],
            ["1911.02150", "2305.13245", "2405.04434"],
            "(1 to 4 key/value heads, by layer, for 12 query heads)",
        ),
        (
            {"per_layer_values": {"kv_lora_rank": [None, 8]}},
            ["multi-head-latent-attention"],
            ["2405.04434"],
            "latents of dimension 8 per token in self-attention, in 1 of 2 layers",
        ),
    ],
    ids=["exact", "low rank", "by layer", "in a layer"],
)
def test_card_describes_counts_and_cites_latents(tmp_path, fields, tags, papers, printed):
    text = make_card(tmp_path, T5, "T5ForConditionalGeneration", **fields)
    assert read_front_matter(text)["tags"] == ["attn-variants", *tags]
    assert re.findall(r"arxiv.org/abs/([\d.]+)", text) == papers
    assert printed in text
    if "cross_kv_lora_rank" in fields:
        size, name = fields["cross_kv_lora_rank"], "bytes of cache per encoder token (float32, all layers)"
        assert f"{name} | {4 * size} (multi-head: {4 * 2 * 2 * 96:,})" in text
    else:
        heads = ", ".join(map(str, fields["per_layer_values"].get("num_key_value_heads", [])))
        assert not heads or f"key/value heads | {heads} (by layer)" in text
        ranks = ", ".join(str(rank or "none") for rank in fields["per_layer_values"]["kv_lora_rank"])
        assert f"latent dimension in self-attention | {ranks} (by layer)" in text
    assert ("benchmark" in text) is (fields == {"cross_kv_lora_rank": 40})


def test_conversion_table_of_the_card_lists_per_layer_heads(folder):
    for heads, row in (
        ([4, [2, 4]], "| num_key_value_heads | 4 | 2, 4 |"),
        ([[4, None], None], "| num_key_value_heads | 4, none | none |"),
        ([4, ["2 |\n# a"]], "| num_key_value_heads | 4 | 2 \\| # a |"),
    ):
        edit_json(folder / "conversion_report.json", heads={"num_key_value_heads": heads})
        assert row in str(generate_model_card(folder, "me/x"))
