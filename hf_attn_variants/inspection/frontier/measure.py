"""The frontier of a checkpoint: variants of it, each with what its cache takes and what it loses, nothing written."""

import copy
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...conversion.calibration_settings import Calibration
from ...errors import as_value_error
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...modeling.fields.variant_config import can_cache
from ...progress import is_watched, progress_bar
from ...registration import longest_input
from ..costs import kv_heads_field, variant_name
from ..counting import kv_cache_bytes_per_token
from ..timing import decoding_or_pass, run_times
from .held_out import MEASURES, held_out_text
from .pieces import ConvertedAttentions

__all__ = ["Frontier", "FrontierRow", "measure_frontier"]

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
