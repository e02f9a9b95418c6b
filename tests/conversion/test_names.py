"""The names of `hf_attn_variants.conversion`, and what comes along when one of its modules is imported."""

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


def test_every_name_is_there_whatever_was_imported_before():
    assert sorted(conversion.__all__) == [name for name in dir(conversion) if name in conversion.__all__]
    for name in conversion.__all__:
        assert getattr(conversion, name).__name__ == name if name != "METHODS" else "mean" in conversion.METHODS
    assert hf_attn_variants.convert is conversion.convert


@pytest.mark.thorough
def test_who_reads_a_checkpoints_folder_imports_nothing_that_fits():
    done = subprocess.run([sys.executable, "-c", READS_A_FOLDER], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[2] for name in json.loads(done.stdout)}
    assert rooms == {"checkpoint"}


def test_a_conversion_without_a_calibration_imports_none(tmp_path):
    done = subprocess.run([sys.executable, "-c", POOLS], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
