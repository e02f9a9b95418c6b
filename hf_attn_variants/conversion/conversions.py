"""Conversion of a checkpoint folder into another, of a checkpoint into a model, or of a model into a model.

Each of the three works in this order:

1. read: the configuration and the tensors (`checkpoint`);
2. plan: what the user asks (`request`), and the new heads, names and shapes of each attention (`plan`);
3. pool or fit: with a calibration, attentions are fitted to it before anything is written (`calibration`); without,
   a method pools the weights of each attention (`methods`) when it is written;
4. write: one attention at a time (`writing`), then the report (`report`).
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
from .attention_tensors import FIELDS, lengthen_tokenizer, with_positions
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
    """Give a multi-head (or variant) model other key/value heads, keys and values from a latent, or talking heads.

    Args:
        model_or_path: a model in memory, a checkpoint folder, or a Hub id.
        num_key_value_heads: k, the key/value heads afterwards: 1 = multi-query. None keeps the source's.
        method: how heads are merged: "mean" (arXiv 2305.13245), "first", "random", on calibration text "calibrated" or
            "aligned", or a `ConversionMethod`. None is "calibrated" where there is a calibration, else "mean".
        output_dir: write a checkpoint there, in little memory, and build no model; not for a model in memory.
        options: those of `convert_model` or `convert_checkpoint`: `calibration` (a list of texts or of pairs of texts,
            the path of a text file or table, or a `Calibration`; for a model in memory `Calibration(texts,
            tokenizer=tokenizer)`), `encoder_num_key_value_heads`, the ranks of latents `kv_lora_rank`,
            `encoder_kv_lora_rank`, `cross_kv_lora_rank` (the input's width: the input itself, which loses nothing),
            `per_layer_values`, or `kv_cache_bytes` (an encoder-decoder's: bytes a source token and bytes a generated
            token, for which ranks are chosen that lose least), `keep_matching_layers` (n: an encoder's n layers that
            look most for a word's other occurrences, by which texts are compared, stay as they are),
            `talking_heads`, `num_softmax_heads`, `num_value_heads`, `talking_heads_dynamic`, `talking_heads_init`,
            the fields of windows (`attention_pattern`, ...), `dtype`, `seed`, and for a model in memory `copy`, for a
            path `max_position_embeddings` (BERT's relatives: positions are repeated) and `position_extension`
            ("tiled", or "interpolated": they are stretched), `allow_pickle`, `revision`, `token`, and `strict`: a
            conversion that is not within tolerance on held-out examples (`quality.Quality`) is an error.

    Returns:
        The converted model, of this package's class for the same head; with `output_dir` the `ConversionReport`, which
        `print` shows in a few lines. A model has no tokenizer: after `model.save_pretrained(folder)` save the
        source's too, `AutoTokenizer.from_pretrained(source).save_pretrained(folder)`, or write the folder by
        `output_dir`, which copies it.

    Raises:
        TypeError: if `calibration` is nothing that is taken.
        ValueError: if the conversion asked for is impossible; before any work.
        ModelNotKeptError: with `strict`, a ValueError: there is no folder, and its report lies beside the place.
        OSError: if a file is missing, truncated, or cannot be written.
    """
    if isinstance(model_or_path, nn.Module):
        if output_dir is not None:
            raise ValueError(
                "`output_dir` is for a folder or Hub id; call `save_pretrained` on the converted model, and on its "
                "tokenizer."
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
    """Convert a model in memory.

    Args:
        model: an upstream model or one of this package's; it is not changed.
        num_key_value_heads, method, fields: as for `convert`.
        calibration: the text for a method that looks at text: `Calibration(texts, tokenizer=tokenizer)`, for a model
            in memory has no tokenizer beside it; `read_calibration(path, tokenizer=tokenizer)` reads a file.
        dtype: of the floating-point parameters; None keeps each one's.
        seed: of everything random.
        copy: give the new model memory of its own. By default parameters that stay as they are share the source's
            memory: then do not train both models.

    Returns:
        This package's model of the same head.

    Raises:
        TypeError, ValueError: as for `convert`.
    """
    reader = ModelReader(model)
    if of_positions := [name for name in FIELDS if fields.get(name) is not None]:
        raise ValueError(f"`{of_positions[0]}` is for a checkpoint: save the model, and convert its folder.")
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    source = None
    if request.calibration is not None:
        from .calibration.source_outputs import check_has_processor, source_in_memory

        check_has_processor(request.calibration)
        source = source_in_memory(reader, model)
    plan = request.plan(model.config.to_dict() | {"architectures": [type(model).__name__]}, reader, source)
    fitted = _fitted(plan, reader, source, request.calibration)
    tensors = converted_tensors(plan, reader, fitted.attentions if fitted else {})
    converted = assemble(plan.model_class, plan.config, tensors, model, copy)
    if fitted is not None:
        check_kept(_quality(fitted, converted), request.strict)
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
    """Read a checkpoint and return it as a converted model, without writing anything; arguments as for `convert`.

    The model has one dtype, `dtype` or that of its config.json, as `from_pretrained` gives it; tensors of several ones
    stay as they are in a folder alone.
    """
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    config = read_config(folder)
    with open_checkpoint(folder, allow_pickle) as stored:
        config, reader = with_positions(config, stored, fields)
        source = _source_of_folder(reader, folder, request.calibration)
        plan = request.plan(config, reader, source, folder / CONFIG_NAME)
        fitted = _fitted(plan, reader, source, request.calibration)
        tensors = converted_tensors(plan, reader, fitted.attentions if fitted else {})
        model = model_of_tensors(plan.model_class, plan.config, tensors, folder)
    if fitted is not None:
        check_kept(_quality(fitted, model), request.strict)
    if (generation := generation_config(plan, folder)) is not None:
        model.generation_config = generation
        model._generate_as_configured()
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
    """Convert a checkpoint into a new folder, tensor by tensor: memory holds one layer's attention at a time.

    The folder keeps the source's sharding, tensor names and side files, carries the code that `trust_remote_code=True`
    needs, and appears only when it is complete. Arguments and errors as for `convert`.

    Returns:
        The report, which the folder holds as conversion_report.json.
    """
    started = time.perf_counter()
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    check_output_dir(output_dir)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    config, history = read_config(folder), read_history(folder)
    for problem in history.problems:
        logger.warning("the history of the model is not whole: %s", problem)
    with open_checkpoint(folder, allow_pickle) as stored:
        config, reader = with_positions(config, stored, fields)
        source = _source_of_folder(reader, folder, request.calibration)
        plan = request.plan(config, reader, source, folder / CONFIG_NAME)
        new = plan_folder(plan, reader, folder, config, output, allow_pickle, partial(_travels, history))
        fitted = _fitted(plan, reader, source, request.calibration)
        quality = None if fitted is None else _quality_of_files(plan, reader, fitted, folder)
        with new.written(fitted.attentions if fitted else {}) as (stage, layers):
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
                calibration=_settings(plan, fitted),
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
    """Check all that a conversion of a checkpoint checks before it reads a weight; arguments as for `convert`.

    Raises:
        TypeError, ValueError, OSError: as for `convert`.
    """
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    with open_checkpoint(folder, allow_pickle) as stored:
        config, reader = with_positions(read_config(folder), stored, fields)
        plan = request.check(config, reader.entries, folder / CONFIG_NAME)
    if plan.reduced and request.calibration is not None and request.calibration.processor is None:
        from .calibration.source_outputs import load_processor

        load_processor(folder, request.calibration)


def _travels(history: ModelHistory, name: str) -> bool:
    """Return whether a file is copied: all except the original model's card, whose terms the history has if it can."""
    return name != CARD_NAME or not history.has_all_terms


def _source_of_folder(
    reader: CheckpointReader, folder: Path, calibration: "Calibration | None"
) -> "SourceModel | None":
    """Return the function that loads the original model for a calibration; None without one."""
    if calibration is None:
        return None
    from .calibration.source_outputs import source_of_folder

    return source_of_folder(reader, folder, calibration)


def _fitted(
    plan: ConversionPlan, reader: TensorSource, source: "SourceModel | None", calibration: "Calibration | None"
) -> "CalibrationResult | None":
    """Fit the attentions to the calibration; return None without one."""
    if calibration is None or source is None:
        return None
    from .calibration.calibrate import calibrate

    return calibrate(plan, reader, source, calibration)


def _settings(plan: ConversionPlan, fitted: "CalibrationResult | None") -> dict[str, Any] | None:
    """Return the settings of the calibration for the report; None if nothing was fitted."""
    if fitted is None or fitted.calibration is None:
        return None
    from .calibration.calibrate import calibration_settings

    return calibration_settings(plan, fitted.calibration)


def _quality(fitted: "CalibrationResult", model: PreTrainedModel) -> Quality | None:
    """Return how near a converted model is to the original one; None if nothing was fitted."""
    return None if fitted.source_outputs is None else fitted.source_outputs.compared_with(model)


def _quality_of_files(
    plan: ConversionPlan, reader: TensorSource, fitted: "CalibrationResult", folder: Path
) -> Quality | None:
    """Return the quality of the model that a folder will hold."""
    if fitted.source_outputs is None:
        return None
    tensors = converted_tensors(plan, reader, fitted.attentions)
    # In float32, whatever the files hold: the tensors are rounded already.
    config = deepcopy(plan.config)
    model: Any = model_of_tensors(plan.model_class, config, tensors, folder, dtype=torch.float32)
    return _quality(fitted, model.to(fitted.source_outputs.device))
