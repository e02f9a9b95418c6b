"""Check hostile and fuzzed checkpoints: an error with a message, without a crash, a hang or a large allocation.

Hypothesis tries the same inputs each time: 400 safetensors files, 200 shard names, 400 configurations per architecture
in memory, and 80 each with `convert_checkpoint` and `attn-variants inspect`. `SECONDS` and `MEMORY` limit each input.
"""

import copy
import json
import os
import resource
import signal
import struct
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from architectures import ARCHITECTURES
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hf_attn_variants import cli
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.conversion.checkpoint.tensor_files import open_checkpoint
from hf_attn_variants.files import INDEX_NAME, WEIGHTS_NAME

SECONDS, MEMORY = 30, 2**30
CLEAR = (ValueError, OSError, TypeError)
BASES = {"bert": "BertModel", "albert": "AlbertModel", "t5": "T5ForConditionalGeneration"}
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)


def make_hypothesis_settings(count):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks)


class HungError(BaseException):
    """A BaseException for hangs, so that no code handles it as its own error."""


@contextmanager
def limit_time_and_memory():
    """Stop calls that take longer than `SECONDS` or need more than `MEMORY` additional address space."""

    def stop(*_):
        raise HungError

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def assert_succeeds_or_explains(action, *clear):
    with limit_time_and_memory():
        try:
            return action()
        except (*CLEAR, *clear) as error:
            assert str(error).strip(), f"{type(error).__name__} without a message"


# Safetensors files and their index.

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["F32", "I64"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
SIZES = st.integers(-2, 12) | st.sampled_from([2**31, 2**63, 10**30, True, 1.0, "4", None])
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "F16", "U8", "I64", "F4", "C64", "", 7]),
        "shape": st.lists(SIZES, max_size=3) | ANYTHING,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | ANYTHING,
    }
)
HEADERS = (
    st.dictionaries(st.text(max_size=4), ENTRIES | ANYTHING, max_size=3).map(lambda value: json.dumps(value).encode())
    | ANYTHING.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=40)
)
FILES = st.builds(
    lambda header, length, data: struct.pack("<Q", len(header) if length is None else length) + header + data,
    HEADERS,
    st.none() | st.integers(0, 60) | st.sampled_from([2**27, 2**40, 2**64 - 1]),
    st.binary(max_size=64),
)
DEEP = b"[" * 200_000


@pytest.mark.thorough
@make_hypothesis_settings(400)
@given(content=FILES | st.binary(max_size=64))
@example(content=struct.pack("<Q", len(DEEP)) + DEEP)
@example(content=struct.pack("<Q", 200_002) + b'{"a":' * 40_000 + b"  ")
def test_fuzzed_safetensors_files_load_or_raise_an_error(content, tmp_path):
    (tmp_path / WEIGHTS_NAME).write_bytes(content)

    def read_all():
        with open_checkpoint(tmp_path) as reader:
            for name, entry in reader.entries.items():
                sum(chunk.numel() for chunk in reader.iterate_chunks(name))
                if entry.numel < 2**20:
                    reader.read(name)

    assert_succeeds_or_explains(read_all)


PIECES = st.sampled_from(["..", "/", "\\", ".", "a", "model.safetensors", "\0", "C:", "~", "%2e", "etc/passwd"])
SHARDS = st.lists(PIECES, max_size=4).map("".join) | ANYTHING


