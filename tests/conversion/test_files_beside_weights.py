"""Check where a checkpoint comes from, and the files next to its weights: tokenizers, modules, generation settings."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from fixtures.glue.tiny_bert import make_tiny_bert
from fixtures.speech import make_feature_extractor, make_tokenizer, save_whisper_checkpoint
from safetensors.torch import load_file

from hf_attn_variants.conversion import convert as convert_function
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.checkpoint.source import resolve_checkpoint_folder
from hf_attn_variants.files import REPORT_NAME

from .conftest import load_tensors


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.txt"])
def test_tokenizer_without_a_class_name_loads_after_conversion(tmp_path, file):
    # Old repositories such as bert-base-uncased imply the tokenizer class only by their model_type.
    source, out = make_tiny_bert(tmp_path / "source"), tmp_path / "out"
    for path in source.glob("*token*"):
        if path.name != file:
            path.unlink()
    (source / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 64}')
    convert_checkpoint(source, out, 2)
    expected, result = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert type(result) is type(expected) and result.pad_token == "[PAD]" and result.model_max_length == 64
    texts = (["Two dogs run.", "a cat"], ["Outside.", "in the house"])
    assert result(*texts, padding=True) == expected(*texts, padding=True)
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "BertTokenizer"


def test_tokenizer_class_of_the_source_is_kept(edit_config, tmp_path):
    source = make_tiny_bert(tmp_path / "source")
    (source / "tokenizer_config.json").unlink()
    edit_config(source, tokenizer_class="BertJapaneseTokenizer")
    convert_checkpoint(source, tmp_path / "out", 2)
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings == {"tokenizer_class": "BertJapaneseTokenizer"}


def test_whisper_without_a_processor_name_gets_one(tmp_path):
    """Check that a converted Whisper loads a processor; Transformers finds it by model_type only."""
    source, out = save_whisper_checkpoint(tmp_path / "source"), tmp_path / "out"
    path = source / "preprocessor_config.json"
    settings = json.loads(path.read_text())
    assert "processor_class" not in settings and settings.pop("feature_extractor_type") == "WhisperFeatureExtractor"
    path.write_text(json.dumps(settings))
    expected = transformers.AutoProcessor.from_pretrained(source)
    convert_checkpoint(source, out, 2)
    sound = np.random.default_rng(0).normal(0, 0.1, 16000)
    for result in (
        transformers.AutoProcessor.from_pretrained(out),
        transformers.AutoFeatureExtractor.from_pretrained(out),
    ):
        features = [
            item(sound, sampling_rate=16000, return_tensors="np").input_features for item in (result, expected)
        ]
        assert np.array_equal(*features)
    assert type(transformers.AutoProcessor.from_pretrained(out)) is transformers.WhisperProcessor
    assert json.loads((out / "preprocessor_config.json").read_text()).items() >= settings.items()


def test_whisper_saved_by_hand_has_a_processor(tmp_path):
    source, out = save_whisper_checkpoint(tmp_path / "source"), tmp_path / "out"
    model = convert_function(transformers.AutoModelForSpeechSeq2Seq.from_pretrained(source), 2)
    for part in (model, make_feature_extractor(), make_tokenizer()):
        part.save_pretrained(out)
    assert "processor_class" not in (out / "config.json").read_text() + (out / "preprocessor_config.json").read_text()
    assert type(transformers.AutoProcessor.from_pretrained(out)) is transformers.WhisperProcessor


def test_processor_of_the_source_is_kept(tmp_path):
    source = save_whisper_checkpoint(tmp_path / "source")
    (source / "preprocessor_config.json").unlink()
    # transformers 5 saves one file and no preprocessor_config.json.
    transformers.WhisperProcessor(make_feature_extractor(), make_tokenizer()).save_pretrained(source)
    before = (source / "processor_config.json").read_bytes()
    convert_checkpoint(source, tmp_path / "out", 2)
    assert (tmp_path / "out" / "processor_config.json").read_bytes() == before
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    assert type(transformers.AutoProcessor.from_pretrained(tmp_path / "out")) is transformers.WhisperProcessor


def test_side_files_are_copied(make_source, tmp_path):
    source = make_source()
    copied = {
        "tokenizer.json": "{}",
        "modules.json": json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]),
        "1_Pooling/config.json": "{}",
        "2_Dense/model.safetensors": "weights of another module",
        "1_Pooling/all_results.json": "{}",
        "vocab.txt": "a",
    }
    dropped = [
        "README.md",
        "pytorch_model.bin",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.onnx",
        "rust_model.ot",
        "optimizer.pt",
        "training_args.bin",
        "2_Dense/pytorch_model.bin",
        "backup/model.safetensors",
        "onnx/model.txt",
        "checkpoint-5/trainer_state.json",
        "all_results.json",
        "predictions_dev_STS-B.tsv",
        "predictions_nbest_dev.json",
        "runs/events.out.tfevents.1",
        "train_log.jsonl",
        "training_curves.png",
        REPORT_NAME,
    ]
    for name, content in (copied | dict.fromkeys(dropped, "x") | {".git/HEAD": "x"}).items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(content)
    report = convert_checkpoint(source, tmp_path / "out", 4)
    assert {name: (tmp_path / "out" / name).read_text() for name in copied} == copied
    assert not any((tmp_path / "out" / name).exists() for name in [*dropped, ".git/HEAD"] if name != REPORT_NAME)
    folders = {"onnx/model.txt": "onnx/", "checkpoint-5/trainer_state.json": "checkpoint-5/"}
    folders["runs/events.out.tfevents.1"] = "runs/"
    assert report.files_left_out == sorted(folders.get(name, name) for name in dropped)
    assert json.loads((tmp_path / "out" / REPORT_NAME).read_text())["method"] == "mean"


def test_links_in_the_hub_cache_are_followed(make_source, tmp_path):
    source = make_source()
    (source / "vocab.txt").write_text("words")
    cached, blobs = tmp_path / "models--me--bert/snapshots/0a1b", tmp_path / "models--me--bert/blobs"
    cached.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, blobs / str(number))
        (cached / path.name).symlink_to(Path("../../blobs") / str(number))
    convert_checkpoint(cached, tmp_path / "out", 4)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "vocab.txt").read_text() == "words"


def test_linked_module_folder_is_copied(make_source, tmp_path):
    source = make_source()
    elsewhere = source / "pooling"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    (source / "1_Pooling").symlink_to(elsewhere)
    (source / "circle").symlink_to(source)
    report = convert_checkpoint(source, tmp_path / "out", 4)
    assert (tmp_path / "out" / "1_Pooling" / "config.json").read_text() == "{}"
    assert "1_Pooling/config.json" in report.files_copied and not (tmp_path / "out" / "circle").exists()


@pytest.fixture
def t5_source(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def test_generation_settings_in_an_old_config_are_kept(t5_source, edit_config, tmp_path):
    convert_checkpoint(t5_source, tmp_path / "plain", 2)
    (t5_source / "generation_config.json").unlink()
    convert_checkpoint(t5_source, tmp_path / "without", 2)
    assert not (tmp_path / "without" / "generation_config.json").exists()
    edit_config(t5_source, num_beams=4, length_penalty=0.6)
    convert_checkpoint(t5_source, tmp_path / "out", 2)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    for model in (loaded, convert_function(t5_source, 2)):
        assert (model.generation_config.num_beams, model.generation_config.length_penalty) == (4, 0.6)
        assert model.generation_config.decoder_start_token_id == 0


def test_decoder_without_cache_support_disables_use_cache(t5_source, tmp_path):
    assert json.loads((t5_source / "generation_config.json").read_text())["use_cache"]
    fields = {"talking_heads": "both", "talking_heads_dynamic": ["m2l"]}
    convert_checkpoint(t5_source, tmp_path / "out", **fields)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    for model in (loaded, convert_function(t5_source, **fields)):
        assert model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, min_new_tokens=3).shape == (1, 4)


def test_unreachable_hub_falls_back_to_the_cache(monkeypatch):
    class NetworkError(Exception):
        """An error of the client's HTTP library that is not an OSError."""

    def fail(*args, **kwargs):
        raise NetworkError

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    with pytest.raises(OSError, match="cannot be downloaded"):
        resolve_checkpoint_folder("nobody/has-this-checkpoint")


