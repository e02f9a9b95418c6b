"""The frontier of a checkpoint: variants of it, each with what its cache takes and what it loses, nothing written.

Which variants of a checkpoint are worth trying: fewer key/value heads, latents, and both sizes of them together.

What a frontier begins with: the checkpoint as a model, its options, and examples to fit to and to measure on.

Converted attentions, kept by what they are, and models put together from them.

A calibrated conversion makes each attention (of a shared latent: all that share it) from the source's alone. So the
attentions of one conversion go with those of another in one model, the one that converting both at once would make.

A frontier's rows in a file that grows with each of them, from which a second call goes on.
"""

import copy
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

from ...conversion.calibration.batches import add_text_lengths
from ...conversion.calibration.calibrate import calibrate
from ...conversion.calibration.methods import Calibrated
from ...conversion.calibration.source_outputs import load_processor, source_in_memory
from ...conversion.calibration_settings import Calibration
from ...conversion.checkpoint.models import ModelReader, assemble, reading_checkpoint
from ...conversion.checkpoint.source import read_config, resolve_source
from ...conversion.checkpoint.tensor_files import require_finite
from ...conversion.plan import explain_not_fittable, make_plan, seeded_generator
from ...conversion.writing import converted_tensors
from ...errors import as_value_error
from ...files import atomic_write, check_output_dir, load_json, make_folders
from ...modeling.attention.attention_sites import AttentionSite
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...modeling.fields.variant_config import can_cache
from ...progress import is_watched, progress_bar
from ...registration import longest_input, variant_model_class
from ..costs import has_latents, kv_head_counts, kv_heads_field, values_by_layer, variant_config, variant_name
from ..counting import kv_cache_bytes_per_token
from ..speed import decoding_or_pass, run_times
from .held_out import MEASURES, held_out_text

__all__ = [
    "ConvertedAttentions",
    "Frontier",
    "FrontierRow",
    "SavedFrontier",
    "default_options",
    "hash_examples",
    "load_source",
    "measure_frontier",
    "options_of",
    "split_text",
    "variants_to_try",
]

Fields = dict[str, Any]
# The most numbers of key/value heads that are tried where nobody says which.
MOST_COUNTS = 4


