"""Check that checkpoints are read and written tensor by tensor like by safetensors, and errors for broken files."""

import json
import os
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_attn_variants.conversion.checkpoint import tensor_files
from hf_attn_variants.conversion.checkpoint.tensor_files import (
    SAFETENSORS_DTYPE_NAMES,
    SafetensorsWriter,
    TensorEntry,
    cast_tensor,
    get_safetensors_dtype,
    open_checkpoint,
    write_index,
)

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"


def sample_tensors():
    torch.manual_seed(0)
    tensors = {f"of.{name}": torch.randn(3, 5).mul(4).to(dtype) for dtype, name in SAFETENSORS_DTYPE_NAMES.items()}
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "last": torch.arange(7)}


def is_bit_equal(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def make_raw_safetensors(header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


@pytest.mark.parametrize("chunk_bytes", [8, 2**24])
def test_reader_returns_the_stored_tensors(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", chunk_bytes)
    tensors = sample_tensors()
    save_file(tensors, tmp_path / FILE)
    with open_checkpoint(tmp_path) as reader:
        assert set(reader.entries) == set(tensors) and reader.index_metadata is None
        for name, tensor in tensors.items():
            assert is_bit_equal(reader.read(name), tensor), name
            chunks = [*reader.iterate_chunks(name), torch.empty(0, dtype=tensor.dtype)]
            assert is_bit_equal(
                torch.cat([c.view(torch.uint8) for c in chunks]), tensor.reshape(-1).view(torch.uint8)
            ), name


def test_written_files_load_with_safetensors(tmp_path):
    tensors = sample_tensors()
    dtypes = {name: get_safetensors_dtype(tensor.dtype) for name, tensor in tensors.items()}
    entries = {name: TensorEntry(FILE, dtypes[name], tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SafetensorsWriter(tmp_path / FILE, entries) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    loaded = load_file(tmp_path / FILE)
    assert all(is_bit_equal(loaded[name], tensor) for name, tensor in tensors.items()) and len(loaded) == len(tensors)
    with safe_open(tmp_path / FILE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    with open_checkpoint(tmp_path) as reader:
        sizes = {name: tensors[name].element_size() for name in tensors}
        assert all(entry.begin % sizes[name] == 0 for name, entry in reader.entries.items())


def test_writer_rejects_tensors_that_differ_from_the_header(tmp_path):
    entries = {"a": TensorEntry(FILE, "F32", (2, 2)), "b": TensorEntry(FILE, "F32", (1,))}
    writer = SafetensorsWriter(tmp_path / FILE, entries)
    for name, tensor, message in [
        ("a", torch.zeros(2, 3), "'a' in .* must be F32"),
        ("a", torch.zeros(2, 2, dtype=torch.float16), "'a' in .* must be F32"),
    ]:
        with pytest.raises(ValueError, match=message):
            writer.write(name, tensor)
    with pytest.raises(KeyError, match="c"):
        writer.write("c", torch.zeros(1))
    writer.write("a", torch.zeros(2, 2))
    with pytest.raises(KeyError, match="a"):
        writer.write("a", torch.zeros(2, 2))
    with pytest.raises(ValueError, match="bytes"):
        writer.write_chunks("b", [torch.zeros(1), torch.zeros(1)])
    with pytest.raises(ValueError, match=r"1 missing.*'b'"):
        writer.close()


def save_sharded(folder):
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": torch.ones(4)}, folder / "model-00002-of-00002.safetensors")
    names = {"a": "00001", "b": "00001", "c": "00002"}
    weight_map = {name: f"model-{number}-of-00002.safetensors" for name, number in names.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 36, "note": "kept"}, "weight_map": weight_map}))


def test_shards_and_index_are_read(tmp_path):
    save_sharded(tmp_path)
    with open_checkpoint(tmp_path) as reader:
        assert reader.read("c").tolist() == [1.0] * 4
        assert [reader.entries[name].file[6:11] for name in "abc"] == ["00001", "00001", "00002"]
        metadata = reader.index_metadata | {"total_parameters": 1}
        write_index(tmp_path / "new.json", reader.entries, metadata, 99)
    index = json.loads((tmp_path / "new.json").read_text())
    assert index["metadata"] == {"total_size": 99, "note": "kept", "total_parameters": 9}
    assert index["weight_map"] == json.loads((tmp_path / INDEX).read_text())["weight_map"]


def test_missing_shard_error_names_the_shard(tmp_path):
    save_sharded(tmp_path)
    os.remove(tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match=r"1 of 2 shards are missing in .*: model-00002-of-00002"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "a\\b", "", 3]
)
def test_index_outside_the_folder_raises_an_error(tmp_path, shard):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match="must be files in the same folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": [1]}', "{}", '{"weight_map": {"a": ["x"]}}'])
def test_invalid_index_raises_an_error(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match="must be a valid shard index"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("cut", [3, 8, 20, -1])
def test_truncated_file_error_names_the_file(tmp_path, cut):
    save_file({"a": torch.ones(100)}, tmp_path / FILE)
    content = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(content[:cut])
    with pytest.raises(OSError, match=r"model\.safetensors is truncated or not a safetensors file"):
        open_checkpoint(tmp_path)


def make_entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    "content",
    [
        make_raw_safetensors(b"not json"),
        make_raw_safetensors({"a": 1}),
        make_raw_safetensors({"a": make_entry(offsets=(0, 4))}, bytes(4)),
        make_raw_safetensors({"a": make_entry(offsets=(4, 12))}, bytes(12)),
        make_raw_safetensors({"a": make_entry(), "b": make_entry(offsets=(4, 12))}, bytes(12)),
        make_raw_safetensors({"a": make_entry(shape=(-2,))}, bytes(8)),
        make_raw_safetensors({"a": make_entry()}, bytes(9)),
        b"\xff" * 64,
    ],
)
def test_corrupt_file_error_names_the_file(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(OSError, match=r"model\.safetensors is truncated or not a safetensors file"):
        open_checkpoint(tmp_path)


def test_unsupported_dtype_raises_an_error(tmp_path):
    (tmp_path / FILE).write_bytes(make_raw_safetensors({"a": make_entry("F4", (2,), (0, 1))}, bytes(1)))
    with pytest.raises(ValueError, match=r"'a' .* must have a dtype that PyTorch supports, got F4"):
        open_checkpoint(tmp_path)


def test_git_lfs_pointer_error_explains_the_pointer(tmp_path):
    (tmp_path / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    with pytest.raises(OSError, match="git lfs pull"):
        open_checkpoint(tmp_path)


def test_duplicate_tensor_in_shards_raises_an_error(tmp_path):
    save_sharded(tmp_path)
    save_file({"a": torch.ones(2), "c": torch.ones(4)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match="'a' is in both"):
        open_checkpoint(tmp_path)


def test_folder_without_weights_raises_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must contain model\.safetensors or"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_is_read_only_with_permission(tmp_path, zipped):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin in .* is a pickle file.*--allow_pickle"):
        open_checkpoint(tmp_path)
    with open_checkpoint(tmp_path, allow_pickle=True) as reader:
        for name, tensor in tensors.items():
            assert is_bit_equal(reader.read(name), tensor)
            assert is_bit_equal(torch.cat(list(reader.iterate_chunks(name))), tensor.reshape(-1))


class RunsCode:
    def __reduce__(self):
        return (os.system, ("touch executed",))


def test_pickle_with_code_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": RunsCode()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be read with weights_only=True"):
        open_checkpoint(tmp_path, allow_pickle=True)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [[1], {"a": 3}])
def test_pickle_of_another_object_raises_an_error(tmp_path, content):
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must contain only a model's `state_dict`"):
        open_checkpoint(tmp_path, allow_pickle=True)


def test_overflowing_cast_raises_an_error():
    tensor = torch.tensor([1.0, 1e5])
    assert cast_tensor(tensor, torch.bfloat16, "a").dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"'a' .* too large for torch\.float16"):
        cast_tensor(tensor, torch.float16, "a")
    assert torch.isinf(cast_tensor(torch.tensor([torch.inf]), torch.float16, "a")).all()