def test_hub_pickles_raise_before_the_download(monkeypatch):
    files = ["config.json", "pytorch_model.bin", "training_args.bin"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *args, **kwargs: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin in nobody/old is a pickle.*--allow_pickle"):
        resolve_checkpoint_folder("nobody/old")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda **arguments: arguments["allow_patterns"][0])
    assert resolve_checkpoint_folder("nobody/old", with_weights=False) == Path("config.json")


def test_interrupted_download_raises_an_error(monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("connection lost")

    files = ["config.json", "model.safetensors", "modules.json", "2_Dense/pytorch_model.bin", "onnx/pytorch_model.bin"]
    files += ["3_Dense/pytorch_model.bin", "3_Dense/model.safetensors"]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *args, **kwargs: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(OSError, match=r"'nobody/one' .*\(RuntimeError: connection lost\)"):
        resolve_checkpoint_folder("nobody/one")
    assert "pickled weights of 2_Dense" in caplog.text


def pickle_checkpoint(source, shards=1):
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, source / "pytorch_model.bin")
        return source
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        torch.save({name: tensors[name] for name in names[i::shards]}, source / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return source


@pytest.mark.parametrize("shards", [1, 2])
def test_permitted_pickle_becomes_safetensors(make_source, tmp_path, shards):
    source = make_source()
    convert_checkpoint(source, tmp_path / "expected", 4)
    pickle_checkpoint(source, shards)
    with pytest.raises(ValueError, match="is a pickle"):
        convert_checkpoint(source, tmp_path / "out", 4)
    report = convert_checkpoint(source, tmp_path / "out", 4, allow_pickle=True)
    expected, stored = load_tensors(tmp_path / "expected"), load_tensors(tmp_path / "out")
    assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items())
    assert not list((tmp_path / "out").glob("*.bin")) and report.files_left_out == []
    assert len(list((tmp_path / "out").glob("model*.safetensors"))) == shards
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out")


def test_missing_source_raises_an_error(tmp_path):
    for name in (str(tmp_path / "nothing"), "./nothing", "a/b/c"):
        with pytest.raises(FileNotFoundError, match="neither an existing folder"):
            convert_checkpoint(name, tmp_path / "out", 4)
    with pytest.raises(OSError, match="cannot be downloaded"):
        convert_checkpoint("someone/nothing-of-the-kind", tmp_path / "out", 4)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="Pass the checkpoint folder"):
        convert_checkpoint(tmp_path / "file", tmp_path / "out", 4)


def test_broken_link_error_names_the_link(make_source, tmp_path):
    source = make_source()
    (source / "vocab.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(FileNotFoundError, match=r"vocab.txt is a broken link"):
        convert_checkpoint(source, tmp_path / "out", 4)
    assert not (tmp_path / "out").exists()


def test_empty_source_name_raises_an_error(tmp_path, monkeypatch, make_source):
    monkeypatch.chdir(make_source())
    with pytest.raises(FileNotFoundError, match="'' is neither"):
        convert_checkpoint("", tmp_path / "out", 4)