def default_options(config: Any, field: str, decodes: bool) -> list[Fields]:
    """Return the fields of the variants to try.

    Of an encoder-decoder: latents of its cross-attention, from the exact one down, with such of the decoder's
    self-attention whose sizes go with them; of other models latents of their attention. And fewer key/value heads.

    Args:
        config: the source's variant configuration.
        field: of the key/value heads that are varied.
        decodes: whether the attention of these heads has a cache.
    """
    width, own_counts = config.hidden_size, values_by_layer(config, field) or [config.query_heads(field)]
    multi_query = 2 * config.attention_head_dim()  # numbers a token and layer
    # Whole groups are merged, in each layer.
    counts = [count for count in kv_head_counts(config, field) if count < max(own_counts)]
    counts = [count for count in counts if all(own % count == 0 or count % own == 0 for own in own_counts)]

    def fits(value: int | None) -> bool:
        return value is None or 1 <= value <= width

    options: list[Fields] = []
    if has_latents(config, field):
        pass  # what they are made from is not there any more: smaller ones are what a user asks for by name
    elif "cross_kv_lora_rank" in config.rank_fields() and decodes:
        cross = [width, width // 2, 3 * width // 8, width // 4]
        own = [None, 2 * multi_query, multi_query, multi_query // 2]
        pairs = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 2), (2, 3), (3, 2), (3, 3)]
        options += [{"cross_kv_lora_rank": cross[i], "kv_lora_rank": own[j]} for i, j in pairs]
    else:
        name = "encoder_kv_lora_rank" if field.startswith("encoder_") else "kv_lora_rank"
        exact = [width] if decodes else []  # an encoder would compute more, and store as much
        options += [{name: rank} for rank in (*exact, width // 2, 3 * width // 8, width // 4, width // 8)]
    options += [{field: count} for count in _spread(counts)]
    return _distinct(option for option in options if all(fits(value) for value in option.values()))


def options_of(given: Mapping[str, Sequence[int] | None]) -> list[Fields]:
    """Return the variants of the values that a user names: heads alone, and ranks in all their combinations.

    Args:
        given: {field: values}; None = not given.
    """
    heads = [(name, values) for name, values in given.items() if "heads" in name and values]
    ranks = {name: values for name, values in given.items() if "rank" in name and values}
    options = [dict(zip(ranks, chosen, strict=True)) for chosen in itertools.product(*ranks.values())] if ranks else []
    return _distinct([*options, *({name: value} for name, values in heads for value in values)])


def _spread(counts: Sequence[int]) -> list[int]:
    """Return at most `MOST_COUNTS` of them, the largest and the smallest among them."""
    if len(counts) <= MOST_COUNTS:
        return list(counts)
    step = (len(counts) - 1) / (MOST_COUNTS - 1)
    return [counts[round(i * step)] for i in range(MOST_COUNTS)]


def _distinct(options: Iterable[Fields]) -> list[Fields]:
    """Return options without what is not given and without repeats, in their order."""
    found: list[Fields] = []
    for option in options:
        fields = {name: value for name, value in option.items() if value is not None}
        if fields and fields not in found:
            found.append(fields)
    return found


def load_source(
    checkpoint: str, calibration: Calibration, revision: str | None = None, token: str | None = None
) -> tuple[AttnVariantModelMixin, Any]:
    """Return a checkpoint as this package's model of the same heads, in float32, and what makes its inputs.

    Args:
        checkpoint: a folder or a Hub id.
        calibration: what its variants are fitted to, text or audio.
        revision, token: of a Hub id.

    Returns:
        The model, and its tokenizer or, for audio, its feature extractor.

    Raises:
        OSError: if there is no checkpoint, or no tokenizer or feature extractor beside it.
        ValueError: if it is of no architecture here, or reads audio where the calibration is text, or the reverse.
    """
    folder = resolve_source(checkpoint, revision, token, allow_pickle=False)
    raw = read_config(folder)
    config = variant_config(raw)
    model_class = variant_model_class((raw.get("architectures") or [config.auto_classes["AutoModel"]])[0])
    hears, wants = model_class.main_input_name == "input_features", calibration.audio is not None
    if hears is not wants:
        kinds = ("audio", "calibration_audio_dir") if hears else ("text", "calibration_file")
        raise ValueError(f"{os.fspath(checkpoint)} ({model_class.__name__}) reads {kinds[0]}: give --{kinds[1]}.")
    with reading_checkpoint(folder):
        model = model_class.from_pretrained(folder, config=config, dtype=torch.float32, use_safetensors=True).eval()
    for name, parameter in model.named_parameters():
        require_finite(parameter, name, os.fspath(checkpoint))  # before anything is measured
    return model, load_processor(folder, calibration)


def variants_to_try(model: AttnVariantModelMixin, given: Mapping[str, Sequence[int] | None]) -> list[dict[str, Any]]:
    """Return the fields of the variants of a model that a frontier tries: those given, or the default ones.

    Args:
        model: the source.
        given: values by field; None or nothing = not given.

    Raises:
        ValueError: if a field is given that this model has no attention for, or there is nothing to try.
    """
    config = model.config
    sites = [site for site, _, _ in model.named_attentions()]
    used = {name for site in sites for name in (site.kv_heads_field, site.rank_field) if name is not None}
    asked = {name: values for name, values in given.items() if values}
    if useless := sorted(set(asked) - used):
        raise ValueError(f"`{useless[0]}` is of attentions that {type(model).__name__} does not have.")
    if asked:
        return options_of(asked)
    field = kv_heads_field(type(model), config)
    decodes = any(site.kv_heads_field == field and site.stack_of(config) == "decoder" for site in sites)
    if options := default_options(config, field, decodes):
        return options
    raise ValueError("there is no variant to try: the checkpoint has a single key/value head, or latents already.")


def split_text(calibration: Calibration, everything: Calibration, size: int, seed: int = 0) -> Calibration:
    """Return what to measure on: examples that are not among the calibration's or, where few are left, its held-out.

    Args:
        calibration: the examples that a conversion reads.
        everything: all there are, or other text.
        size: the most to take.
        seed: of the calibration; it draws these too.

    Raises:
        ValueError: if `size` is less than 2.
    """
    if size < 2:
        raise ValueError(f"`held_out_size` must be at least 2; got {size}.")
    used, examples = set(_examples(calibration)), list(dict.fromkeys(_examples(everything)))
    rest = [example for example in examples if example not in used]
    if len(rest) >= min(calibration.held_out_count, len(examples)):
        chosen = random.Random(seed).sample(rest, min(size, len(rest)))
    else:
        # As `calibration.batches` draws those that nothing is fitted to.
        count, generator = len(calibration.examples), seeded_generator(seed, "held-out texts")
        drawn = torch.randperm(count, generator=generator).tolist()[: calibration.held_out_count]
        chosen = [_examples(calibration)[i] for i in drawn[:size]]
    found, targets = zip(*chosen, strict=True)
    if calibration.audio is not None:
        return replace(calibration, audio=found)
    return replace(calibration, texts=found, target_texts=None if targets[0] is None else list(targets))


def _examples(calibration: Calibration) -> list[tuple[Any, str | None]]:
    targets: Sequence[str | None] = calibration.target_texts or [None] * len(calibration.examples)
    return list(zip(calibration.examples, targets, strict=True))


Tensors = dict[str, torch.Tensor]
# An attention's path with its heads; with those of all layers where these share a latent.
Key = tuple[str, Any]


class ConvertedAttentions:
    """The attentions of a source's conversions, made when they are first asked for."""

    def __init__(self, source: AttnVariantModelMixin, calibration: Calibration, seed: int = 0) -> None:
        """Begin with the source's own.

        Args:
            source: a variant model, in float32.
            calibration: the text or audio that new ones are fitted to, with its tokenizer or feature extractor.
            seed: of everything random in a conversion.

        Raises:
            ValueError: for a source to which nothing can be fitted.
        """
        if (reason := explain_not_fittable(source.config)) is not None:
            raise ValueError(f"a calibration makes the variants, and cannot be used here: {reason}")
        self.source, self.seed = source, seed
        self.calibration = add_text_lengths(calibration, calibration.processor, source.config)
        self._prefix = "" if source.base_model is source else f"{source.base_model_prefix}."
        self._tensors: dict[Key, Tensors] = {}
        self._errors: dict[Key, float | None] = {}
        # The examples as the source reads them, from the first conversion on: what it writes of them, it writes once.
        self._batches: Any = None
        self._keep(source, {})

    def config(self, fields: Mapping[str, Any]) -> Any:
        """Return the source's configuration with these fields.

        Raises:
            ValueError: if they make none.
        """
        config: Any = self.source.config
        return type(config).from_upstream(config, **fields)

    def model(self, fields: Mapping[str, Any]) -> AttnVariantModelMixin:
        """Return the source as a variant of these fields; parameters that stay share the source's memory.

        Raises:
            ValueError: if there is no conversion to it.
        """
        config = self.config(fields)
        if missing := self._missing(config, fields):
            self._convert(missing)
        tensors = {name: each.detach() for name, each in self.source.named_parameters(remove_duplicate=False)}
        for key, own in self._keys(config):
            for name in self._tensors[own] if key != own else ():
                tensors.pop(f"{self._prefix}{name}", None)  # a shared latent is gone after the first
        for key, own in self._keys(config):
            if key != own:
                tensors |= {f"{self._prefix}{name}": each for name, each in self._tensors[key].items()}
        return assemble(type(self.source), config, tensors, self.source)

    def _convert(self, fields: Mapping[str, Any]) -> None:
        """Keep the attentions of a conversion to these fields, with their errors."""
        reader = ModelReader(self.source)
        config = self.source.config.to_dict() | {"architectures": [type(self.source).__name__]}
        plan = make_plan(config, reader.entries, Calibrated(), fields, self.seed)
        source = source_in_memory(reader, self.source)
        result = calibrate(plan, reader, source, self.calibration, with_source_outputs=False, batches=self._batches)
        fits, self._batches = result.attentions, result.batches or self._batches
        tensors = converted_tensors(plan, reader, fits)
        converted = assemble(plan.model_class, plan.config, tensors, self.source)
        self._keep(converted, {path: fit.details.get("output_relative_error") for path, fit in fits.items()})

    def attention_error(self, fields: Mapping[str, Any]) -> float | None:
        """Return the mean relative error of the outputs of the attentions that `model` changed, on held-out text."""
        errors = [self._errors.get(key) for key, own in self._keys(self.config(fields)) if key != own]
        known = [error for error in errors if error is not None]
        if len(known) < len(errors):
            return None
        return sum(known) / len(known) if known else 0.0

    def is_at_hand(self, fields: Mapping[str, Any]) -> bool:
        """Say whether `model` takes no conversion any more."""
        return not self._missing(self.config(fields), fields)

    def _missing(self, config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields whose attentions are not there."""
        absent = {path for (path, _), _ in self._keys_not_kept(config)}
        sites = [site for site, path, _ in self.source.named_attentions() if path in absent]
        names = {name for site in sites for name in (site.kv_heads_field, site.rank_field)}
        missing = {name: value for name, value in fields.items() if name in names}
        by_layer = {name: v for name, v in (fields.get("per_layer_values") or {}).items() if name in names}
        return missing | ({"per_layer_values": by_layer} if by_layer else {})

    def _keys_not_kept(self, config: Any) -> list[tuple[Key, Key]]:
        return [(key, own) for key, own in self._keys(config) if key not in self._tensors]

    def _keys(self, config: Any) -> list[tuple[Key, Key]]:
        """Return each attention's key in a model of this configuration, and in the source."""
        attentions = [(site, path) for site, path, _ in self.source.named_attentions()]
        return [
            (self._key(config, site, path), self._key(self.source.config, site, path)) for site, path in attentions
        ]

    def _key(self, config: Any, site: AttentionSite, path: str) -> Key:
        def heads(path: str) -> Any:
            counts = site.heads(config, path)
            # The input itself takes no other tensors than none.
            return counts._replace(rank=None) if counts.rank == config.hidden_size else counts

        if not site.shares_latent or heads(path).rank is None:
            return path, heads(path)
        return path, tuple(heads(each) for other, each, _ in self.source.named_attentions() if other is site)

    def _keep(self, model: AttnVariantModelMixin, errors: Mapping[str, float | None]) -> None:
        parameters = {name: each.detach() for name, each in model.base_model.named_parameters(remove_duplicate=False)}
        for site, path, _ in model.named_attentions():
            key, shared = self._key(model.config, site, path), f"{site.latent_path(path)}.weight"
            if key not in self._tensors:
                belongs = {name: each for name, each in parameters.items() if name.startswith(f"{path}.")}
                belongs |= {shared: parameters[shared]} if shared in parameters else {}
                self._tensors[key], self._errors[key] = belongs, errors.get(path)


FLOAT = 4  # bytes of the numbers of a cache here
# How an option's time is measured: sequences at once, tokens to generate, timings in turn with the source's.
TIMED_BATCH, TIMED_TOKENS, TIMED_ROUNDS = 8, 9, 3


@dataclass(frozen=True)
class FrontierRow:
    """One variant.

    Args:
        name: for people.
        fields: of the configuration, as `convert` takes them; the source's row has none.
        loss: on the held-out text, by the frontier's measure.
        loss_above: the source's subtracted from it, text by text.
        loss_above_error: the standard error of that, over the texts.
        attention_error: mean relative error of the outputs of the attentions that changed, on the calibration's
            held-out text; 0 for what computes the same, None where it is no number.
        parameters: of the model.
        kv_cache_bytes_per_token: by `kv_cache_bytes_per_token`, in float32.
        kv_cache_bytes: of a text at the frontier's lengths; None without a cache.
        milliseconds: estimate of a generated token at `TIMED_BATCH` texts of the source's length, or of a pass over
            them for a model without a cache: the source's time by the ratio of both in turn.
        on_frontier: whether no other variant is both smaller and better.
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
        """What is to be small: the bytes of the cache or, without one, the parameters."""
        return self.parameters if self.kv_cache_bytes is None else self.kv_cache_bytes


@dataclass(frozen=True)
class Frontier:
    """All variants with what the figures hold for.

    Args:
        checkpoint, architecture: of the source.
        measure: one of `MEASURES`.
        held_out_texts: how many texts, or recordings, the loss is of.
        calibration: what new attentions were fitted to and how (`Calibration.settings`).
        length: tokens that the decoder has in its cache, or those of a model without one.
        source_length: tokens that the encoder of an encoder-decoder reads.
        rows: the source first, then by size, the largest first.
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
        """The checkpoint as it is."""
        return self.rows[0]

    def cheapest(self, loss: float) -> FrontierRow | None:
        """Return the smallest variant that loses at most so much more than the source; None where there is none."""
        within = [row for row in self.rows[1:] if row.loss_above <= loss]
        return min(within, key=lambda row: (row.size, row.loss_above), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self) | {"measure": MEASURES[self.measure]}


def measure_frontier(
    source: AttnVariantModelMixin,
    options: Sequence[Mapping[str, Any]],
    calibration: Calibration,
    held_out: Calibration,
    checkpoint: str = "",
    length: int = 512,
    source_length: int | None = None,
    seed: int = 0,
    known: Sequence[FrontierRow] = (),
    on_row: Callable[[Frontier, int], None] | None = None,
) -> Frontier:
    """Convert a model in memory to each option, and measure what it loses and what it takes.

    Each attention is converted once, whatever the number of options that have it.

    Args:
        source: a variant model (a multi-head one, for example), in float32, on the device to use.
        options: configuration fields, as `convert` takes them.
        calibration: the text or audio that new attentions are fitted to, with the model's tokenizer or feature
            extractor.
        held_out: other examples of the same kind, on which the loss is measured.
        checkpoint: its name, for the table.
        length: tokens in a decoder's cache, or those of an encoder's text.
        source_length: tokens that an encoder-decoder's encoder reads; None = `length`, of audio all positions.
        seed: of everything random in a conversion.
        known: rows that another call of the same arguments measured, the source's first.
        on_row: called with the rows so far, and how many options are left, after each row that is measured.

    Raises:
        ValueError: for an option that makes no model of this one, what a calibration refuses, a source whose loss is
            no number, or is not the one that is known.
    """
    length, source_length = _lengths(source.config, calibration, length, source_length)
    pieces, source = ConvertedAttentions(source.eval(), calibration, seed), source.eval()
    for fields in options:
        pieces.config(fields)
    with as_value_error(f"{checkpoint or 'the source'} cannot read the text: its configuration is wrong"):
        text = held_out_text(source, calibration.processor, held_out)
        losses = text.losses(source)
    lengths = {site.name: source_length if site.is_cross_attention else length for site in source.attention_sites}
    about = (checkpoint, type(source).__name__, text.measure, len(losses), _settings(pieces.calibration, seed))
    _check_loss(losses, checkpoint, known)
    measured = _Measured(text.losses, losses, _timer(source, length, source_length, known), lengths)
    order = _in_turn([each for each in options if all(dict(each) != row.fields for row in known[1:])], source)
    conversions = 0
    rows = [*known] or [measured.row(source, {}, 0.0)]
    keep = on_row or (lambda frontier, left: None)
    keep(frontier := Frontier(*about, length, source_length, _in_order(rows)), len(order))
    with progress_bar(total=len(order), desc="trying variants", unit="variant", smoothing=0) as bar:
        for number, fields in enumerate(order, start=1):
            name = _name(type(source), pieces.config(fields), fields)
            conversions += not pieces.is_at_hand(fields)
            bar.set_description(f"trying {name}", refresh=is_watched())
            rows.append(measured.row(pieces.model(fields), dict(fields), pieces.attention_error(fields)))
            keep(frontier := Frontier(*about, length, source_length, _in_order(rows)), len(order) - number)
            bar.update()
            bar.set_postfix_str(f"{rows[-1].loss_above:+.3f} ({conversions} conversions)", refresh=is_watched())
    return frontier


def _in_turn(options: Sequence[Mapping[str, Any]], source: AttnVariantModelMixin) -> list[Mapping[str, Any]]:
    """Return those that change most attentions first: one conversion then makes those of several options."""
    width = source.config.hidden_size
    return sorted(options, key=lambda fields: -sum(value != width for value in fields.values()))


def _settings(calibration: Calibration, seed: int) -> dict[str, Any]:
    settings = {"count": len(calibration.examples), "fit_steps": calibration.fit_option("fit_steps")}
    return settings | {
        "targets": calibration.target_texts is not None,
        "max_length": calibration.length,
        "seed": seed,
    }


def _lengths(config: Any, calibration: Calibration, length: int, source_length: int | None) -> tuple[int, int]:
    """Return the tokens in a decoder's cache and those that its encoder reads, as far as the model has positions."""
    positions = longest_input(config)
    most = sys.maxsize if positions is None else positions
    if calibration.audio is not None:  # a window is always read whole
        return min(length, most), config.max_source_positions if source_length is None else source_length
    return min(length, most), min(length if source_length is None else source_length, most)


def _check_loss(losses: torch.Tensor, checkpoint: str, known: Sequence[FrontierRow]) -> None:
    """Check the source's loss: a number, and that of the rows that are known."""
    if not losses[:, 1].any():
        raise ValueError(
            f"{checkpoint or 'the source'} has nothing to say of the held-out examples: a loss is of what it writes, "
            "or of tokens that are masked. Give it examples of its kind, a T5 also their targets "
            "(--calibration_target_file)"
        )
    mean = float(losses[:, 0].sum() / losses[:, 1].sum())
    if not math.isfinite(mean):
        raise ValueError(f"the loss of {checkpoint or 'the source'} itself is {mean}: look at its weights")
    if known and not math.isclose(mean, known[0].loss, rel_tol=1e-4, abs_tol=1e-6):
        raise ValueError(
            f"the loss of {checkpoint or 'the source'} is {mean:.6f}, and was {known[0].loss:.6f} when the rows that "
            "are there were measured: it was changed since; give a new folder"
        )


def _in_order(rows: Sequence[FrontierRow]) -> list[FrontierRow]:
    return _marked([rows[0], *sorted(rows[1:], key=lambda row: (-row.size, row.loss_above))])


@dataclass
class _Measured:
    """How a model becomes a row."""

    losses: Callable[[AttnVariantModelMixin], torch.Tensor]
    source: torch.Tensor  # its losses, [texts, 2]
    milliseconds: Callable[[AttnVariantModelMixin], float]
    lengths: dict[str, int]

    def row(self, model: AttnVariantModelMixin, fields: dict[str, Any], attention_error: float | None) -> FrontierRow:
        found = self.losses(model)
        above, error = _difference(found, self.source)
        cache = kv_cache_bytes_per_token(model, FLOAT)
        return FrontierRow(
            name=_name(type(model), model.config, fields),
            fields=fields,
            loss=float(found[:, 0].sum() / found[:, 1].sum()),
            loss_above=above,
            loss_above_error=error,
            attention_error=attention_error,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            kv_cache_bytes_per_token=cache,
            kv_cache_bytes=None if cache is None else sum(self.lengths[site] * size for site, size in cache.items()),
            milliseconds=self.milliseconds(model),
        )


def _name(model_class: type[AttnVariantModelMixin], config: Any, fields: Mapping[str, Any]) -> str:
    """Return what a variant is called: by the stack whose heads are varied, and by the encoder where it differs."""
    field = kv_heads_field(model_class, config)
    name = variant_name(config, field)
    by_layer = fields.get("per_layer_values") or {}
    if field.startswith("encoder_") or not any(each.startswith("encoder_") for each in (*fields, *by_layer)):
        return name
    return f"{name} + encoder {variant_name(config, f'encoder_{field}')}"


def _difference(losses: torch.Tensor, source: torch.Tensor) -> tuple[float, float]:
    """Return the mean difference of two models' losses [texts, 2] over all words, and its standard error.

    The error is that of a ratio of sums over texts, which are the independent samples.
    """
    words = losses[:, 1].sum()
    mean = (losses[:, 0] - source[:, 0]).sum() / words
    left = losses[:, 0] - source[:, 0] - mean * losses[:, 1]
    texts = len(losses)
    error = left.square().sum().sqrt() / words * math.sqrt(texts / max(texts - 1, 1))
    return float(mean), float(error)


def _marked(rows: Sequence[FrontierRow]) -> list[FrontierRow]:
    """Return the rows with those on the frontier marked: no other is smaller or as small, and better."""

    def is_beaten(row: FrontierRow) -> bool:
        better = (each for each in rows if each.size <= row.size and each.loss_above <= row.loss_above)
        return any((each.size, each.loss_above) != (row.size, row.loss_above) for each in better)

    return [FrontierRow(**vars(row) | {"on_frontier": not is_beaten(row)}) for row in rows]


def _timer(
    source: AttnVariantModelMixin, length: int, source_length: int, known: Sequence[FrontierRow]
) -> Callable[[AttnVariantModelMixin], float]:
    """Return the function that estimates a model's milliseconds; the source's are measured once more with each."""
    decodes = source.can_generate() and source.config.is_encoder_decoder
    positions, read = longest_input(source.config), source_length if decodes else length
    read = read if positions is None else min(read, positions)
    found = [row.milliseconds for row in known[:1]]

    def run(model: AttnVariantModelMixin) -> Callable[[], float]:
        work = decoding_or_pass(_generating(model), TIMED_BATCH, read, (TIMED_TOKENS, 1) if decodes else None)

        def milliseconds() -> float:
            first, end = run_times(work, str(model.device))
            if first is None or not decodes:  # a pass, which has no first token
                return end * 1e3
            return (end - first) * 1e3 / (TIMED_TOKENS - 1)

        return milliseconds

    own = run(source)

    def estimate(model: AttnVariantModelMixin) -> float:
        if model is source:
            own()
            found.append(statistics.median(own() for _ in range(TIMED_ROUNDS)))
            return found[0]
        other = run(model)
        other()
        ratios = [other() / own() for _ in range(TIMED_ROUNDS)]
        return found[0] * statistics.median(ratios)

    return estimate


def _generating(model: AttnVariantModelMixin) -> AttnVariantModelMixin:
    """Return a model that generates all the tokens that it is asked for."""
    if model.can_generate():
        model.generation_config = copy.deepcopy(model.generation_config)
        model.generation_config.eos_token_id = None
        model.generation_config.use_cache = can_cache(model.config)
    return model


UNFINISHED = "unfinished"


def hash_examples(calibration: Calibration) -> str:
    """Return a short hash of texts and targets, or of the files of audio.

    Raises:
        OSError: if a file cannot be read.
    """
    content = hashlib.blake2b(digest_size=8)
    for path in calibration.audio or ():
        content.update(hashlib.blake2b(Path(path).read_bytes()).digest())
    if calibration.audio is None:
        content.update(json.dumps([calibration.texts, calibration.target_texts]).encode())
    return content.hexdigest()


class SavedFrontier:
    """The file of one call's rows; that of a call which was stopped says so, and what it was asked.

    Args:
        path: the file; its folder is new or empty, or has that of the same call.

    Raises:
        ValueError, OSError: where the folder holds something else.
    """

    def __init__(self, path: Path):
        self.path, self._stored = path, {}
        temporary = path.with_name(f".tmp-{path.name}")
        if temporary.is_file() and [*path.parent.iterdir()] == [temporary]:
            temporary.unlink()  # of a call that was killed in its first write
        if path.is_file():
            stored = load_json(path)
            if isinstance(stored, dict) and UNFINISHED in stored:
                self._stored = stored
                return
        check_output_dir(path.parent)

    def rows(self, call: Mapping[str, Any]) -> list[FrontierRow]:
        """Return the rows that are there, measured by the same call.

        Raises:
            ValueError: if the file is of another call, or damaged.
        """
        self._call = json.loads(json.dumps(call))
        if not self._stored:
            return []
        try:
            before = self._stored[UNFINISHED]["call"]
            changed = sorted(name for name in self._call if before.get(name) != self._call[name])
            found = [FrontierRow(**row) for row in self._stored["rows"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path} is damaged ({error}): delete it, or give a new folder") from error
        if changed:
            raise ValueError(
                f"{self.path} has the rows of another call, with another {', '.join(changed)}: repeat that call to go "
                "on, or give a new folder"
            )
        return found

    def save(self, frontier: Frontier, left: int) -> None:
        """Write the rows there are, of a call that has so many variants left.

        Raises:
            OSError: if the file cannot be written; it stays as it was.
        """
        self._write(frontier.to_dict() | {UNFINISHED: {"variants_left": left, "call": self._call}})

    def finish(self, found: Mapping[str, Any]) -> None:
        """Write what is found in the end.

        Raises:
            OSError: as for `save`.
        """
        self._write(found)

    def _write(self, found: Mapping[str, Any]) -> None:
        make_folders(self.path.parent)
        atomic_write(self.path, json.dumps(found, indent=2) + "\n")
