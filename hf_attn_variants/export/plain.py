"""Exports variant checkpoints to plain Transformers checkpoints, which can be loaded without remote code.

Grouped heads are repeated. Latent projections, knocking heads and DEX are multiplied into the projections, so the
outputs do not change. Variants that Transformers classes cannot compute, such as talking heads,
are not supported.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..conversion.attention_tensors import MeanPooling
from ..conversion.checkpoint.source import read_config, resolve_checkpoint_folder
from ..conversion.checkpoint.tensor_files import TensorEntry, open_checkpoint
from ..conversion.conversions import resolve_dtype
from ..conversion.plan import ConversionPlan, collect_field_texts, make_plan
from ..conversion.writing import OutputFolder
from ..files import CARD_NAME, CONFIG_NAME, check_output_dir, is_generated_card
from ..inspection.costs import list_used_fields, resolve_source_model
from ..model_folder import read_history, write_history
from ..modeling.code_builder import get_file_names
from ..modeling.mechanisms.mechanism import NONE
from ..registration import PREFIX
from .folding import fold_extensions

logger = logging.getLogger(__name__)

REMOTE_CODE_FILES = get_file_names()
# Fields that are omitted from the Transformers configuration, in addition to the variant fields.
OMITTED_FIELDS = ("auto_map", "model_type", "transformers_version")


def get_transformers_class_name(model_class: type) -> str:
    """Return the name of the Transformers class that corresponds to a model class in this package."""
    return model_class.__name__.removeprefix(PREFIX)


def make_transformers_config(config: Any, model_class: type) -> PreTrainedConfig:
    """Convert a variant configuration to a Transformers configuration, which has no variant fields.

    mT5 gets the T5 model type because both share the same code. For the same reason, XLM-RoBERTa and CamemBERT get the
    RoBERTa model type.

    Args:
        config: The variant configuration.
        model_class: The model class from this package.
    """
    omitted = {*config.get_variant_fields(), *OMITTED_FIELDS}
    values = {name: value for name, value in config.to_dict().items() if name not in omitted}
    plain_config = CONFIG_MAPPING[config.transformers_model_types[0]](**values)
    plain_config.architectures = [get_transformers_class_name(model_class)]
    return plain_config


def should_export_file(folder: Path, name: str) -> bool:
    """Return whether a file is neither remote code nor a generated model card, so that it is copied to an export.

    Args:
        folder: The folder of the checkpoint.
        name: The name of the file.
    """
    if name == CARD_NAME:
        return not is_generated_card(folder / name)
    return name not in REMOTE_CODE_FILES


HALF_PRECISION = (torch.float16, torch.bfloat16)
# {field that the Transformers classes do not support: description of its feature}.
NO_PLAIN_FORM = collect_field_texts("not_in_transformers")


@dataclass(frozen=True)
class PlainExport:
    """The result of `export_transformers`.

    Args:
        output_dir: The output folder.
        architecture: The name of the Transformers class of the model.
        heads: The changed fields, {field: (before, after)}. Ranks become None because there are no latents.
        parameters: The total number of tensor elements (before, after).
        files_left_out: The files in the checkpoint that were not copied.
    """

    output_dir: str
    architecture: str
    heads: dict[str, tuple[Any, Any]]
    parameters: tuple[int, int]
    files_left_out: list[str]

    def summary(self) -> str:
        """Return a printable summary."""
        sizes_before, sizes_after = self.parameters
        lines = [f"Wrote {self.output_dir}: {self.architecture} without remote code"]
        lines += [f"  {name:<27} {old} -> {new or 'none'}" for name, (old, new) in self.heads.items()]
        change = (sizes_after - sizes_before) / max(sizes_before, 1)
        lines.append(f"  {'parameters':<27} {sizes_before:,} -> {sizes_after:,} ({change:+.1%})")
        if left_out := [name for name in self.files_left_out if name not in REMOTE_CODE_FILES]:
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
    """Export a variant checkpoint to a plain Transformers checkpoint.

    Repeating heads does not change the outputs. Multiplying latent projections only changes them by rounding errors.
    Tensors are written one at a time, with only one attention module in memory. The output folder is only created once
    all files have been written.

    Args:
        model_name_or_path: A checkpoint folder or a Hub id.
        output_dir: A new or empty folder.
        dtype: The dtype of the floating-point tensors. If None, the dtypes do not change.
        allow_pickle, revision, token: See `convert_checkpoint`.

    Returns:
        A description of the export.

    Raises:
        ValueError: If the checkpoint is already a Transformers checkpoint, or if the Transformers class does not
            support its variant, such as talking heads or windows.
        OSError: If a file is missing or truncated, or cannot be written.

    Example:
        >>> print(export_transformers("bert-gqa4", "bert-plain").summary())
    """
    dtype = resolve_dtype(dtype)
    check_output_dir(output_dir)
    folder = resolve_checkpoint_folder(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    config, history = read_config(folder), read_history(folder)
    with open_checkpoint(folder, allow_pickle) as reader:
        folded_reader, config = fold_extensions(reader, config)
        plan = _plan_plain_conversion(config, folded_reader.entries, dtype, folder / CONFIG_NAME)
        output_folder = OutputFolder(
            plan, folded_reader, folder, config, output, allow_pickle, partial(should_export_file, folder)
        )
        with output_folder.write({}) as (stage, _):
            make_transformers_config(plan.config, plan.model_class).save_pretrained(stage)
            write_history(stage, history)
        before, after = reader.entries.values(), output_folder.entries.values()
        sizes = sum(entry.numel for entry in before), sum(entry.numel for entry in after)
    ranks = dict.fromkeys(plan.config.get_rank_fields())
    changed = {name: (old, ranks.get(name, new)) for name, (old, new) in plan.heads.items()}
    changed = {name: pair for name, pair in changed.items() if pair[0] != pair[1]}
    architecture = get_transformers_class_name(plan.model_class)
    return PlainExport(os.fspath(output_dir), architecture, changed, sizes, output_folder.left_out)


def _plan_plain_conversion(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry], dtype: torch.dtype | None, config_file: Path
) -> ConversionPlan:
    """Plan a conversion to multi-head attention without latents.

    Raises:
        ValueError: See `export_transformers`.
    """
    model_class, source = resolve_source_model(config)
    if config["model_type"] != type(source).model_type:
        raise ValueError(
            f"`model_type` in {os.fspath(config_file)} must belong to a variant, got {config['model_type']!r}. "
            "Transformers checkpoints do not need this export."
        )
    for field, feature in NO_PLAIN_FORM.items():
        if (value := getattr(source, field, None)) not in (None, NONE, "absolute"):
            raise ValueError(
                f"`{field}` {value!r} is not supported because {get_transformers_class_name(model_class)} in "
                f"Transformers does not support {feature}. Use `--to onnx`."
            )
    fields = {}
    for name in list_used_fields(model_class, source):
        if name in source.get_kv_heads_fields():
            fields[name] = source.get_query_heads(name)
        elif getattr(source, name) is not None:
            fields[name] = source.hidden_size  # a latent of this width has no projection
            stored = dtype or source.dtype
            if stored in HALF_PRECISION:
                logger.warning(
                    "`%s`: multiplying latent projections in %s loses precision. Use --dtype float32 to keep it.",
                    name,
                    str(stored)[6:],
                )
    return make_plan(config, entries, MeanPooling(), fields, dtype=dtype, config_file=config_file)
