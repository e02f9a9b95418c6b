"""Check the generation method that `attn-variants export --to custom_generate` writes, without the package."""

import json
import sys
from pathlib import Path

import pytest
from fixtures.elsewhere import run_elsewhere

from hf_attn_variants import cli

# The code runs in a process in which the package cannot be imported.
PROGRAM = """
import json, shutil, sys
sys.modules["hf_attn_variants"] = None
import torch, transformers
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq
folder, name, cross_cache, stage = sys.argv[1:]
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
tokens = {"vocab_size": 99, "decoder_start_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
stacks = {f"{part}_{what}": value for part in ("encoder", "decoder")
          for what, value in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))}
fields = {"t5": {"d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
          "whisper": stacks | {"max_source_positions": 30, "num_mel_bins": 8, "begin_suppress_tokens": None}}
fields = fields.get(name, stacks)
config = transformers.CONFIG_MAPPING[name](d_model=32, tie_word_embeddings=False, **tokens, **fields)
is_speech = name == "whisper"
auto_class = AutoModelForSpeechSeq2Seq if is_speech else AutoModelForSeq2SeqLM
model = auto_class.from_config(config).eval()
model.generation_config.forced_eos_token_id = None
for parameter in model.parameters():
    if parameter.dim() > 1 and parameter.requires_grad:
        parameter.data.mul_(3)
inputs = {"input_features": torch.randn(3, 8, 60)} if is_speech else {"input_ids": torch.randint(5, 99, (3, 11))}
options = {"num_beams": 4, "do_sample": False, "max_new_tokens": 12}
shared = {"custom_generate": folder, "trust_remote_code": True, "cross_cache": cross_cache}
before = {path: type(module) for path, module in model.named_modules()}, set(vars(model))
state = lambda: ({path: type(module) for path, module in model.named_modules()}, set(vars(model)))
expected = model.generate(**inputs, **options)
sequences = model.generate(**inputs, **options, **shared)
result = model.generate(**inputs, **options, **shared, return_dict_in_generate=True)
[cache] = [value for key, value in result.items() if key in ("cache", "past_key_values")]
try:
    model.generate(**inputs, num_beams=4, max_new_tokens=-3, **shared)
    raised = False
except ValueError:
    raised = True
model.save_pretrained(stage)
shutil.copytree(f"{folder}/custom_generate", f"{stage}/custom_generate")
together = auto_class.from_pretrained(stage, trust_remote_code=True).eval()
print(json.dumps({
    "equal": torch.equal(sequences, expected), "different": sequences.unique().numel(),
    "cache_rows": len(cache.cross_attention_cache.layers[0].keys),
    "unchanged": state() == before, "raised": raised,
    "together": torch.equal(
        together.generate(**inputs, **options), type(together).generate(together, **inputs, **options)
    ),
}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("custom_generate") / "share-memory"
    assert cli.main(["export", "--to", "custom_generate", "--output_dir", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("name", ["t5", "bart", "marian", "whisper"])
@pytest.mark.parametrize("cross_cache", ["keys_and_values", "encoder_outputs"])
def test_custom_generate_equals_generate_with_one_cache_row_per_sentence(name, cross_cache, folder, tmp_path):
    printed = run_elsewhere("-c", PROGRAM, folder, name, cross_cache, tmp_path / "model", cwd=tmp_path)
    report = json.loads(printed.splitlines()[-1])
    assert report.pop("different") >= 3
    assert report == {"equal": True, "cache_rows": 3, "unchanged": True, "raised": True, "together": True}


def test_written_code_imports_only_torch_and_transformers(folder):
    code = (folder / "custom_generate/generate.py").read_text()
    lines = [line.split()[1].partition(".")[0] for line in code.splitlines() if line.startswith(("import ", "from "))]
    assert set(lines) - set(sys.stdlib_module_names) == {"torch", "transformers"}
    assert "hf_attn_variants" not in code.split('"""')[0] and "from ." not in code and "open(" not in code
    assert "custom_generate" in (folder / "README.md").read_text()


def test_checkpoint_for_custom_generate_raises(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["export", "model", "--to", "custom_generate", "--output_dir", str(tmp_path / "out")])
    assert "CHECKPOINT" in capsys.readouterr().err and not Path(tmp_path / "out").exists()
