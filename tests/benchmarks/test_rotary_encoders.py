"""Check the trained models of the benchmark that converts encoders with rotary positions."""

import pytest
from transformers import AutoConfig

from benchmarks.convert import rotary_encoders
from hf_attn_variants.commands.training import pretrain


@pytest.mark.parametrize("name", rotary_encoders.MODELS)
def test_models_have_eight_heads_and_only_known_fields(name, tmp_path):
    (tmp_path / "wikipedia").mkdir()
    (tmp_path / "wikipedia/train-0.txt.gz").touch()
    args = rotary_encoders.parse_args(["--data_dir", str(tmp_path), "--work_dir", str(tmp_path)])
    command = rotary_encoders.make_training_command(args, name, tmp_path / "vocabulary", tmp_path / name)
    assert pretrain.parse_args(command[2:]).model_type == name
    fields = rotary_encoders.SIZES | rotary_encoders.FIELDS[name]
    assert fields.keys() <= AutoConfig.for_model(name).to_dict().keys()
    config = AutoConfig.for_model(name, **fields)
    assert config.num_attention_heads == getattr(config, "num_key_value_heads", 8) == 8
