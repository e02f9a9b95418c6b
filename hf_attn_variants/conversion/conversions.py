"""Conversion of a checkpoint into a new folder, of a checkpoint into a model, or of a model into another model.

Each of the three functions works in this order:

1. Read the configuration and the tensors (`checkpoint`).
2. Check the arguments (`request`) and determine the heads, names and shapes of each attention (`plan`).
3. Compute the new weights. With a calibration, the attentions are fitted to it before anything is written
   (`calibration`). Without one, a method pools the weights of each attention when it is written (`methods`).
4. Write one attention after the other (`writing`), then the report (`report`).
"""

import logging
import os
import time
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from transformers import PreTrainedModel

from ..files import CARD_NAME, CONFIG_NAME, check_output_dir
from ..model_history import ModelHistory, read_history, write_history
from .attention_tensors import POSITION_FIELDS, extend_positions, lengthen_tokenizer
from .calibration_settings import CalibrationLike
from .checkpoint.models import ModelReader, TensorSource, assemble, model_of_tensors
from .checkpoint.source import read_config, resolve_source
from .checkpoint.tensor_files import CheckpointReader, open_checkpoint
from .methods import ConversionMethod
from .plan import ConversionPlan
from .report import ConversionReport, Quality, check_kept, conversion_report
from .request import ConversionRequest
from .writing import converted_tensors, generation_config, plan_folder

if TYPE_CHECKING:
    from .calibration.calibrate import CalibrationResult
    from .calibration.source_outputs import SourceModel
    from .calibration_settings import Calibration

__all__ = ["check_conversion", "convert", "convert_checkpoint", "convert_model", "load_converted"]

logger = logging.getLogger(__name__)


@overload
def convert(
    model_or_path: PreTrainedModel | str | os.PathLike,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    output_dir: None = None,
    **options: Any,
) -> PreTrainedModel: ...
@overload
def convert(
    model_or_path: str | os.PathLike,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    output_dir: str | os.PathLike,
    **options: Any,
) -> ConversionReport: ...
def convert(
    model_or_path: PreTrainedModel | str | os.PathLike,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    output_dir: str | os.PathLike | None = None,
    **options: Any,
) -> PreTrainedModel | ConversionReport:
    """Convert a model to fewer key/value heads, to keys and values from latents, or to talking heads.

    Args:
        model_or_path: A model in memory, a checkpoint folder, or a Hub id. It can already be a variant.
        num_key_value_heads: Number of key/value heads afterwards, k. 1 is multi-query attention. None: unchanged.
        method: How heads are merged: "mean" (arXiv 2305.13245), "first", "random", with calibration text "calibrated"
            or "aligned", or a `ConversionMethod`. None: "calibrated" with a calibration, else "mean".
        output_dir: Folder to write a checkpoint to. The conversion then needs little memory and builds no model. It
            must not be given for a model in memory.
        options: The other arguments of `convert_model` or `convert_checkpoint`:

            - `calibration`: a list of texts or pairs of texts, the path of a text file or table, or a `Calibration`.
              For a model in memory, `Calibration(texts, tokenizer=tokenizer)`.
            - `kv_lora_rank`, `encoder_kv_lora_rank`, `cross_kv_lora_rank`: the ranks of latents. The full width of the
              input caches the encoder outputs themselves, and no information is lost.
            - `kv_cache_bytes`: for encoder-decoders, the bytes per source token and per generated token. The
              conversion chooses the ranks that lose least.
            - `keep_matching_layers`: the number n of token-matching layers of an encoder that stay unchanged.
            - Other fields: `encoder_num_key_value_heads`, `per_layer_values`, and those of talking heads and kernels.
            - `strict`: raise an error if the model is not within tolerance on held-out examples (`report.Quality`).
            - `dtype`, `seed`, and for a model in memory `copy`.
            - Only for a path: `max_position_embeddings` and `position_extension` ("tiled" repeats positions,
              "interpolated" stretches them; for BERT and related models), `allow_pickle`, `revision`, `token`.

    Returns:
        The converted model in this package's class, without a tokenizer. With `output_dir`, the `ConversionReport`;
        the tokenizer is then copied into the folder.

    Raises:
        TypeError: if `calibration` has a wrong type.
        ValueError: if the conversion is impossible. The error is raised before any work is done.
        ModelNotKeptError: if `strict` is set and the model is not within tolerance. Only the report is written.
        OSError: if a file is missing or truncated, or cannot be written.

    Example:

    ```py
    >>> from hf_attn_variants.conversion import convert
    >>> report = convert("google-t5/t5-small", 2, calibration="texts.txt", output_dir="t5-small-gqa")
    >>> print(report)
    ```
    """
    if isinstance(model_or_path, nn.Module):
        if output_dir is not None:
            raise ValueError(
                "`output_dir` must only be given for a folder or a Hub id, got a model. Call `save_pretrained` on the "
                "converted model and on its tokenizer instead."
            )
        return convert_model(model_or_path, num_key_value_heads, method, **options)
    if output_dir is None:
        return load_converted(model_or_path, num_key_value_heads, method, **options)
    return convert_checkpoint(model_or_path, output_dir, num_key_value_heads, method, **options)


