"""Converts checkpoints and models in memory, and writes converted checkpoints.

`convert_checkpoint`, `load_converted` and `convert_model` all follow these steps:

1. Check the arguments (`ConversionRequest`), and open the checkpoint or the model (`checkpoint`).
2. Determine the heads, tensor names and shapes of each attention module (`plan`).
3. With calibration, fit all modules before anything is written (`calibration`).
4. Compute the other new tensors (`attention_tensors`) one module at a time, and write or load them (`writing`).

`convert_checkpoint` then also writes a report (`report`).
"""

import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn
from transformers import PreTrainedModel

from ..files import CARD_NAME, CONFIG_NAME, check_output_dir
from ..model_folder import ModelHistory, read_history, write_history
from ..native.native_model import change_to_transformers_class
from ..registration import is_native
from .attention_modules import AttentionModule
from .attention_tensors import (
    CalibratedMethod,
    ConversionMethod,
    FirstHead,
    MeanPooling,
    RandomInitialization,
    compute_energy_loss_by_rank,
    compute_error_forms_from_weights,
)
from .calibration_settings import FIT_DEFAULTS, Calibration, CalibrationLike
from .checkpoint.models import ModelReader, TensorSource, assemble_model, build_model_from_tensors
from .checkpoint.source import read_config, resolve_checkpoint_folder, warn_about_remote_code
from .checkpoint.tensor_files import (
    POSITION_FIELDS,
    CheckpointReader,
    TensorEntry,
    extend_positions,
    open_checkpoint,
    update_tokenizer_max_length,
)
from .layer_choice import (
    PROBE_FIELDS,
    check_cache_budget,
    check_matching_layers,
    check_supports_cache_budget,
    choose_ranks_for_budget,
    compute_matching_shares,
    exclude_matching_layers,
)
from .plan import ConversionPlan, get_calibration_blocker, make_plan
from .report import CalibrationResult, ConversionReport, Quality, build_conversion_report, check_within_tolerance
from .writing import OutputFolder, compute_converted_tensors, read_generation_config

if TYPE_CHECKING:
    from .calibration.source_outputs import SourceLoader

logger = logging.getLogger(__name__)


