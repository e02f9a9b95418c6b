"""What the code in a repository computes: a script for a process of its own, which cannot import this package.

`python -P code_outputs.py FOLDER INPUTS OUTPUTS` runs the code in FOLDER on the tensors in INPUTS (safetensors) and
writes floating-point outputs, and the greedy tokens of models that write text, to OUTPUTS.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["model_outputs"]

NEW_TOKENS = 8


@torch.no_grad()
def model_outputs(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a model's floating-point outputs by name: logits, hidden states."""
    found = model(**inputs)
    named = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
    return {name: value.float().contiguous() for name, value in named.items() if value.is_floating_point()}


@torch.no_grad()
def _tokens(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not (model.can_generate() and ("decoder_input_ids" in inputs or not model.config.is_encoder_decoder)):
        return {}
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    taken = inspect.signature(model.generate).parameters
    whole = {"return_timestamps": False} if "return_timestamps" in taken else {}
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
    return {"tokens": model.generate(**prompt, **options, **whole).contiguous()}


def _main(folder: str, inputs_file: str, outputs_file: str) -> None:
    sys.modules["hf_attn_variants"] = None  # type: ignore[assignment]  # which makes its import an error
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.set_num_threads(min(torch.get_num_threads(), 4))
    inputs = load_file(inputs_file)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    named = {each.rpartition(".")[2]: each for each in config.auto_map.values() if isinstance(each, str)}
    reference = named[config.architectures[0]] if config.architectures else config.auto_map["AutoModel"]
    model_class: Any = get_class_from_dynamic_module(reference, folder)
    model = model_class.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    save_file(model_outputs(model, inputs) | _tokens(model, inputs), outputs_file)


if __name__ == "__main__":
    _main(*sys.argv[1:])
