"""A model in bfloat16 on a CPU: what stays in float32, and whether this processor is any faster so."""

import copy
import functools
import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from .int8_weight import least_seconds
from .packed_linear import is_named

__all__ = ["make_bfloat16", "times_as_long"]

logger = logging.getLogger(f"transformers.{__name__}")

# What is timed: a product of a step's few rows, and one of a text's, with a feed-forward layer as of T5-small.
TIMED_ROWS, WIDTH, INNER = {"a step of 4 rows": 4, "a text of 64 tokens": 64}, 512, 2048
# Less than this is the clock's.
SLOWER = 1.1


def make_bfloat16(model: PreTrainedModel) -> None:
    """Turn the numbers of a model into bfloat16, in place; warn where that takes longer on this processor.

    What upstream keeps in float32 under `from_pretrained(dtype=torch.bfloat16)` stays so.
    """
    ratios = times_as_long(torch.get_num_threads())
    if max(ratios.values()) > SLOWER:
        figures = ", ".join(f"{ratio:.1f} times as long as in float32 for {what}" for what, ratio in ratios.items())
        logger.warning(
            'This processor has no fast bfloat16: a product takes %s. `quantize(model, "bfloat16")` halves the memory '
            'here and costs time; `quantize(model, "int8")` may gain both.',
            figures,
        )
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    kept: dict[Any, torch.Tensor] = {
        parameter: parameter.data for path, parameter in model.named_parameters() if is_named(path, names)
    }
    wanted = _float32_buffers(model)
    buffers = [(path, buffer) for path, buffer in model.named_buffers() if path in wanted]
    to: Any = model.to  # whose type transformers' wrapper hides
    to(torch.bfloat16)
    for parameter, data in kept.items():
        parameter.data = data
    for path, buffer in buffers:
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._buffers[name] = buffer


def _float32_buffers(model: PreTrainedModel) -> set[str]:
    """Return the paths of the buffers that upstream makes in float32 whatever the model's dtype (RoPE's frequencies).

    `from_pretrained` makes the model while torch's default is that dtype; so does this, without memory.
    """
    default, cls = torch.get_default_dtype(), type(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            twin: Any = cls(copy.deepcopy(model.config))
    finally:
        torch.set_default_dtype(default)
    return {path for path, buffer in twin.named_buffers() if buffer.dtype == torch.float32}


@functools.cache
@torch.autocast("cpu", enabled=False)
def times_as_long(threads: int) -> dict[str, float]:
    """Return how many times as long products take in bfloat16 as in float32, by what they are; measured once.

    Args:
        threads: which torch has now.
    """
    ratios = {}
    for what, rows in TIMED_ROWS.items():
        pairs = [
            (torch.full((rows, WIDTH), 0.01, dtype=dtype), torch.full((INNER, WIDTH), 0.01, dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16)
        ]
        with torch.no_grad():
            whole, half = least_seconds(*(functools.partial(torch.nn.functional.linear, *pair) for pair in pairs))
        ratios[what] = half / whole
    return ratios
