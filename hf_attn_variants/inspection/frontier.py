"""Measures how the variants of a checkpoint trade loss for cache size and speed.

`measure_frontier` converts the checkpoint in memory to variants with fewer key/value heads, with latents, or with
combinations of latents. No model is written.

In a calibrated conversion, each attention module depends only on the corresponding module in the base model. Modules
that share a latent depend only on the corresponding group of modules. `LazyConvertedAttention` therefore stores the
modules from each conversion, and combines modules from several conversions into the model that a single conversion
would produce.

`FrontierFile` writes the rows to a file as they are measured, so that an interrupted call can be resumed.
"""

import hashlib
import itertools
import json
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..conversion.calibration.batches import limit_length, set_length_statistics
from ..conversion.calibration.calibrate import calibrate
from ..conversion.calibration.methods import Calibrated
from ..conversion.calibration.source_outputs import load_processor, make_source_loader_for_model
from ..conversion.calibration_settings import Calibration
from ..conversion.checkpoint.models import ModelReader, assemble_model, convert_loading_errors
from ..conversion.checkpoint.source import read_config, resolve_checkpoint_folder
from ..conversion.checkpoint.tensor_files import check_finite
from ..conversion.plan import get_unsupported_calibration_reason, make_plan, make_seeded_generator
from ..conversion.writing import compute_converted_tensors
from ..errors import convert_to_value_error
from ..files import atomic_write, check_output_dir, load_json, make_folders
from ..modeling.attention.attention_sites import AttentionSite
from ..modeling.attention.model_mixin import AttnVariantModelMixin
from ..progress import is_interactive, progress_bar
from ..registration import get_max_input_length
from .costs import (
    compute_kv_cache_bytes_per_token,
    get_values_by_layer,
    get_variant_name,
    get_varied_heads_field,
    has_latents,
    list_kv_head_counts,
    resolve_source_model,
)
from .held_out import MEASURES, make_held_out_set
from .speed import disable_early_stopping, make_timed_function, time_run

VariantFields = dict[str, Any]
# The maximum number of key/value head counts to try by default.
MAX_COUNTS = 4


