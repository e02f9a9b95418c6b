"""Models in bfloat16 on a CPU, and the speed of bfloat16 on this processor."""

import copy
import functools
import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from .int8_weight import least_seconds
from .packed_linear import matches_name

__all__ = ["bfloat16_slowdowns", "make_bfloat16"]

logger = logging.getLogger(f"transformers.{__name__}")

# The timed products: the rows of a decoding step and of a text, with a feed-forward layer of the size of T5-small.
TIMED_ROWS, WIDTH, INNER = {"a step of 4 rows": 4, "a text of 64 tokens": 64}, 512, 2048
# A smaller ratio of times may be noise.
SLOWER = 1.1


def make_bfloat16(model: PreTrainedModel) -> None:
    """Convert a model to bfloat16 in place, and warn if bfloat16 is slower than float32 on this processor.

    Parameters and buffers that `from_pretrained(dtype=torch.bfloat16)` keeps in float32 stay in float32.
    """
    ratios = bfloat16_slowdowns(torch.get_num_threads())
    if max(ratios.values()) > SLOWER:
        figures = ", ".join(f"{ratio:.1f} times as long as in float32 for {what}" for what, ratio in ratios.items())
        logger.warning(
            "bfloat16 is slow on this processor: a product takes %s. The model needs half of the memory, but more "
            'time. `quantize(model, "int8")` may reduce both.',
            figures,
        )
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    float32_parameters: dict[Any, torch.Tensor] = {
        parameter: parameter.data for path, parameter in model.named_parameters() if matches_name(path, names)
    }
    float32_paths = _float32_buffers(model)
    buffers = [(path, buffer) for path, buffer in model.named_buffers() if path in float32_paths]
    to: Any = model.to  # typed as Any, because the Transformers wrapper hides the signature
    to(torch.bfloat16)
    for parameter, data in float32_parameters.items():
        parameter.data = data
    for path, buffer in buffers:
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._buffers[name] = buffer


def _float32_buffers(model: PreTrainedModel) -> set[str]:
    """Return the paths of the buffers that are float32 in a bfloat16 model (the frequencies of RoPE, for example).

    Like `from_pretrained`, this function creates the model while the default dtype of torch is bfloat16, but on the
    meta device, which needs no memory.
    """
    default, cls = torch.get_default_dtype(), type(model)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            bfloat16_model: Any = cls(copy.deepcopy(model.config))
    finally:
        torch.set_default_dtype(default)
    return {path for path, buffer in bfloat16_model.named_buffers() if buffer.dtype == torch.float32}


@functools.cache
@torch.autocast("cpu", enabled=False)
def bfloat16_slowdowns(threads: int) -> dict[str, float]:
    """Return the time of products in bfloat16 divided by their time in float32, {product: ratio}.

    The products are timed once per process and number of threads.

    Args:
        threads: The current number of threads of torch, which is the key of the cache.
    """
    ratios = {}
    for what, rows in TIMED_ROWS.items():
        pairs = [
            (torch.full((rows, WIDTH), 0.01, dtype=dtype), torch.full((INNER, WIDTH), 0.01, dtype=dtype))
            for dtype in (torch.float32, torch.bfloat16)
        ]
        with torch.no_grad():
            float32, bfloat16 = least_seconds(
                *(functools.partial(torch.nn.functional.linear, *pair) for pair in pairs)
            )
        ratios[what] = bfloat16 / float32
    return ratios