@make_hypothesis_settings(200)
@given(shard=SHARDS)
@example(shard="../outside.safetensors")
def test_shards_outside_the_folder_raise_an_error(shard, tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir(exist_ok=True)
    save_file({}, tmp_path / "outside.safetensors")
    (inside / INDEX_NAME).write_text(json.dumps({"weight_map": {"weight": shard}}))
    with limit_time_and_memory(), pytest.raises((ValueError, OSError), match=r"shard|index"):
        open_checkpoint(inside)


# Configurations.

NUMBERS = [0, -1, -(2**63), 7, 10**6, 2**31, 2**63, 10**18, 10**30, 0.5, float("nan"), float("inf"), True, None]
OTHERS = ["12", "", "eager", "../../elsewhere", "\0", "x" * 1000, [], {}, [1, 2], {"a": 1}, {"0": "a"}, [None]]
HOSTILE = st.sampled_from([*NUMBERS, *OTHERS])
ELSEWHERE = {"AutoConfig": "evil/repo--configuration_evil.Evil", "AutoModel": "../../evil.Evil"}
OTHER_FIELDS = """architectures auto_map model_type dtype torch_dtype per_layer_config quantization_config num_labels
    id2label label2id attn_implementation _attn_implementation output_attentions is_decoder add_cross_attention
    use_return_dict problem_type transformers_version new_field""".split()


def make_hostile_configs(architecture):
    plain = make_plain_config(architecture)
    fields = st.sampled_from(sorted({*plain, *architecture.make_config("mha").to_dict(), *OTHER_FIELDS}))
    return st.dictionaries(fields, HOSTILE, min_size=1, max_size=3).map(lambda changed: plain | changed)


def make_plain_config(architecture):
    config = architecture.upstream_config_class(**architecture.tiny).to_dict()
    return config | {"architectures": [BASES[architecture.name]]}


@pytest.mark.thorough
@EVERY_ARCHITECTURE
@make_hypothesis_settings(400)
@given(data=st.data())
def test_hostile_configurations_are_built_or_raise_an_error(architecture, data):
    values = data.draw(make_hostile_configs(architecture))
    # The checks of Transformers raise a special error type with a message.
    assert_succeeds_or_explains(
        lambda: architecture.config_class.from_dict(copy.deepcopy(values)), StrictDataclassError
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with a tiny checkpoint of each architecture, whose config.json the tests replace."""
    folders = {}
    for architecture in ARCHITECTURES:
        folders[architecture.name] = tmp_path_factory.mktemp(architecture.name)
        architecture.make_upstream_model(BASES[architecture.name]).save_pretrained(folders[architecture.name])
    return folders


@pytest.mark.thorough
@EVERY_ARCHITECTURE
@make_hypothesis_settings(80)
@given(data=st.data())
def test_hostile_configurations_are_converted_or_raise_an_error(architecture, checkpoints, tmp_path, data):
    folder = checkpoints[architecture.name]
    (folder / "config.json").write_text(json.dumps(data.draw(make_hostile_configs(architecture))))
    output = Path(tempfile.mkdtemp(dir=tmp_path)) / "out"
    if assert_succeeds_or_explains(lambda: convert_checkpoint(folder, output, 1)) is None:
        assert not output.exists() and not list(output.parent.iterdir())


@pytest.mark.thorough
@EVERY_ARCHITECTURE
@make_hypothesis_settings(80)
@given(data=st.data())
def test_hostile_configurations_are_inspected_or_raise_an_error(architecture, checkpoints, data, capsys):
    folder = checkpoints[architecture.name]
    (folder / "config.json").write_text(json.dumps(data.draw(make_hostile_configs(architecture))))
    with limit_time_and_memory():
        status = cli.main(["inspect", os.fspath(folder), "--json"])
    errors = capsys.readouterr().err
    assert status == 0 or (status == 2 and errors.startswith("error: ") and len(errors.splitlines()) == 1)


@EVERY_ARCHITECTURE
def test_code_named_by_a_config_is_not_read(architecture, checkpoints, tmp_path):
    folder = checkpoints[architecture.name]
    (folder / "config.json").write_text(json.dumps(make_plain_config(architecture) | {"auto_map": ELSEWHERE}))
    convert_checkpoint(folder, tmp_path / "out", 1)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "Evil" not in json.dumps(config)
    assert (tmp_path / "out" / f"{architecture.config_class.modeling_file}.py").is_file()
    assert config["auto_map"]["AutoConfig"] == f"configuration_attn_variants.{architecture.config_class.__name__}"


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b'{"a":' * 100_000, b'{"model_type": "bert", "a": ' + b"9" * 9999]
)
def test_unparseable_config_raises_an_error(content, checkpoints, tmp_path, capsys):
    folder = checkpoints["bert"]
    (folder / "config.json").write_bytes(content)
    with limit_time_and_memory(), pytest.raises(ValueError, match=r"config\.json"):
        convert_checkpoint(folder, tmp_path / "out", 1)
    with limit_time_and_memory():
        assert cli.main(["inspect", os.fspath(folder)]) == 2
    assert "config.json" in capsys.readouterr().err