@overload
def convert(
    model_or_path: PreTrainedModel | str | os.PathLike,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    output_dir: None = None,
    calibration: CalibrationLike | None = None,
    **options: Any,
) -> PreTrainedModel: ...
@overload
def convert(
    model_or_path: str | os.PathLike,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    output_dir: str | os.PathLike,
    calibration: CalibrationLike | None = None,
    **options: Any,
) -> ConversionReport: ...
def convert(
    model_or_path: PreTrainedModel | str | os.PathLike,
    num_key_value_heads: int | None = None,
    method: str | ConversionMethod | None = None,
    *,
    output_dir: str | os.PathLike | None = None,
    calibration: CalibrationLike | None = None,
    kv_lora_rank: int | None = None,
    encoder_num_key_value_heads: int | None = None,
    encoder_kv_lora_rank: int | None = None,
    cross_kv_lora_rank: int | None = None,
    per_layer_values: Mapping[str, Any] | None = None,
    kv_cache_bytes: Sequence[int] | None = None,
    keep_matching_layers: int | None = None,
    strict: bool = False,
    dtype: torch.dtype | str | None = None,
    seed: int = 0,
    copy: bool = False,
    max_position_embeddings: int | None = None,
    position_extension: str | None = None,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    **fields: Any,
) -> PreTrainedModel | ConversionReport:
    """Convert a model to fewer key/value heads, to keys and values computed from latents, or to talking heads.

    Args:
        model_or_path: A model in memory, a checkpoint folder, or a Hub id. It can already be a variant.
        num_key_value_heads: Number of key/value heads in the converted model. 1 selects multi-query attention. If
            None, the number does not change.
        method: Method that merges heads: "mean" (arXiv 2305.13245), "first", "random", or a `ConversionMethod`. With
            calibration text, it can be "calibrated" or "aligned". Defaults to "calibrated" if `calibration` is set,
            and otherwise to "mean".
        output_dir: Folder to which the converted checkpoint is written. In this case, the conversion needs little
            memory because it does not build a model. Not supported for a model in memory.
        calibration: A list of texts or pairs of texts, the path of a text file or table, or a `Calibration`. For a
            model in memory, pass `Calibration(texts, tokenizer=tokenizer)`.
        kv_lora_rank: Rank of the self-attention latents. If it equals the input width, the input itself is cached and
            no information is lost.
        encoder_num_key_value_heads: Number of key/value heads in the encoder.
        encoder_kv_lora_rank: Rank of the encoder's latents.
        cross_kv_lora_rank: Rank of the cross-attention latents. If it equals the full width, the encoder outputs are
            cached.
        per_layer_values: Field values that differ between layers, {field: list of one value per layer}.
        kv_cache_bytes: For encoder-decoders, the maximum cache size in bytes per source token and per generated token.
            The conversion chooses the latent ranks that lose the least energy within this limit.
        keep_matching_layers: Number of token-matching encoder layers that stay unchanged.
        strict: Whether to raise an error if the model is not within tolerance on held-out examples (`report.Quality`).
        dtype: The dtype of floating-point tensors in the converted model. If None, it does not change.
        seed: Random seed.
        copy: For a model in memory, whether the converted model gets its own copy of unchanged parameters.
        max_position_embeddings: For checkpoints of BERT and related models, the new number of positions.
        position_extension: How position embeddings are added: "tiled" repeats the existing embeddings, and
            "interpolated" stretches them.
        allow_pickle: Whether to read a checkpoint's pickled weights if it has no safetensors file.
        revision: Branch, tag or commit on the Hub.
        token: Access token for the Hub.
        fields: Other configuration fields, such as those for talking heads and kernels.

    Returns:
        The converted model, which is an instance of a class in this package. It is an instance of the Transformers
        class for EuroBERT and T5Gemma, which support fewer key/value heads themselves. If `output_dir` is set, the
        `ConversionReport` is returned instead, and the tokenizer is copied to the folder.

    Raises:
        TypeError: if `calibration` has the wrong type.
        ValueError: if the conversion is impossible. The error is raised before any weights are computed.
        OutsideToleranceError: if `strict` is set and the model is not within tolerance. Only the report is written.
        OSError: if a file is missing or truncated, or cannot be written.

    Example:

    ```py
    >>> from hf_attn_variants.conversion import convert
    >>> report = convert("google-t5/t5-small", 2, calibration="texts.txt", output_dir="t5-small-gqa")
    >>> print(report)
    ```
    """
    arguments = dict(locals())
    # Arguments with their default value are not passed on because not all three functions accept all of them.
    # `token=False` is not the default value. It means that the stored token is not sent.
    defaults = dict.fromkeys(("strict", "copy", "allow_pickle"), False)
    positional = ("model_or_path", "num_key_value_heads", "method", "output_dir", "fields")
    options = {
        name: value for name, value in arguments.items() if name not in positional and value is not defaults.get(name)
    } | fields
    if isinstance(model_or_path, nn.Module):
        if output_dir is not None:
            raise ValueError(
                "`output_dir` is only supported for a folder or a Hub id, not for a model in memory. Call "
                "`save_pretrained` on the converted model and on its tokenizer instead."
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
        num_key_value_heads, method, fields: See `convert`.
        calibration: Text or audio for methods that need it. Because a model in memory has no tokenizer, pass
            `Calibration(texts, tokenizer=tokenizer)`, or `read_calibration(path, tokenizer=tokenizer)` for a file.
        dtype: The dtype of floating-point parameters in the converted model. If None, it does not change.
        seed: Random seed.
        copy: Whether unchanged parameters are copied. By default, both models share the memory of these parameters,
            so only one of the models can be trained.

    Returns:
        The converted model with the same model head. Its class is from this package, or from Transformers for EuroBERT
        and T5Gemma.

    Raises:
        TypeError, ValueError: See `convert`.

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
            f"`{position_fields[0]}` is only supported for checkpoints, not for a model in memory. Save the model and "
            "convert its folder."
        )
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    source = request.make_source_loader_for_model(reader, model)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    plan = request.make_plan(config, reader.entries, None, reader, source)
    result = request.fit_modules(plan, reader, source)
    tensors = compute_converted_tensors(plan, reader, result.attentions)
    converted = assemble_model(plan.model_class, plan.config, tensors, model, copy)
    check_within_tolerance(result.measure_quality(converted), request.strict)
    return change_to_transformers_class(converted)


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
    """Convert a checkpoint and return the model without writing any files.

    Takes the same arguments and raises the same errors as `convert`. As with `from_pretrained`, all parameters of the
    model have the same dtype, which is `dtype` or the dtype in config.json. Only `convert_checkpoint` preserves mixed
    dtypes.
    """
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    folder = resolve_checkpoint_folder(model_name_or_path, revision, token, allow_pickle)
    config = read_config(folder)
    with open_checkpoint(folder, allow_pickle) as stored:
        config, reader = extend_positions(config, stored, fields)
        source = request.make_source_loader(reader, folder)
        plan = request.make_plan(config, reader.entries, folder / CONFIG_NAME, reader, source)
        result = request.fit_modules(plan, reader, source)
        tensors = compute_converted_tensors(plan, reader, result.attentions)
        model = build_model_from_tensors(plan.model_class, plan.config, tensors, folder)
    check_within_tolerance(result.measure_quality(model), request.strict)
    if (generation := read_generation_config(plan, folder)) is not None:
        model.generation_config = generation
        model._update_generation_settings()
    return change_to_transformers_class(model)


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
    """Convert a checkpoint and write it to a new folder, with only one attention module in memory at a time.

    The new folder has the same shards, tensor names and other files as the original folder. It also contains the
    remote code for `trust_remote_code=True`, and the returned report as conversion_report.json. The folder is only
    created once all files have been written. Takes the same arguments and raises the same errors as `convert`.
    """
    start_time = time.perf_counter()
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    check_output_dir(output_dir)
    folder = resolve_checkpoint_folder(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    config, history = read_config(folder), read_history(folder)
    for problem in history.problems:
        logger.warning("The history of the model is incomplete: %s", problem)
    with open_checkpoint(folder, allow_pickle) as stored:
        config, reader = extend_positions(config, stored, fields)
        source = request.make_source_loader(reader, folder)
        plan = request.make_plan(config, reader.entries, folder / CONFIG_NAME, reader, source)
        should_copy = partial(_should_copy, history, is_native(config["model_type"]))
        new = OutputFolder(plan, reader, folder, config, output, allow_pickle, should_copy=should_copy)
        result = request.fit_modules(plan, reader, source)
        quality = _measure_quality(plan, reader, result, folder)
        with new.write(result.attentions) as (stage, layers):
            plan.config.save_pretrained(stage)
            update_tokenizer_max_length(stage, config, fields)
            report = build_conversion_report(
                plan,
                layers,
                stored.entries,
                new.entries,
                source=os.fspath(model_name_or_path),
                source_revision=folder.name if folder.parent.name == "snapshots" else revision,
                output_dir=os.path.expanduser(output_dir),
                files_copied=new.copied,
                files_left_out=new.left_out,
                calibration=result.settings,
                matching_shares=request.matching_shares,
                quality=quality,
                seconds=round(time.perf_counter() - start_time, 3),
            )
            report.save(stage)
            write_history(stage, history)
            check_within_tolerance(quality, request.strict, report)
    return report


def _should_copy(history: ModelHistory, needs_no_code: bool, name: str) -> bool:
    """Return whether a file of the original folder belongs into the new one, which has its own card and code."""
    is_replaced_card = name == CARD_NAME and history.has_readable_card
    return not is_replaced_card and not (needs_no_code and name.endswith(".py"))


def _measure_quality(
    plan: ConversionPlan, reader: CheckpointReader, result: CalibrationResult, folder: Path
) -> Quality | None:
    """Return the quality of the converted model before it is written, or None if nothing was fitted."""
    if result.source_outputs is None:
        return None
    tensors = compute_converted_tensors(plan, reader, result.attentions)
    # The tensors are already rounded to the dtype of the files. Computing in float32 adds no further error.
    config = deepcopy(plan.config)
    model: Any = build_model_from_tensors(plan.model_class, config, tensors, folder, dtype=torch.float32)
    return result.measure_quality(model.to(result.source_outputs.device))


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
    """Check whether a checkpoint can be converted, without reading any weights. Takes the same arguments as `convert`.

    Raises:
        TypeError, ValueError, OSError: See `convert`.
    """
    request = ConversionRequest(num_key_value_heads, method, calibration, dtype, seed, fields)
    folder = resolve_checkpoint_folder(model_name_or_path, revision, token, allow_pickle)
    with open_checkpoint(folder, allow_pickle) as stored:
        config, reader = extend_positions(read_config(folder), stored, fields)
        plan = request.make_plan(config, reader.entries, folder / CONFIG_NAME)
    if plan.reduced_modules and request.calibration is not None and request.calibration.processor is None:
        from .calibration.source_outputs import load_processor

        load_processor(folder, request.calibration)


def _make_calibrated_method(name: str) -> Any:
    """Create a method from `calibration.methods`, which is imported only when it is used."""
    return getattr(importlib.import_module(".calibration.methods", __package__), name)()


METHODS: dict[str, Callable[[], ConversionMethod]] = {
    **{method.name: method for method in (MeanPooling, FirstHead, RandomInitialization)},
    "aligned": partial(_make_calibrated_method, "Aligned"),
    "calibrated": partial(_make_calibrated_method, "Calibrated"),
}
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
# For each type of change, how the conversion computes it without text, and measured examples of the quality with and
# without text. The numbers are from benchmarks/convert/README.md and, for latents, from
# benchmarks/convert/calibration_experiments.md.
QUALITY_LOSS_TEXTS = {
    "pool": (
        "averages heads",
        "Spearman 0.867 to 0.804 (MiniLM, a third of its heads, 0.867 with text), BLEU 36.8 to 1.6 (a T5 model, a "
        "quarter of its heads, 36.4 with text)",
    ),
    "compress": (
        "computes latents only from the weights",
        "Spearman 0.867 to 0.846 (MiniLM, rank 128 of 384, 0.868 with text), BLEU 36.8 to 33.4 (a T5 model, rank 64 "
        "of 256, 35.3 with text)",
    ),
    "kernel": ("replaces the softmax", "Spearman 0.867 to 0.70 (MiniLM, elu, 0.860 with hedgehog and text)"),
}


@dataclass
class ConversionRequest:
    """The arguments of a conversion. The constructor checks everything that does not depend on the checkpoint.

    Args:
        num_key_value_heads: Number of key/value heads in the converted model, or None if it does not change.
        requested_method: A method or its name, or None for the default.
        requested_calibration: Calibration text or audio as passed by the user, or None if it is not used.
        requested_dtype: The dtype of floating-point tensors in the converted model or its name, or None if it does not
            change.
        seed: Random seed.
        fields: All other arguments, which are configuration fields and options such as `strict`.
    """

    num_key_value_heads: int | None
    requested_method: str | ConversionMethod | None
    requested_calibration: CalibrationLike | None
    requested_dtype: torch.dtype | str | None
    seed: int
    fields: dict[str, Any]

    def __post_init__(self) -> None:
        """Separate the options from the configuration fields, and check them."""
        self.kv_cache_bytes = self.fields.pop("kv_cache_bytes", None)
        if self.kv_cache_bytes is not None:
            fields = self.fields | {"num_key_value_heads": self.num_key_value_heads}
            check_cache_budget(self.kv_cache_bytes, fields)
        self.calibration = None
        if self.requested_calibration is not None:
            from .calibration.examples import as_calibration

            self.calibration = as_calibration(self.requested_calibration, self.seed)
        self.matching_layers = self.fields.pop("keep_matching_layers", None)
        self.matching_shares: list[float] | None = None
        self.strict = bool(self.fields.pop("strict", False))
        # The command requires an explicit method before it writes a decoder with averaged heads.
        self.needs_method = bool(self.fields.pop("needs_method", False))
        if self.strict and self.calibration is None:
            raise ValueError(
                "`strict` (--strict) needs text or audio to compare the converted model with the original one. Set "
                "`calibration` (--calibration_file)."
            )
        self.method = resolve_method(self.requested_method, self.calibration)
        self.dtype = resolve_dtype(self.requested_dtype)

    def make_source_loader(self, reader: CheckpointReader, folder: Path) -> "SourceLoader | None":
        """Return the function that loads the original model for calibration, or None if calibration is not used."""
        if self.calibration is None:
            return None
        from .calibration.source_outputs import make_source_loader_for_folder

        return make_source_loader_for_folder(reader, folder, self.calibration)

    def make_source_loader_for_model(self, reader: ModelReader, model: PreTrainedModel) -> "SourceLoader | None":
        """Return a function that returns the original model, or None if the conversion does not run it."""
        if self.calibration is None:
            return None
        from .calibration.source_outputs import make_source_loader_for_model

        if self.calibration.processor is None:
            name = "tokenizer" if self.calibration.audio is None else "feature_extractor"
            raise ValueError(f"`{name}` is required for a model in memory. Pass `Calibration(..., {name}={name})`.")
        return make_source_loader_for_model(reader, model)

    def fit_modules(
        self, plan: ConversionPlan, reader: TensorSource, source_loader: "SourceLoader | None"
    ) -> CalibrationResult:
        """Fit the attention modules to the calibration data. The result is empty if calibration is not used."""
        if self.calibration is None or source_loader is None:
            return CalibrationResult({})
        from .calibration.calibrate import calibrate

        return calibrate(plan, reader, source_loader, self.calibration)

    def make_plan(
        self,
        config: dict[str, Any],
        entries: Mapping[str, TensorEntry],
        config_file: Path | None,
        reader: TensorSource | None = None,
        source_loader: "SourceLoader | None" = None,
    ) -> ConversionPlan:
        """Plan the conversion and check that it is possible.

        A warning is logged if the model would lose quality because the user set neither a method nor calibration.

        Args:
            config: The original model's config.json.
            entries: The dtypes and shapes of the original model's tensors.
            config_file: Path of `config` for error messages, or None for a model in memory.
            reader: The tensors of the original model. If None, the conversion is only checked, and no weights or text
                are read. Ranks and layers that depend on weights or text are then placeholders.
            source_loader: Function that loads the original model for calibration, or None if calibration is not used.

        Raises:
            ValueError: if the conversion is not possible.
        """
        if reader is not None:
            warn_about_remote_code(config)
        options: dict[str, Any] = {"seed": self.seed, "dtype": self.dtype, "config_file": config_file}
        make = partial(make_plan, config, entries, self.method, **options)
        fields: dict[str, Any] = {"num_key_value_heads": self.num_key_value_heads} | self.fields
        if self.kv_cache_bytes is not None:
            check_supports_cache_budget(config)
            probe = make(fields=fields | PROBE_FIELDS)
            losses = partial(self._measure_latent_losses, probe, reader, source_loader)
            budget = choose_ranks_for_budget(probe, self.kv_cache_bytes, entries, losses)
            per_layer_values = {**(fields.get("per_layer_values") or {}), **budget.pop("per_layer_values", {})}
            fields |= budget | {"per_layer_values": per_layer_values}
        if self.matching_layers is not None:
            probe = make(fields=fields)
            check_matching_layers(probe, fields, self.matching_layers, self.calibration)
            if source_loader is not None and self.calibration is not None:
                self._should_calibrate(probe)  # raises an error if calibration is not possible
                model, tokenizer = source_loader(probe)
                tokenizer = self.calibration.processor or tokenizer
                self.matching_shares = compute_matching_shares(probe, model, tokenizer, self.calibration)
                fields = exclude_matching_layers(probe, fields, self.matching_shares, self.matching_layers)
        plan = make(fields=fields)
        if (warning := self._get_quality_loss_warning(plan)) is not None and reader is not None:
            logger.warning(warning)
        if reader is not None and plan.is_unchanged and not any(map(self.fields.get, POSITION_FIELDS)):
            logger.warning(
                "The conversion does not change the model because the model already has the requested values. Request "
                "other values, such as fewer key/value heads."
            )
        if reader is None:
            self._should_calibrate(plan)  # raises an error if calibration is not possible
        return plan

    def _should_calibrate(self, plan: ConversionPlan) -> bool:
        """Return whether calibration is used and there are attention modules to fit (see `should_calibrate`)."""
        if self.calibration is None:
            return False
        from .calibration.calibrate import should_calibrate

        return should_calibrate(plan, self.calibration)

    def _get_quality_loss_warning(self, plan: ConversionPlan) -> str | None:
        """Return a warning that the model loses quality without calibration examples, or None if this does not apply.

        Raises:
            ValueError: if `needs_method` is set and the decoder's outputs would be unusable. The error message is this
                warning.
        """
        if self.requested_method is not None or not plan.reduced_modules or self.calibration is not None:
            return None
        pools = any(module.heads.kv_head_change == "pool" for module in plan.reduced_modules)
        adds_kernel = any(module.adds_kernel for module in plan.reduced_modules)
        cause, examples = QUALITY_LOSS_TEXTS["kernel" if adds_kernel else "pool" if pools else "compress"]
        kind, flag = ("audio", "--calibration_audio_dir") if plan.reads_audio else ("text", "--calibration_file")
        if (reason := get_calibration_blocker(plan)) is not None:
            advice = f"Calibration is not possible because {reason}."
        else:
            advice = f"Set `calibration` ({flag}) to fit the converted model to {kind}."
        message = (
            f"No calibration {kind} was provided. The conversion {cause}, so the model loses quality until it is "
            f"retrained. Measured examples: {examples}. {advice} To use only the weights and avoid this message, set "
            'method="mean" (--method mean).'
        )
        has_decoder = any(module.site.get_stack_name(plan.config) == "decoder" for module in plan.reduced_modules)
        if self.needs_method and has_decoder and (pools or adds_kernel):
            raise ValueError(message)
        return message

    def _measure_latent_losses(
        self,
        plan: ConversionPlan,
        reader: TensorSource | None,
        source_loader: "SourceLoader | None",
        modules: list[AttentionModule],
    ) -> list[torch.Tensor]:
        """Return the share of energy that a latent of each rank loses in each module.

        The energy is measured on text if calibration is used, and otherwise computed from the weights.
        """
        if reader is None:
            return [torch.zeros(1) for _ in modules]
        if source_loader is not None and self.calibration is not None and self._should_calibrate(plan):
            from .calibration.calibrate import measure_error_forms

            error_forms = measure_error_forms(plan, modules, reader, source_loader, self.calibration)
        else:
            tensors = (replace(module.read_tensors(reader.read), latent_weight=None) for module in modules)
            heads = (module.heads for module in modules)
            error_forms = list(map(compute_error_forms_from_weights, tensors, heads))
        return [compute_energy_loss_by_rank([pair.key, pair.value]) for pair in error_forms]


def resolve_method(method: str | ConversionMethod | None, calibration: Calibration | None = None) -> ConversionMethod:
    """Return the conversion method with the given name, after checking that it matches the calibration settings.

    Args:
        method: A method, which is returned unchanged, or the name of a method. If None, "calibrated" is used with
            calibration, and "mean" without it.
        calibration: The calibration settings, or None if calibration is not used.

    Raises:
        ValueError: if the name is unknown, if the method requires calibration or does not support it, or if
            `calibration` sets an option that the method does not use.

    Example:

    ```py
    >>> from hf_attn_variants.conversion.conversions import resolve_method
    >>> resolve_method("mean").name
    'mean'
    ```
    """
    if method is None:
        method = "mean" if calibration is None else "calibrated"
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"`method` must be one of {', '.join(METHODS)}, got {method!r}.")
        method = METHODS[method]()
    if not isinstance(method, CalibratedMethod):
        if calibration is not None:
            raise ValueError(
                f"`method` {method.name!r} cannot be combined with `calibration` because it does not use text. Remove "
                "one of them."
            )
        return method
    if calibration is None:
        raise ValueError(f"`method` {method.name!r} needs text. Set `calibration` (--calibration_file).")
    unused = [name for name in FIT_DEFAULTS if getattr(calibration, name) is not None and name not in method.options]
    if unused:
        raise ValueError(
            f'`{unused[0]}` (--{unused[0]}) is only supported for the method "calibrated", not for {method.name!r}. '
            "Remove it."
        )
    return method


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the torch dtype with the given name after checking that it is supported. None is returned unchanged.

    Raises:
        ValueError: if the dtype is not one of `DTYPES`.
    """
    torch_dtype = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if torch_dtype is not None and torch_dtype not in DTYPES.values():
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}, got {dtype!r}.")
    return torch_dtype
