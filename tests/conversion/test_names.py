"""Check the names of `hf_attn_variants.conversion`, and the modules that their imports load."""

import json
import subprocess
import sys

import pytest

import hf_attn_variants
from hf_attn_variants import conversion

READS_A_FOLDER = """
import json, sys
import hf_attn_variants.conversion.checkpoint.tensor_files, hf_attn_variants.conversion.checkpoint.source
print(json.dumps(sorted(name for name in sys.modules if name.startswith("hf_attn_variants.conversion."))))
"""

POOLS = """
import sys
from transformers import BertConfig, BertModel
from hf_attn_variants import convert
BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)).save_pretrained("a")
convert("a", 1, "mean", output_dir="b")
print(*(name for name in sys.modules if name.startswith("hf_attn_variants.conversion.calibration.")))
"""


def test_every_name_is_available_after_any_import():
    assert sorted(conversion.__all__) == [name for name in dir(conversion) if name in conversion.__all__]
    for name in conversion.__all__:
        assert getattr(conversion, name).__name__ == name if name != "METHODS" else "mean" in conversion.METHODS
    assert hf_attn_variants.convert is conversion.convert


@pytest.mark.thorough
def test_reading_a_checkpoint_imports_no_calibration_code():
    done = subprocess.run([sys.executable, "-c", READS_A_FOLDER], capture_output=True, text=True, check=True)
    packages = {name.split(".")[2] for name in json.loads(done.stdout)}
    assert packages == {"checkpoint"}


def test_conversion_without_calibration_imports_no_calibration_code(tmp_path):
    done = subprocess.run([sys.executable, "-c", POOLS], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