def convert_model(
    model: PreTrainedModel,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    calibration: CalibrationLike | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    copy: bool = False,
    **fields: Any,
) -> PreTrainedModel:
    """Convert a model in memory. The original model is not changed.

    Args:
        model: A model of Transformers or of this package.
        num_key_value_heads, method, fields: As for `convert`.
        calibration: The text for a method that needs text. A model in memory has no tokenizer: give
            `Calibration(texts, tokenizer=tokenizer)`, or `read_calibration(path, tokenizer=tokenizer)` for a file.
        dtype: The dtype of floating-point parameters afterwards. None: unchanged.
        seed: Seed of all random numbers.
        copy: Whether the new model gets its own memory. By default, both models share the memory of unchanged
            parameters, so that only one of them can be trained.

    Returns:
        The model of this package with the same head.

    Raises:
        TypeError, ValueError: As for `convert`.

    Example:

    ```py
    >>> from transformers import AutoModelForSequenceClassification
    >>> from hf_attn_variants.conversion import convert_model
    >>> model = AutoModelForSequenceClassification.from_pretrained("google-bert/bert-base-uncased")
    >>> converted = convert_model(model, num_key_value_heads=4)
    ```
    """
    reader = ModelReader(model)
    if position_fields := [name for name in POSITION_FIELDS if fields.get(name) is not None]:
        raise ValueError(
            f"`{position_fields[0]}` must only be given for a checkpoint, got a model. Save the model and convert its "
            "folder."
        )
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    source = None
    if request.calibration is not None:
        from .calibration.source_outputs import check_has_processor, source_in_memory

        check_has_processor(request.calibration)
        source = source_in_memory(reader, model)
    plan = request.plan(model.config.to_dict() | {"architectures": [type(model).__name__]}, reader, source)
    result = _calibrate(plan, reader, source, request.calibration)
    tensors = converted_tensors(plan, reader, result.attentions if result else {})
    converted = assemble(plan.model_class, plan.config, tensors, model, copy)
    if result is not None:
        check_kept(_measure_quality(result, converted), request.strict)
    return converted


def load_converted(
    model_name_or_path: str | os.PathLike,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    calibration: CalibrationLike | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    **fields: Any,
) -> PreTrainedModel:
    """Convert a checkpoint and return the model without writing anything. Arguments and errors as for `convert`.

    All parameters of the model have one dtype: `dtype` or that of config.json, as with `from_pretrained`. Only
    `convert_checkpoint` preserves several dtypes.
    """
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    config = read_config(folder)
    with open_checkpoint(folder, allow_pickle) as stored:
        config, reader = extend_positions(config, stored, fields)
        source = _make_source_loader(reader, folder, request.calibration)
        plan = request.plan(config, reader, source, folder / CONFIG_NAME)
        result = _calibrate(plan, reader, source, request.calibration)
        tensors = converted_tensors(plan, reader, result.attentions if result else {})
        model = model_of_tensors(plan.model_class, plan.config, tensors, folder)
    if result is not None:
        check_kept(_measure_quality(result, model), request.strict)
    if (generation := generation_config(plan, folder)) is not None:
        model.generation_config = generation
        model._update_generation_settings()
    return model


