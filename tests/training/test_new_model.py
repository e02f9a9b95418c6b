"""Check models from scratch: a flag for each field of the table, and overrides of all other fields."""

import dataclasses
import json

import pytest
from transformers import AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_attn_variants.commands.training import pretrain, pretrain_t5, seq2seq
from hf_attn_variants.modeling.fields.field_table import VARIANT_FIELDS, describe_field, look_up_field
from hf_attn_variants.training.engine.models import load_or_make_model, make_new_config, parse_config_overrides

NAMES = [name for row in VARIANT_FIELDS for name in row.names]
SIZES = {
    "bert": "hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=8",
    "t5": "d_model=32,d_kv=8,d_ff=48,num_layers=2,num_heads=4",
}
BLOCKS = {"attention_pattern": "random_blocks", "attention_block_size": 4, "num_random_blocks": 1}
SUMMARIES = {"attention_pattern": "fixed", "attention_block_size": 4, "num_summary_tokens": 1}
WINDOW = {"attention_pattern": "sliding_window", "attention_window": 4}
TALKING = {"talking_heads": "both", "talking_heads_init": "random"}
# A value of each field without a prefix, and the fields that it requires.
GIVEN = {
    "num_key_value_heads": (2, {}),
    "value_head_dim": (5, {}),
    "kv_lora_rank": (8, {}),
    "per_layer_values": ({"num_key_value_heads": [1, 2]}, {}),
    "talking_heads": ("both", {}),
    "num_softmax_heads": (8, TALKING),
    "num_value_heads": (8, TALKING),
    "talking_heads_init": ("random", TALKING),
    "talking_heads_dynamic": (["x2l", "m2w"], TALKING),
    "attention_pattern": ("sliding_window", WINDOW),
    "attention_window": (4, WINDOW),
    "attention_dilation": (2, WINDOW),
    "num_global_tokens": (1, WINDOW),
    "attention_block_size": (4, BLOCKS),
    "num_random_blocks": (1, BLOCKS),
    "attention_seed": (3, BLOCKS),
    "num_summary_tokens": (1, SUMMARIES),
    "split_attention_heads": (True, SUMMARIES),
    "attention_kernel": ("elu", {}),
    "attention_kernel_features": (8, {"attention_kernel": "hedgehog"}),
    "attention_kernel_seed": (3, {"attention_kernel": "favor"}),
    "position_embedding_type": ("sinusoidal", {}),
    "score_function": ("additive", {}),
    "output_gate": ("element", {}),
    "attention_sink": (True, {}),
    "clipped_softmax": ([-0.1, 1.0], {}),
    "knocking_heads": ("all", {}),
    "dex": (True, {}),
}


class Tokenizer:
    """A tokenizer with the attributes that a configuration needs."""

    pad_token_id, cls_token_id, sep_token_id = 0, 2, 3

    def __len__(self):
        return 60

    def get_vocab(self):
        return {"a": 59}


def make_argv(fields):
    flags = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        flags += [f"--{name}", *([] if value is True else map(str, values))]
    return flags


def make_config(command, model_type, *more):
    needed = ["--model_type", model_type, "--tokenizer_name", "x", "--output_dir", "o", "--max_train_steps", "1"]
    return make_new_config(command.parse_args([*needed, "--train_file", "a", *more]), Tokenizer())


@pytest.mark.parametrize("name", NAMES)
def test_flag_sets_its_field(name):
    prefix, row = look_up_field(name)
    value, beside = GIVEN[row.name]
    stacked = {
        item if prefix not in look_up_field(item)[1].prefixes else prefix + item: it for item, it in beside.items()
    }
    fields = {**stacked, name: value}
    command, model_type = (pretrain_t5, "t5") if prefix else (pretrain, "bert")
    if name == "encoder_attention_kernel":
        fields["position_embedding_type"] = "sinusoidal"
    config = make_config(command, model_type, "--config_overrides", SIZES[model_type], *make_argv(fields))
    assert config.model_type == f"attn_variant_{model_type}"
    assert getattr(config, name) == value
    assert getattr(type(config)(), name) != value


def test_commands_have_the_flags_of_their_architectures():
    of_encoders = {row.name for row in VARIANT_FIELDS if "" in row.prefixes}
    for command, expected in ((pretrain, of_encoders), (pretrain_t5, {*NAMES}), (seq2seq, {*NAMES})):
        needed = ["m", "--output_dir", "o", "--train_file", "a", "--max_train_steps", "1"]
        fields = {item.name: item for item in dataclasses.fields(type(command.parse_args(needed)))}
        assert fields.keys() & {*NAMES} == expected
        for name in expected:
            assert describe_field(name).lower() in fields[name].metadata["help"].lower()
            assert fields[name].default is None
    assert set(GIVEN) == of_encoders