def list_default_variants(config: Any, field: str, decodes: bool) -> list[VariantFields]:
    """Return the configuration fields of the variants to try by default.

    For an encoder-decoder, these are cross-attention latents, starting with cached encoder outputs, combined with
    latents in the decoder's self-attention. For other models, these are self-attention latents. Variants with fewer
    key/value heads follow.

    Args:
        config: The variant configuration of the base model.
        field: The key/value head field to vary.
        decodes: Whether the attention modules with these heads are in a decoder with a cache.
    """
    width, current_counts = config.hidden_size, get_values_by_layer(config, field) or [config.get_query_heads(field)]
    multi_query = 2 * config.get_attention_head_dim()  # values per token and layer
    # A conversion merges whole groups of heads in each layer.
    counts = [count for count in list_kv_head_counts(config, field) if count < max(current_counts)]
    counts = [count for count in counts if all(old % count == 0 or count % old == 0 for old in current_counts)]
    options: list[VariantFields] = []
    if has_latents(config, field):
        pass  # smaller latents are only tried on request because the original projections are lost
    elif "cross_kv_lora_rank" in config.get_rank_fields() and decodes:
        cross_ranks = [width, width // 2, 3 * width // 8, width // 4]
        self_ranks = [None, 2 * multi_query, multi_query, multi_query // 2]
        pairs = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 2), (2, 3), (3, 2), (3, 3)]
        options += [{"cross_kv_lora_rank": cross_ranks[i], "kv_lora_rank": self_ranks[j]} for i, j in pairs]
    else:
        name = "encoder_kv_lora_rank" if field.startswith("encoder_") else "kv_lora_rank"
        # A latent of the full width would only make an encoder slower.
        full_rank = [width] if decodes else []
        options += [{name: rank} for rank in (*full_rank, width // 2, 3 * width // 8, width // 4, width // 8)]
    if len(counts) > MAX_COUNTS:  # evenly spaced counts, including the first and the last
        step = (len(counts) - 1) / (MAX_COUNTS - 1)
        counts = [counts[round(i * step)] for i in range(MAX_COUNTS)]
    options = [option for option in options if option.keys() <= {*config.get_rank_fields()}]
    options += [{field: count} for count in counts]
    fits = [all(value is None or 1 <= value <= width for value in option.values()) for option in options]
    return _remove_duplicates(itertools.compress(options, fits))


def list_requested_variants(requested: Mapping[str, Sequence[int] | None]) -> list[VariantFields]:
    """Return the configuration fields of the variants with the requested values.

    Each head count is tried separately, and ranks are tried in all combinations.

    Args:
        requested: {field: values}. None means that the user did not set the field.
    """
    heads = [{name: value} for name, values in requested.items() if "heads" in name for value in values or ()]
    ranks = {name: values for name, values in requested.items() if "rank" in name and values}
    options = [dict(zip(ranks, values, strict=True)) for values in itertools.product(*ranks.values())]
    return _remove_duplicates([*options, *heads])


def _remove_duplicates(options: Iterable[VariantFields]) -> list[VariantFields]:
    """Return the distinct options, without values that are None."""
    distinct_options: list[VariantFields] = []
    for option in options:
        fields = {name: value for name, value in option.items() if value is not None}
        if fields and fields not in distinct_options:
            distinct_options.append(fields)
    return distinct_options


def load_source_model(
    checkpoint: str, calibration: Calibration, revision: str | None = None, token: str | None = None
) -> tuple[AttnVariantModelMixin, Any]:
    """Load a checkpoint as a float32 model from this package with unchanged attention.

    Args:
        checkpoint: A folder or a Hub id.
        calibration: The text or audio that the variants will be fitted to.
        revision: A branch, tag or commit of the Hub repository.
        token: The access token for the Hub.

    Returns:
        The model, and its tokenizer (or its feature extractor for audio).

    Raises:
        OSError: If the checkpoint does not exist, or has no tokenizer or feature extractor.
        ValueError: If the architecture is not supported, or the calibration is for text but the model reads audio (or
            the reverse).
    """
    folder = resolve_checkpoint_folder(checkpoint, revision, token, allow_pickle=False)
    model_class, config = resolve_source_model(read_config(folder))
    reads_audio = model_class.main_input_name == "input_features"
    if reads_audio is not (calibration.audio is not None):
        kind, option = ("audio", "calibration_audio_dir") if reads_audio else ("text", "calibration_file")
        raise ValueError(f"{os.fspath(checkpoint)} ({model_class.__name__}) reads {kind}. Pass --{option}.")
    with convert_loading_errors(folder):
        model = model_class.from_pretrained(folder, config=config, dtype=torch.float32, use_safetensors=True).eval()
    for name, parameter in model.named_parameters():
        check_finite(parameter, name, os.fspath(checkpoint))  # before anything is measured
    return model, load_processor(folder, calibration)


def select_variants(
    model: AttnVariantModelMixin, requested: Mapping[str, Sequence[int] | None]
) -> list[dict[str, Any]]:
    """Return the configuration fields of the requested variants, or of the default variants.

    Args:
        model: The base model.
        requested: {field: values}. None or an empty sequence means that the user did not set the field.

    Raises:
        ValueError: If a requested field has no effect on the model, or there is no variant to try.
    """
    config = model.config
    sites = [site for site, _, _ in model.named_attention_modules()]
    used = {name for site in sites for name in (site.kv_heads_field, site.rank_field) if name is not None}
    requested = {name: values for name, values in requested.items() if values}
    if unused := sorted(set(requested) - used):
        raise ValueError(
            f"`{unused[0]}` has no effect because {type(model).__name__} has no such attention modules. Remove it."
        )
    if requested:
        return list_requested_variants(requested)
    field = get_varied_heads_field(type(model), config)
    decodes = any(site.kv_heads_field == field and site.get_stack_name(config) == "decoder" for site in sites)
    if not (options := list_default_variants(config, field, decodes)):
        raise ValueError("There is no variant to try. Set the ranks.")
    return options


def select_held_out_examples(
    calibration: Calibration, all_examples: Calibration, size: int, seed: int = 0
) -> Calibration:
    """Select the examples on which the loss is measured.

    These are examples that are not used for calibration. If there are too few of them, the held-out calibration
    examples are selected instead.

    Args:
        calibration: The examples used by the conversions.
        all_examples: All examples from the same source, or examples from another source.
        size: The maximum number of examples.
        seed: The calibration seed, which is also used to select these examples.

    Raises:
        ValueError: If `size` is less than 2.
    """
    if size < 2:
        raise ValueError(f"`held_out_size` must be at least 2, got {size}.")
    used, examples = set(_pair_with_targets(calibration)), list(dict.fromkeys(_pair_with_targets(all_examples)))
    remaining_examples = [example for example in examples if example not in used]
    if len(remaining_examples) >= min(calibration.num_held_out, len(examples)):
        chosen = random.Random(seed).sample(remaining_examples, min(size, len(remaining_examples)))
    else:
        # The same random selection as in `calibration.batches`, so that these examples are not used for fitting.
        count, generator = len(calibration.examples), make_seeded_generator(seed, "held-out texts")
        indices = torch.randperm(count, generator=generator).tolist()[: calibration.num_held_out]
        chosen = [_pair_with_targets(calibration)[i] for i in indices[:size]]
    inputs, targets = zip(*chosen, strict=True)
    if calibration.audio is not None:
        return replace(calibration, audio=inputs)
    return replace(calibration, texts=inputs, target_texts=None if targets[0] is None else list(targets))


def _pair_with_targets(calibration: Calibration) -> list[tuple[Any, str | None]]:
    """Return all calibration examples as pairs of an example and its target, which can be None."""
    targets: Sequence[str | None] = calibration.target_texts or [None] * len(calibration.examples)
    return list(zip(calibration.examples, targets, strict=True))


NamedTensors = dict[str, torch.Tensor]
# The path of an attention module and its head counts (those of all layers if layers share a latent).
AttentionKey = tuple[str, Any]


class LazyConvertedAttention:
    """Attention modules from several conversions of a base model. Each conversion runs only when it is needed."""

    def __init__(self, source: AttnVariantModelMixin, calibration: Calibration, seed: int = 0) -> None:
        """Store the attention modules of the base model.

        Args:
            source: The base model, a float32 model from this package.
            calibration: The text or audio used for fitting, with a tokenizer or feature extractor.
            seed: The random seed for the conversions.

        Raises:
            ValueError: If the base model cannot be converted by calibration.
        """
        if (reason := get_unsupported_calibration_reason(source.config)) is not None:
            raise ValueError(f"The variants require calibration, which is not possible here because {reason}.")
        self.source, self.seed = source, seed
        self.calibration = set_length_statistics(calibration, calibration.processor, source.config)
        self._prefix = "" if source.base_model is source else f"{source.base_model_prefix}."
        self._tensors: dict[AttentionKey, NamedTensors] = {}
        self._errors: dict[AttentionKey, float | None] = {}
        # The calibration batches from the first conversion. Later conversions reuse them with their generated targets.
        self._batches: Any = None
        self._store_attention_modules(source, {})

    def get_config(self, fields: Mapping[str, Any]) -> Any:
        """Return the base model's configuration with the given fields changed.

        Raises:
            ValueError: If the fields do not fit the model.
        """
        config: Any = self.source.config
        return type(config).from_upstream(config, **fields)

    def build_model(self, fields: Mapping[str, Any]) -> AttnVariantModelMixin:
        """Return the variant with these fields. Its unchanged parameters share memory with the base model.

        Raises:
            ValueError: If the base model cannot be converted to the variant.
        """
        config = self.get_config(fields)
        if missing := self._get_unconverted_fields(config, fields):
            self._convert(missing)
        parameters = self.source.named_parameters(remove_duplicate=False)
        tensors = {name: parameter.detach() for name, parameter in parameters}
        changed = [(key, source_key) for key, source_key in self._get_attention_keys(config) if key != source_key]
        for _, source_key in changed:
            for name in self._tensors[source_key]:
                tensors.pop(f"{self._prefix}{name}", None)  # a shared latent is only removed once
        for key, _ in changed:
            tensors |= {f"{self._prefix}{name}": tensor for name, tensor in self._tensors[key].items()}
        return assemble_model(type(self.source), config, tensors, self.source)

    def _convert(self, fields: Mapping[str, Any]) -> None:
        """Convert the base model with these fields, and store the attention modules and their errors."""
        reader = ModelReader(self.source)
        config = self.source.config.to_dict() | {"architectures": [type(self.source).__name__]}
        plan = make_plan(config, reader.entries, Calibrated(), fields, self.seed)
        source = make_source_loader_for_model(reader, self.source)
        result = calibrate(plan, reader, source, self.calibration, with_source_outputs=False, batches=self._batches)
        fitted_attention, self._batches = result.attentions, result.batches or self._batches
        tensors = compute_converted_tensors(plan, reader, fitted_attention)
        converted = assemble_model(plan.model_class, plan.config, tensors, self.source)
        errors = {path: attention.details.get("output_relative_error") for path, attention in fitted_attention.items()}
        self._store_attention_modules(converted, errors)

    def get_attention_error(self, fields: Mapping[str, Any]) -> float | None:
        """Return the mean relative output error of the attention modules that differ from the base model.

        The errors were measured on the held-out calibration examples. Returns None if any error is unknown.
        """
        keys = self._get_attention_keys(self.get_config(fields))
        errors: Any = [self._errors.get(key) for key, source_key in keys if key != source_key]
        return None if None in errors else sum(errors) / max(len(errors), 1)

    def is_converted(self, fields: Mapping[str, Any]) -> bool:
        """Return whether all attention modules of the variant are already stored, so that no conversion is needed."""
        return not self._get_unconverted_fields(self.get_config(fields), fields)

    def _get_unconverted_fields(self, config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields whose attention modules have not been stored yet."""
        missing_paths = {key[0] for key, _ in self._get_attention_keys(config) if key not in self._tensors}
        sites = [site for site, path, _ in self.source.named_attention_modules() if path in missing_paths]
        names = {name for site in sites for name in (site.kv_heads_field, site.rank_field)}
        missing = {name: value for name, value in fields.items() if name in names}
        per_layer_values = {name: v for name, v in (fields.get("per_layer_values") or {}).items() if name in names}
        return missing | ({"per_layer_values": per_layer_values} if per_layer_values else {})

    def _get_attention_keys(self, config: Any) -> list[tuple[AttentionKey, AttentionKey]]:
        """Return the keys of each attention module in the variant with this configuration, and in the base model."""
        attentions = [(site, path) for site, path, _ in self.source.named_attention_modules()]
        return [
            (self._get_attention_key(config, site, path), self._get_attention_key(self.source.config, site, path))
            for site, path in attentions
        ]

    def _get_attention_key(self, config: Any, site: AttentionSite, path: str) -> AttentionKey:
        """Return the key of the attention module at a path in a model with this configuration."""

        def get_heads(path: str) -> Any:
            counts = site.get_heads(config, path)
            # A module with cached encoder outputs has the same tensors as a module without a latent.
            return counts._replace(rank=None) if counts.rank == config.hidden_size else counts

        if not site.shares_latent or get_heads(path).rank is None:
            return path, get_heads(path)
        paths = [other_path for other, other_path, _ in self.source.named_attention_modules() if other is site]
        return path, tuple(map(get_heads, paths))

    def _store_attention_modules(self, model: AttnVariantModelMixin, errors: Mapping[str, float | None]) -> None:
        """Store the attention modules of a model that are not stored yet.

        Args:
            model: The model.
            errors: The error of each attention module by path.
        """
        named = model.base_model.named_parameters(remove_duplicate=False)
        parameters = {name: parameter.detach() for name, parameter in named}
        for site, path, _ in model.named_attention_modules():
            key = self._get_attention_key(model.config, site, path)
            shared = f"{site.get_latent_projection_path(path)}.weight"
            if key not in self._tensors:
                tensors = {name: tensor for name, tensor in parameters.items() if name.startswith(f"{path}.")}
                tensors |= {shared: parameters[shared]} if shared in parameters else {}
                self._tensors[key], self._errors[key] = tensors, errors.get(path)


FLOAT32_BYTES = 4
# The number of sequences per batch, of generated tokens, and of rounds for timing a variant.
TIMED_BATCH, TIMED_TOKENS, TIMED_ROUNDS = 8, 9, 3


@dataclass(frozen=True)
class FrontierRow:
    """The size and loss of one variant, which form one row in a `Frontier`.

    Args:
        name: The name of the variant.
        fields: The configuration fields for `convert`. Empty for the base model.
        loss: The loss on the held-out examples (see `Frontier.measure`).
        loss_above: The difference between the loss and the base model's loss.
        loss_above_error: The standard error of this difference over the examples.
        attention_error: The mean relative output error of the changed attention modules on the held-out calibration
            examples. 0 if no outputs change, and None if the error is unknown.
        parameters: The number of parameters.
        kv_cache_bytes_per_token: The result of `compute_kv_cache_bytes_per_token` for float32.
        kv_cache_bytes: The cache size in bytes for a text with the frontier's lengths, or None if there is no cache.
        milliseconds: The estimated time per generated token with `TIMED_BATCH` texts, or per forward pass if the model
            does not decode. The variant and the base model are timed alternately, and the base model's time is
            multiplied by the ratio of both times.
        on_frontier: Whether no other row is at least as good in both size and loss.
    """

    name: str
    fields: dict[str, Any]
    loss: float
    loss_above: float
    loss_above_error: float
    attention_error: float | None
    parameters: int
    kv_cache_bytes_per_token: dict[str, int] | None
    kv_cache_bytes: int | None
    milliseconds: float
    on_frontier: bool = False

    @property
    def size(self) -> int:
        """The cache size in bytes, or the number of parameters if the model has no cache."""
        return self.parameters if self.kv_cache_bytes is None else self.kv_cache_bytes


@dataclass(frozen=True)
class Frontier:
    """The measured variants of a checkpoint, with the settings used to measure them.

    Args:
        checkpoint: The name of the base model.
        architecture: The name of the model class.
        measure: The kind of loss, which is a key of `MEASURES`.
        held_out_texts: The number of held-out texts or recordings.
        calibration: The calibration settings.
        length: The number of tokens in the decoder's cache, or in the text that an encoder reads.
        source_length: The number of tokens that the encoder of an encoder-decoder reads.
        rows: The base model, followed by the variants from the largest to the smallest.
    """

    checkpoint: str
    architecture: str
    measure: str
    held_out_texts: int
    calibration: dict[str, Any]
    length: int
    source_length: int
    rows: list[FrontierRow]

    @property
    def source(self) -> FrontierRow:
        """The row of the base model, with which the variants are compared."""
        return self.rows[0]

    def find_smallest_variant(self, loss_limit: float) -> FrontierRow | None:
        """Return the smallest variant whose additional loss is within a limit, or None if there is no such variant.

        Args:
            loss_limit: The maximum value of `loss_above`.
        """
        within_limit = [row for row in self.rows[1:] if row.loss_above <= loss_limit]
        return min(within_limit, key=lambda row: (row.size, row.loss_above), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return the frontier as JSON values."""
        return asdict(self) | {"measure": MEASURES[self.measure]}


def measure_frontier(
    source: AttnVariantModelMixin,
    variants: Sequence[Mapping[str, Any]],
    calibration: Calibration,
    held_out: Calibration,
    checkpoint: str = "",
    length: int = 512,
    source_length: int | None = None,
    seed: int = 0,
    saved_rows: Sequence[FrontierRow] = (),
    on_row: Callable[[Frontier, int], None] | None = None,
) -> Frontier:
    """Convert a model in memory to several variants, and measure their sizes, losses and times.

    Args:
        source: The base model, a float32 model from this package, on the device to use.
        variants: The configuration fields of each variant for `convert`.
        calibration: The text or audio used for fitting, with the tokenizer or feature extractor.
        held_out: Other examples of the same type, on which the loss is measured.
        checkpoint: The name of the base model, for the table.
        length, source_length: See `Frontier`. `source_length` defaults to `length`, or to all positions for audio.
        seed: The random seed for the conversions.
        saved_rows: Rows from an interrupted call with the same arguments, with the base model first.
        on_row: A function that is called after each row with the current frontier and the number of variants left.

    Raises:
        ValueError: If a variant or the calibration does not fit the model, or the base model's loss is invalid.

    Example:
        >>> model, tokenizer = load_source_model("google-t5/t5-small", calibration)
        >>> frontier = measure_frontier(model, [{"cross_kv_lora_rank": 128}], calibration, held_out)
    """
    length, source_length = _limit_lengths(source.config, calibration, length, source_length)
    attentions, source = LazyConvertedAttention(source.eval(), calibration, seed), source.eval()
    for fields in variants:
        attentions.get_config(fields)
    with convert_to_value_error(
        f"{checkpoint or 'The base model'} cannot read the text because its configuration is invalid"
    ):
        text = make_held_out_set(source, calibration.processor, held_out)
        losses = text.compute_losses(source)
    lengths = {site.name: source_length if site.is_cross_attention else length for site in source.attention_sites}
    settings = _describe_calibration(source.config, attentions.calibration, seed)
    header = (checkpoint, type(source).__name__, text.measure, len(losses), settings)
    _check_loss(losses, checkpoint, saved_rows)
    timer = _make_timer(source, length, source_length, saved_rows)
    measurer = _VariantMeasurer(text.compute_losses, losses, timer, lengths)
    remaining = [fields for fields in variants if all(dict(fields) != row.fields for row in saved_rows[1:])]
    # Variants with many changes come first because later ones can reuse their modules.
    order = sorted(remaining, key=lambda fields: -sum(n != source.config.hidden_size for n in fields.values()))
    rows, conversions = [*saved_rows] or [measurer.measure(source, {}, 0.0)], 0
    report = on_row or (lambda frontier, left: None)
    report(frontier := Frontier(*header, length, source_length, _sort_rows(rows)), len(order))
    with progress_bar(total=len(order), desc="trying variants", unit="variant", smoothing=0) as bar:
        for number, fields in enumerate(order, start=1):
            name = _format_variant_name(type(source), attentions.get_config(fields), fields)
            conversions += not attentions.is_converted(fields)
            bar.set_description(f"trying {name}", refresh=is_interactive())
            variant, error = attentions.build_model(fields), attentions.get_attention_error(fields)
            rows.append(measurer.measure(variant, dict(fields), error))
            report(frontier := Frontier(*header, length, source_length, _sort_rows(rows)), len(order) - number)
            bar.update()
            bar.set_postfix_str(f"{rows[-1].loss_above:+.3f} ({conversions} conversions)", refresh=is_interactive())
    return frontier


def _describe_calibration(config: Any, calibration: Calibration, seed: int) -> dict[str, Any]:
    """Return the calibration settings for the report."""
    return {
        "count": len(calibration.examples),
        "fit_steps": calibration.get_fit_option("fit_steps"),
        "targets": calibration.target_texts is not None,
        "max_length": limit_length(config, calibration, calibration.length),
        "seed": seed,
    }


def _limit_lengths(config: Any, calibration: Calibration, length: int, source_length: int | None) -> tuple[int, int]:
    """Return `length` and `source_length`, limited to the model's number of positions."""
    limit = get_max_input_length(config) or sys.maxsize
    if calibration.audio is not None:  # an audio encoder always reads all positions
        return min(length, limit), source_length or config.max_source_positions
    return min(length, limit), min(source_length or length, limit)


def _check_loss(losses: torch.Tensor, checkpoint: str, saved_rows: Sequence[FrontierRow]) -> None:
    """Check that the base model's loss is finite and matches the saved loss.

    Raises:
        ValueError: If there is no loss, or it is not finite or does not match.
    """
    name = checkpoint or "the base model"
    if not losses[:, 1].any():
        raise ValueError(
            f"The held-out examples contain no words to predict for {name}. Use texts from its task, and for a T5 "
            "model also their targets (--calibration_target_file)."
        )
    mean = float(losses[:, 0].sum() / losses[:, 1].sum())
    if not math.isfinite(mean):
        raise ValueError(f"The loss of {name} must be finite, got {mean}. Check its weights.")
    if saved_rows and not math.isclose(mean, saved_rows[0].loss, rel_tol=1e-4, abs_tol=1e-6):
        raise ValueError(
            f"The loss of {name} is {mean:.6f}, but it was {saved_rows[0].loss:.6f} when the saved rows were "
            "measured. The checkpoint has changed. Use a new output folder."
        )


def _sort_rows(rows: Sequence[FrontierRow]) -> list[FrontierRow]:
    """Mark the variants on the frontier, and sort them by size in descending order, with the base model first."""
    return _mark_frontier([rows[0], *sorted(rows[1:], key=lambda row: (-row.size, row.loss_above))])


@dataclass
class _VariantMeasurer:
    """Measures variants and compares them with the losses of the base model."""

    compute_losses: Callable[[AttnVariantModelMixin], torch.Tensor]
    source_losses: torch.Tensor  # the losses of the base model, [texts, 2]
    estimate_milliseconds: Callable[[AttnVariantModelMixin], float]
    lengths: dict[str, int]

    def measure(
        self, model: AttnVariantModelMixin, fields: dict[str, Any], attention_error: float | None
    ) -> FrontierRow:
        """Measure a variant and return its row."""
        losses = self.compute_losses(model)
        above, error = _compute_mean_loss_difference(losses, self.source_losses)
        cache = compute_kv_cache_bytes_per_token(model, FLOAT32_BYTES)
        return FrontierRow(
            name=_format_variant_name(type(model), model.config, fields),
            fields=fields,
            loss=float(losses[:, 0].sum() / losses[:, 1].sum()),
            loss_above=above,
            loss_above_error=error,
            attention_error=attention_error,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            kv_cache_bytes_per_token=cache,
            kv_cache_bytes=None if cache is None else sum(self.lengths[site] * size for site, size in cache.items()),
            milliseconds=self.estimate_milliseconds(model),
        )


def _format_variant_name(model_class: type[AttnVariantModelMixin], config: Any, fields: Mapping[str, Any]) -> str:
    """Return the name of a variant, which describes the decoder and, if it is changed, the encoder."""
    field = get_varied_heads_field(model_class, config)
    name = get_variant_name(config, field)
    per_layer_values = fields.get("per_layer_values") or {}
    if field.startswith("encoder_") or not any(key.startswith("encoder_") for key in (*fields, *per_layer_values)):
        return name
    return f"{name} + encoder {get_variant_name(config, f'encoder_{field}')}"


def _compute_mean_loss_difference(losses: torch.Tensor, source: torch.Tensor) -> tuple[float, float]:
    """Return the mean difference per word between two losses [texts, 2], and its standard error.

    The standard error is computed for a ratio of two sums over texts, because the texts are the independent samples.
    """
    words = losses[:, 1].sum()
    mean = (losses[:, 0] - source[:, 0]).sum() / words
    residuals = losses[:, 0] - source[:, 0] - mean * losses[:, 1]
    texts = len(losses)
    error = residuals.square().sum().sqrt() / words * math.sqrt(texts / max(texts - 1, 1))
    return float(mean), float(error)


def _mark_frontier(rows: Sequence[FrontierRow]) -> list[FrontierRow]:
    """Set `on_frontier` for all rows for which no other row is at least as good in both size and loss."""

    def is_dominated(row: FrontierRow) -> bool:
        better = (other for other in rows if other.size <= row.size and other.loss_above <= row.loss_above)
        return any((other.size, other.loss_above) != (row.size, row.loss_above) for other in better)

    return [replace(row, on_frontier=not is_dominated(row)) for row in rows]


def _make_timer(
    source: AttnVariantModelMixin, length: int, source_length: int, saved_rows: Sequence[FrontierRow]
) -> Callable[[AttnVariantModelMixin], float]:
    """Return a function that estimates the `milliseconds` of a `FrontierRow` for a model.

    The model and the base model are timed alternately, so that other load on the machine affects both.
    """
    decodes = source.can_generate() and source.config.is_encoder_decoder
    input_length = min(source_length if decodes else length, get_max_input_length(source.config) or sys.maxsize)
    source_milliseconds = [row.milliseconds for row in saved_rows[:1]]

    def make_timer(model: AttnVariantModelMixin) -> Callable[[], float]:
        decoding = (TIMED_TOKENS, 1) if decodes else None
        run_model = make_timed_function(disable_early_stopping(model), TIMED_BATCH, input_length, decoding)

        def measure_milliseconds() -> float:
            first, end = time_run(run_model, str(model.device))
            if first is None or not decodes:  # a forward pass has no first token
                return end * 1e3
            return (end - first) * 1e3 / (TIMED_TOKENS - 1)

        return measure_milliseconds

    time_source = make_timer(source)

    def estimate(model: AttnVariantModelMixin) -> float:
        if model is source:
            time_source()  # warm-up
            source_milliseconds.append(statistics.median(time_source() for _ in range(TIMED_ROUNDS)))
            return source_milliseconds[0]
        time_variant = make_timer(model)
        time_variant()  # warm-up
        ratios = [time_variant() / time_source() for _ in range(TIMED_ROUNDS)]
        return source_milliseconds[0] * statistics.median(ratios)

    return estimate


UNFINISHED = "unfinished"


def hash_examples(calibration: Calibration) -> str:
    """Return a short hash of the texts and targets or the audio files.

    Raises:
        OSError: If a file cannot be read.
    """
    content = hashlib.blake2b(digest_size=8)
    for path in calibration.audio or ():
        content.update(hashlib.blake2b(Path(path).read_bytes()).digest())
    if calibration.audio is None:
        content.update(json.dumps([calibration.texts, calibration.target_texts]).encode())
    return content.hexdigest()


class FrontierFile:
    """A JSON file with the rows that were measured in one call of `measure_frontier`.

    The file also contains the arguments of the call, so that an interrupted call can be resumed.

    Args:
        path: Path of the file. Its folder must be new, be empty, or contain the file from an interrupted call.

    Raises:
        ValueError: If the folder contains other files.
        OSError: If the file cannot be read.
    """

    def __init__(self, path: Path):
        self.path, self._stored = path, {}
        temporary = path.with_name(f".tmp-{path.name}")
        if temporary.is_file() and [*path.parent.iterdir()] == [temporary]:
            temporary.unlink()  # an earlier call was killed during its first write
        if path.is_file():
            stored = load_json(path)
            if isinstance(stored, dict) and UNFINISHED in stored:
                self._stored = stored
                return
        check_output_dir(path.parent)

    def load_rows(self, call_arguments: Mapping[str, Any]) -> list[FrontierRow]:
        """Return the rows from an interrupted call with the same arguments.

        Args:
            call_arguments: The arguments of this call, as JSON values.

        Raises:
            ValueError: If the file is damaged or belongs to a call with other arguments.
        """
        self._call = json.loads(json.dumps(call_arguments))
        if not self._stored:
            return []
        try:
            stored_call = self._stored[UNFINISHED]["call"]
            changed = sorted(name for name in self._call if stored_call.get(name) != self._call[name])
            rows = [FrontierRow(**row) for row in self._stored["rows"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is damaged ({error}). Delete it or use a new output folder.") from error
        if changed:
            raise ValueError(
                f"{self.path} belongs to an interrupted call with different {', '.join(changed)}. Repeat that call to "
                "resume it, or use a new output folder."
            )
        return rows

    def save(self, frontier: Frontier, num_remaining: int) -> None:
        """Write the rows of an unfinished call.

        Args:
            frontier: The rows that have been measured so far.
            num_remaining: The number of remaining variants.

        Raises:
            OSError: If the file cannot be written. In this case, the previous file stays unchanged.
        """
        self.finish(frontier.to_dict() | {UNFINISHED: {"variants_left": num_remaining, "call": self._call}})

    def finish(self, content: Mapping[str, Any]) -> None:
        """Write the results of the finished call.

        Raises:
            OSError: See `save`.
        """
        make_folders(self.path.parent)
        atomic_write(self.path, json.dumps(content, indent=2) + "\n")