def convert_checkpoint(
    model_name_or_path: str | os.PathLike,
    output_dir: str | os.PathLike,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    calibration: CalibrationLike | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    **fields: Any,
) -> ConversionReport:
    """Convert a checkpoint into a new folder. The memory holds the attention of only one layer at a time.

    The folder has the same shards, tensor names and other files as the original one, and the code that
    `trust_remote_code=True` needs. It appears only when it is complete. Arguments and errors as for `convert`.

    Returns:
        The report, which the folder contains as conversion_report.json.
    """
    started = time.perf_counter()
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    check_output_dir(output_dir)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    config, history = read_config(folder), read_history(folder)
    for problem in history.problems:
        logger.warning("The history of the model is incomplete: %s", problem)
    with open_checkpoint(folder, allow_pickle) as stored:
        config, reader = extend_positions(config, stored, fields)
        source = _make_source_loader(reader, folder, request.calibration)
        plan = request.plan(config, reader, source, folder / CONFIG_NAME)
        new = plan_folder(plan, reader, folder, config, output, allow_pickle, partial(_is_copied, history))
        result = _calibrate(plan, reader, source, request.calibration)
        quality = None if result is None else _measure_quality_of_folder(plan, reader, result, folder)
        with new.write(result.attentions if result else {}) as (stage, layers):
            plan.config.save_pretrained(stage)
            lengthen_tokenizer(stage, config, fields)
            report = conversion_report(
                plan,
                layers,
                stored.entries,
                new.entries,
                source=os.fspath(model_name_or_path),
                source_revision=folder.name if folder.parent.name == "snapshots" else revision,
                output_dir=os.path.expanduser(output_dir),
                files_copied=new.copied,
                files_left_out=new.left_out,
                calibration=_describe_calibration(plan, result),
                matching_shares=request.matching_shares,
                quality=quality,
                seconds=round(time.perf_counter() - started, 3),
            )
            report.save(stage)
            write_history(stage, history)
            if quality is not None:
                check_kept(quality, request.strict, report)
    return report


def check_conversion(
    model_name_or_path: str | os.PathLike,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    calibration: CalibrationLike | None = None,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    **fields: Any,
) -> None:
    """Run the checks of a checkpoint conversion that need no weights. Arguments as for `convert`.

    Raises:
        TypeError, ValueError, OSError: As for `convert`.
    """
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    with open_checkpoint(folder, allow_pickle) as stored:
        config, reader = extend_positions(read_config(folder), stored, fields)
        plan = request.check(config, reader.entries, folder / CONFIG_NAME)
    if plan.reduced and request.calibration is not None and request.calibration.processor is None:
        from .calibration.source_outputs import load_processor

        load_processor(folder, request.calibration)


def _is_copied(history: ModelHistory, name: str) -> bool:
    """Return whether a file is copied. The model card is left out if the history contains all its license terms."""
    return name != CARD_NAME or not history.has_all_terms


def _make_source_loader(
    reader: CheckpointReader, folder: Path, calibration: "Calibration | None"
) -> "SourceModel | None":
    """Return the function that loads the original model for a calibration, or None without a calibration."""
    if calibration is None:
        return None
    from .calibration.source_outputs import source_of_folder

    return source_of_folder(reader, folder, calibration)


def _calibrate(
    plan: ConversionPlan, reader: TensorSource, source: "SourceModel | None", calibration: "Calibration | None"
) -> "CalibrationResult | None":
    """Fit the attentions to the calibration. Return None without a calibration."""
    if calibration is None or source is None:
        return None
    from .calibration.calibrate import calibrate

    return calibrate(plan, reader, source, calibration)


def _describe_calibration(plan: ConversionPlan, result: "CalibrationResult | None") -> dict[str, Any] | None:
    """Return the settings of the calibration for the report, or None if nothing was fitted."""
    if result is None or result.calibration is None:
        return None
    from .calibration.calibrate import calibration_settings

    return calibration_settings(plan, result.calibration)


def _measure_quality(result: "CalibrationResult", model: PreTrainedModel) -> Quality | None:
    """Return the quality of a converted model compared with the original one, or None if nothing was fitted."""
    return None if result.source_outputs is None else result.source_outputs.compared_with(model)


def _measure_quality_of_folder(
    plan: ConversionPlan, reader: TensorSource, result: "CalibrationResult", folder: Path
) -> Quality | None:
    """Return the quality of the model that will be written into a folder, or None if nothing was fitted."""
    if result.source_outputs is None:
        return None
    tensors = converted_tensors(plan, reader, result.attentions)
    # The tensors are already rounded to the dtype of the files. The computation in float32 adds no further error.
    config = deepcopy(plan.config)
    model: Any = model_of_tensors(plan.model_class, config, tensors, folder, dtype=torch.float32)
    return _measure_quality(result, model.to(result.source_outputs.device))