def test_model_flags_need_a_model_from_scratch():
    for flag in ("--talking_heads_dynamic x2l", "--split_attention_heads", "--encoder_attention_seed 0"):
        with pytest.raises(
            ValueError,
            match=f"{flag.split()[0]} is only supported for a model from scratch, got --model_name_or_path m",
        ):
            pretrain_t5.parse_args(["m", "--output_dir", "o", "--train_file", "a", *flag.split()])


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", {}),
        ("a=1,b=x,,c=0.5,", {"a": 1, "b": "x", "c": 0.5}),
        ("a=gated-gelu , b=true", {"a": "gated-gelu", "b": True}),
        ('a=["x2l","m2l"],b=2', {"a": ["x2l", "m2l"], "b": 2}),
        ('b=2, a={"k": [64, [1, 2]], "s": "},]"} , c=3', {"b": 2, "a": {"k": [64, [1, 2]], "s": "},]"}, "c": 3}),
        ('a="x, y",b=null', {"a": "x, y", "b": None}),
        ('{"a": ["x2l", "m2l"], "b": {"c": 1}}', {"a": ["x2l", "m2l"], "b": {"c": 1}}),
        ("a=b=c", {"a": "b=c"}),
    ],
)
def test_overrides_may_be_json_or_plain_text(text, result):
    assert parse_config_overrides(text) == result


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=x2l,m2l", "`a` must be JSON or text without commas, got 'x2l,m2l'"),
        ("a", "must consist of FIELD=VALUE items, got 'a'"),
        ("=3", "must consist of FIELD=VALUE items, got '=3'"),
        ("b=1,a=", "must consist of FIELD=VALUE items, got 'a='"),
        ('a=["x2l",m2l]', "`a` must be JSON"),
        ("a=[1, 2", "`a` must be JSON"),
        ("a=[1]b=2", "`a` must be JSON"),
        ("a=False", "`a` must be JSON or text without commas, got 'False'"),
    ],
)
def test_invalid_override_error_names_the_field(text, message):
    with pytest.raises(ValueError, match=f"--config_overrides:? ?{message}"):
        parse_config_overrides(text)


def test_overrides_and_flags_give_equal_configurations():
    sizes = SIZES["t5"]
    fields = 'talking_heads=both,talking_heads_dynamic=["x2l","m2l"],per_layer_values={"num_key_value_heads":[1,4]}'
    flags = ["--talking_heads", "both", "--talking_heads_dynamic", "x2l", "m2l"]
    flags += ["--per_layer_values", '{"num_key_value_heads": [1, 4]}']
    config = make_config(pretrain_t5, "t5", "--config_overrides", sizes, *flags)
    again = make_config(pretrain_t5, "t5", "--config_overrides", f"{sizes},{fields}")
    assert again.to_dict() == config.to_dict() and again.talking_heads_dynamic == ["x2l", "m2l"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--config_overrides", "num_layrs=2"], "overrides: `num_layrs` is not a field of T5Config"),
        (["--config_overrides", "talking_head=both"], "overrides: `talking_head` is not a field of .*T5Config"),
        (["--talking_heads_dynamic", "x2l"], "`talking_heads` must .*`talking_heads_dynamic`"),
    ],
)
def test_unknown_or_duplicate_overrides_raise_an_error(more, message):
    with pytest.raises(ValueError, match=message):
        make_config(pretrain_t5, "t5", *more)


def test_invalid_flag_value_prints_one_line(capsys):
    for more, message in (
        (["--per_layer_values", "{"], "argument --per_layer_values: The value is not valid JSON: "),
        (["--talking_heads_dynamic", "x2l", "l2x"], "argument --talking_heads_dynamic: invalid choice: 'l2x'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            make_config(pretrain_t5, "t5", *more)
        assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "model_type", "overrides", "message"),
    [
        (pretrain, "bert", "hidden_act=gelu_fast2", "new bert model cannot be built: KeyError: 'gelu_fast2'"),
        (pretrain, "bert", "num_attention_heads=0", "ZeroDivisionError|num_attention_heads"),
        (pretrain_t5, "t5", "feed_forward_proj=gated-silly", "new t5 model cannot be built: KeyError: 'silly'"),
        (pretrain_t5, "t5", "relative_attention_num_buckets=1", "`relative_attention_num_buckets` must be at least 4"),
    ],
)
def test_invalid_model_configuration_raises_an_error(command, model_type, overrides, message):
    needed = ["--model_type", model_type, "--tokenizer_name", "x", "--output_dir", "o", "--max_train_steps", "1"]
    settings = command.parse_args([*needed, "--train_file", "a", "--config_overrides", overrides])
    auto_class = AutoModelForMaskedLM if model_type == "bert" else AutoModelForSeq2SeqLM
    with pytest.raises(ValueError, match=message):
        load_or_make_model(settings, make_new_config(settings, Tokenizer()), auto_class)
