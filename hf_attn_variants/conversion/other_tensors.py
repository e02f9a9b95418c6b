"""The tensors that a conversion leaves as they are: all there, and of the shapes that the configuration makes."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from .attention_modules import AttentionModule
from .checkpoint.tensor_files import TensorEntry

__all__ = ["check_nothing_missing", "check_other_shapes"]

logger = logging.getLogger(__name__)


def check_other_shapes(
    target: Any, entries: Mapping[str, TensorEntry], modules: list[AttentionModule], wrong: str
) -> None:
    """Refuse tensors of another shape than the configuration makes: the folder could not be loaded.

    Args:
        target: the converted model, on the meta device.
        entries: every tensor of the source.
        modules: the attentions, whose tensors the conversion makes.
        wrong: the beginning of a message on the configuration.

    Raises:
        ValueError: naming the first.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in target.state_dict().items()}
    converted = {name for module in modules for name in module.tensors.values()}
    prefix = f"{target.base_model_prefix}."
    for name, entry in entries.items():
        here = next((each for each in (name, prefix + name, name.removeprefix(prefix)) if each in shapes), None)
        if here is not None and name not in converted and shapes[here] != tuple(entry.shape):
            raise ValueError(
                f"{wrong}: it makes {name!r} of shape {list(shapes[here])}, and the checkpoint's has "
                f"{list(entry.shape)}."
            )


def check_nothing_missing(source: Any, entries: Mapping[str, TensorEntry], wrong: str) -> None:
    """Refuse a checkpoint that lacks a part of the model, which `from_pretrained` draws at random.

    A missing head is warned of: people load checkpoints without it on purpose. BERT's pooler is often left out.

    Args:
        source: the source's model, on the meta device.
        entries, wrong: as for `check_other_shapes`.

    Raises:
        ValueError: naming the first.
    """
    prefix = f"{source.base_model_prefix}."
    # Of old BERTs, whose names transformers changes when it loads them.
    names = {re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name) for name in entries}
    names = {re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name) for name in names}
    names |= {prefix + name for name in names} | {name.removeprefix(prefix) for name in names}
    ignored = [re.compile(pattern) for pattern in source._keys_to_ignore_on_load_missing or ()]
    tied: dict[int, list[str]] = {}
    for name, parameter in source.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(name)
    missing = [each[0] for each in tied.values() if not names.intersection(each)]
    missing = [name for name in missing if "pooler" not in name and not any(each.search(name) for each in ignored)]
    of_base = [name for name in missing if source.base_model is source or name.startswith(prefix)]
    if of_base:
        more = f" and {len(of_base) - 1} more" if len(of_base) > 1 else ""
        raise ValueError(
            f"{wrong}, or a part of the checkpoint is lost: it has no tensor {of_base[0]!r}{more}, and "
            "`from_pretrained` would draw at random what is missing."
        )
    if missing:
        logger.warning(
            "the checkpoint has no %r, a part of %s: `from_pretrained` draws it at random, in the source and in the "
            "converted model",
            missing[0],
            type(source).__name__,
        )
