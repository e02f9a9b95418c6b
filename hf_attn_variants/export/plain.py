"""A checkpoint of this package as a plain one of transformers, which loads without remote code and is as exact.

Grouped heads are repeated, and maps of a latent are multiplied into keys and values: what a conversion does on the way
back. Talking heads have no form in upstream's classes.

What upstream calls a checkpoint of this package: its class, and its configuration without a variant.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..conversion.checkpoint.source import read_config, resolve_source
from ..conversion.checkpoint.tensor_files import TensorEntry, open_checkpoint
from ..conversion.methods import MeanPooling
from ..conversion.plan import ConversionPlan, make_plan
from ..conversion.request import resolve_dtype
from ..conversion.writing import plan_folder
from ..files import CARD_NAME, CONFIG_NAME, check_output_dir, is_generated_card
from ..inspection.costs import used_fields, variant_config
from ..model_history import read_history, write_history
from ..modeling.code_builder import file_names
from ..modeling.fields.field_table import FIELDS
from ..modeling.mechanisms.mechanism import NONE
from ..registration import PREFIX, variant_model_class

if TYPE_CHECKING:
    from ..modeling.attention.variant_mixins import AttnVariantModelMixin

__all__ = [
    "OWN_CODE",
    "PlainExport",
    "export_transformers",
    "source_model",
    "travels_without_code",
    "upstream_architecture",
    "upstream_config",
]

logger = logging.getLogger(__name__)

OWN_CODE = file_names()
# Beside the key/value heads and ranks of a variant's configuration, upstream's has none of these.
NOT_UPSTREAMS = ("auto_map", "model_type", "transformers_version")


def source_model(config: Mapping[str, Any]) -> "tuple[type[AttnVariantModelMixin], Any]":
    """Return the model class that a config.json describes, and its configuration, both of this package.

    Raises:
        ValueError: if it describes no model of an architecture here.
    """
    described = variant_config(config)
    architecture = next(iter(config.get("architectures") or ()), None)
    return variant_model_class(architecture or described.auto_classes["AutoModel"]), described


def upstream_architecture(model_class: type) -> str:
    """Return upstream's name of one of this package's model classes."""
    return model_class.__name__.removeprefix(PREFIX)


def upstream_config(config: Any, model_class: type) -> PreTrainedConfig:
    """Return upstream's configuration of a model: that of ours, without the variant's fields.

    mT5, XLM-RoBERTa and CamemBERT, which are T5 and RoBERTa under another name, get those names.
    """
    left = {*config.variant_fields(), *NOT_UPSTREAMS}
    values = {name: value for name, value in config.to_dict().items() if name not in left}
    found = CONFIG_MAPPING[config.upstream_model_types[0]](**values)
    found.architectures = [upstream_architecture(model_class)]
    return found


def travels_without_code(folder: Path, name: str) -> bool:
    """Say whether a file beside the weights is true of a model that needs no code: not the code, nor a card of it."""
    if name == CARD_NAME:
        return not is_generated_card(folder / name)
    return name not in OWN_CODE


HALF = (torch.float16, torch.bfloat16)
# Fields whose values upstream's classes do not know.
NO_PLAIN_FORM = {name: row.unknown_upstream for row in FIELDS if row.unknown_upstream for name in row.names}


@dataclass(frozen=True)
class PlainExport:
    """What was written.

    Args:
        output_dir: where.
        architecture: upstream's class of the model.
        heads: what changed, {field: (before, after)}; a rank becomes None, no latent.
        parameters: elements of all tensors, before and after.
        files_left_out: of what lay beside the weights.
    """

    output_dir: str
    architecture: str
    heads: dict[str, tuple[Any, Any]]
    parameters: tuple[int, int]
    files_left_out: list[str]

    def summary(self) -> str:
        """Return a few lines for people."""
        before, after = self.parameters
        lines = [f"Wrote {self.output_dir}, a {self.architecture} that needs no remote code"]
        lines += [f"  {name:<27} {old} -> {new or 'none'}" for name, (old, new) in self.heads.items()]
        lines.append(f"  {'parameters':<27} {before:,} -> {after:,} ({(after - before) / max(before, 1):+.1%})")
        if left_out := [name for name in self.files_left_out if name not in OWN_CODE]:
            lines.append(f"  {'left out':<27} {', '.join(left_out)}")
        return "\n".join(lines)


def export_transformers(
    model_name_or_path: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    dtype: torch.dtype | str | None = None,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
) -> PlainExport:
    """Write a variant checkpoint as a plain one that upstream's own classes load, tensor by tensor.

    Outputs are the source's: exactly where heads are repeated, up to the rounding of a matrix product where a latent
    is multiplied in. Memory holds one layer's attention at a time; the folder appears when it is complete.

    Args:
        model_name_or_path: a checkpoint folder or a Hub id.
        output_dir: a new or empty folder.
        dtype: of the floating-point tensors; None keeps each one's.
        allow_pickle, revision, token: as for `convert_checkpoint`.

    Raises:
        ValueError: if the checkpoint has talking heads or windows, or is upstream's already; before any work.
        OSError: if a file is missing, truncated, or cannot be written.
    """
    dtype = resolve_dtype(dtype)
    check_output_dir(output_dir)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    config, history = read_config(folder), read_history(folder)
    with open_checkpoint(folder, allow_pickle) as reader:
        plan = _plain_plan(config, reader.entries, dtype, folder / CONFIG_NAME)
        output_folder = plan_folder(
            plan, reader, folder, config, output, allow_pickle, partial(travels_without_code, folder)
        )
        with output_folder.write({}) as (stage, _):
            upstream_config(plan.config, plan.model_class).save_pretrained(stage)
            write_history(stage, history)
        before, after = (
            sum(entry.numel for entry in each.values()) for each in (reader.entries, output_folder.entries)
        )
    ranks = {name: None for name in plan.config.rank_fields()}
    changed = {name: (old, ranks.get(name, new)) for name, (old, new) in plan.heads.items()}
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    return PlainExport(
        os.fspath(output_dir),
        upstream_architecture(plan.model_class),
        changed,
        (before, after),
        output_folder.left_out,
    )


def _plain_plan(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry], dtype: torch.dtype | None, config_file: Path
) -> ConversionPlan:
    """Return the conversion that gives each query head a key and a value of its own, and no latent.

    Raises:
        ValueError: for a source that has no plain form, or is plain.
    """
    model_class, source = source_model(config)
    if config["model_type"] != type(source).model_type:
        raise ValueError(f"{os.fspath(config_file)} says {config['model_type']!r}: that is upstream's own already.")
    for field, what in NO_PLAIN_FORM.items():
        if (value := getattr(source, field, None)) not in (None, NONE, "absolute"):
            raise ValueError(
                f"{what} (`{field}` is {value!r}) have no form in upstream's {upstream_architecture(model_class)}. "
                "`--to onnx` keeps them."
            )
    fields = {}
    for name in used_fields(model_class, source):
        if name in source.kv_heads_fields():
            fields[name] = source.query_heads(name)
        elif getattr(source, name) is not None:
            fields[name] = source.hidden_size  # the input itself: no latent
            stored = dtype or source.dtype
            if stored in HALF:
                logger.warning(
                    "`%s`: maps multiplied in %s lose digits; --dtype float32 keeps them.", name, str(stored)[6:]
                )
    return make_plan(config, entries, MeanPooling(), fields, dtype=dtype, config_file=config_file)
