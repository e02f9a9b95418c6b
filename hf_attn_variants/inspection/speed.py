"""How fast a checkpoint would run on this machine as each variant that it could be: measured, not counted."""

import copy
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from ..modeling.fields.variant_config import can_cache
from ..modeling.mechanisms.head_sharing import HeadSharing
from ..modeling.mechanisms.kernels.kernel_table import kernel_class
from ..modeling.mechanisms.patterns.window_pattern import SlidingWindow
from ..progress import progress_bar
from ..registration import longest_input, variant_model_class
from .agreement import check_cache, check_upstream
from .costs import (
    has_latents,
    kv_head_counts,
    kv_heads_field,
    source_window,
    variant_config,
    variant_name,
    variant_rows,
)
from .counting import check_sizes
from .page_faults import Usage, Watch, memory_now, summary
from .timing import Times, decoding_or_pass, run_times

__all__ = ["HEARING", "BreakEven", "SpeedTable", "VariantSpeed", "machine_now", "measure_speed", "timed_auto_class"]
__all__ += ["order_of_round", "ready_to_time", "timed_length", "upstream_model"]

POSITIONS = "max_position_embeddings"
# Tokens of a text where none are given; what reads audio reads a whole window.
LENGTH = 128
HEARING = ("AutoModelForAudioClassification", "AutoModelForSpeechSeq2Seq")


@dataclass(frozen=True)
class VariantSpeed:
    """One row.

    Args:
        name: what the attention is called; "upstream" is transformers' own class.
        fields: of the configuration.
        milliseconds: median over the rounds of one pass (of one generation, for an encoder-decoder).
        all_milliseconds: each round's.
        tokens_per_second: tokens read (generated) in it.
        speedup: over the first row.
        first_milliseconds: of an encoder-decoder, median until the first token is there, with what is made of the
            source for cross-attention.
        step_milliseconds: median of a further token; None where but one was generated.
        usage: page faults and seconds in the kernel of one pass or generation, medians (`page_faults.summary`).
    """

    name: str
    fields: dict[str, Any]
    milliseconds: float
    all_milliseconds: list[float]
    tokens_per_second: float
    speedup: float
    first_milliseconds: float | None = None
    step_milliseconds: float | None = None
    usage: dict[str, Any] | None = None


@dataclass(frozen=True)
class BreakEven:
    """From how many new tokens on keeping the encoder's outputs instead of keys and values costs more than it saves.

    It saves the projection of the source, once, and takes more work in each step; the caches of what was generated
    are alike. Where the first token does not come sooner, it costs more from the first one on.

    Args:
        exact, multi_head: names of the rows that are compared.
        new_tokens: the number; None = there is none, for its steps are not slower.
    """

    exact: str
    multi_head: str
    new_tokens: int | None


@dataclass(frozen=True)
class SpeedTable:
    """Every row with what the figures hold for.

    Args:
        checkpoint: its name, as given.
        architecture: the model's class.
        work: "forward", a pass over batch_size x length tokens (positions of audio); or "generate", decoding of
            `max_new_tokens` for each of batch_size texts from an encoder's output of `length` tokens.
        num_beams: of the decoding, 1 = greedy; None for a pass.
        batch_size, length, max_new_tokens, dtype, device: as given.
        machine: processor, threads, load and versions.
        rows: the variants, the baseline first.
        break_even: of the exact latent of cross-attention, where both were timed over two tokens or more.
        memory: how the process held memory (`page_faults.memory_now`).
    """

    checkpoint: str
    architecture: str
    work: str
    batch_size: int
    length: int
    max_new_tokens: int | None
    num_beams: int | None
    dtype: str
    device: str
    machine: dict[str, Any]
    rows: list[VariantSpeed]
    break_even: BreakEven | None = None
    memory: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def measure_speed(
    config: Mapping[str, Any],
    checkpoint: str = "",
    kv_heads: Sequence[int] | None = None,
    talking_heads: bool = True,
    latents: bool = True,
    windows: Sequence[int] = (),
    kernels: Sequence[str] = (),
    batch_size: int = 8,
    length: int | None = None,
    max_position_embeddings: int | None = None,
    max_new_tokens: int = 32,
    num_beams: int | None = None,
    rounds: int = 5,
    dtype: str = "float32",
    device: str = "cpu",
) -> SpeedTable:
    """Time a checkpoint's architecture with other heads, on random weights: speed does not depend on them.

    The contestants run in turn, each round from another one on, so that what else the machine does hits all alike.

    Args:
        config: the checkpoint's config.json; of it, no weight is read.
        checkpoint: its name, for the table.
        kv_heads: numbers of key/value heads; None = all heads, 4, 2 and 1, as far as they divide. In a T5 they are the
            decoder's.
        talking_heads, latents: whether talking heads and latents are timed too.
        windows: sizes of sliding windows to time (`attention_window`), in the stack that the heads are of.
        kernels: kernels of linear attention to time (`attention_kernel`); "hybrid" with each of the windows.
        batch_size: sequences at once.
        length: tokens of each (of the source, for an encoder-decoder); None = 128, for a Whisper its window.
        max_position_embeddings: as many positions for every contestant; None = the checkpoint's.
        max_new_tokens: encoder-decoders: tokens to generate.
        num_beams: encoder-decoders: beams of the search; None = 1, greedy. Tokens are counted once, not for each beam.
        rounds: timings of each contestant; the median counts.
        dtype, device: of the models.

    Raises:
        ValueError: for a configuration that makes no model here, a number that does not fit it, or other outputs.
    """
    check_sizes(batch_size=batch_size, length=length, max_new_tokens=max_new_tokens, rounds=rounds)
    _check_device(device)
    config = _with_positions(config, max_position_embeddings)
    current = variant_config(config)
    auto_class = timed_auto_class(config, current)
    decodes = "Seq2Seq" in auto_class
    model_class = variant_model_class(current.auto_classes[auto_class])
    work = _decoding(max_new_tokens, num_beams, decodes, model_class)
    length = timed_length(length, current, auto_class)
    field = kv_heads_field(model_class, current)
    own = list(_of_checkpoint(config, current, field, kv_heads, talking_heads, latents))
    own += _windows_and_kernels(field, windows, kernels)
    contestants = dict(_contestants(config, current, auto_class, model_class, own))
    made = _checked(contestants, lambda: model_class(current), decodes, dtype, device).items()
    found = _timed({name: decoding_or_pass(m, batch_size, length, work) for name, m in made}, rounds, device)
    rows = _rows(contestants, *found, batch_size * (max_new_tokens if decodes else length), work and max_new_tokens)
    return SpeedTable(
        checkpoint, model_class.__name__, "generate" if decodes else "forward", batch_size, length, work and work[0],
        work and work[1], dtype, device, machine_now(device), rows, _break_even(current, rows), memory_now(),
    )  # fmt: skip


def _decoding(max_new_tokens: int, num_beams: int | None, decodes: bool, model_class: type) -> tuple[int, int] | None:
    """Return the tokens to generate and the beams, None for a pass; raise ValueError where beams search nothing."""
    check_sizes(num_beams=num_beams)
    if num_beams is not None and not decodes:
        raise ValueError(
            f"`num_beams` is for encoder-decoders; {model_class.__name__} generates nothing: leave it out."
        )
    return (max_new_tokens, num_beams or 1) if decodes else None


def timed_auto_class(config: Mapping[str, Any], current: Any) -> str:
    """Return the Auto class of what is timed: of one stack of an encoder-decoder, that stack alone."""
    architecture = (config.get("architectures") or [""])[0]
    # A T5EncoderModel's config.json may say either of `is_encoder_decoder`.
    if architecture.endswith("EncoderModel"):
        return "AutoModelForTextEncoding"
    for head in ("ForCausalLM", "ForAudioClassification"):
        if architecture.endswith(head):
            return f"AutoModel{head}"
    both = [name for name in current.auto_classes if "Seq2Seq" in name]
    return both[0] if both and current.is_encoder_decoder else "AutoModel"


def _rows(
    contestants: Mapping[str, Any],
    times: dict[str, list[Times]],
    usages: dict[str, list[Usage]],
    tokens: int,
    max_new_tokens: int | None,
) -> list[VariantSpeed]:
    made: list[VariantSpeed] = []
    for name, found in times.items():
        each = [end * 1e3 for _, end in found]
        median, first, step = statistics.median(each), None, None
        begins = [begin for begin, _ in found if begin is not None]  # of a generation, when its first token is there
        if max_new_tokens is not None:
            first = statistics.median(begin * 1e3 for begin in begins)
        if max_new_tokens is not None and max_new_tokens > 1:
            pairs = zip(begins, (end for _, end in found), strict=True)
            step = statistics.median((end - begin) * 1e3 for begin, end in pairs) / (max_new_tokens - 1)
        baseline = made[0].milliseconds if made else median
        speed = (tokens / median * 1e3, baseline / median, first, step, summary(usages[name]))
        made.append(VariantSpeed(name, contestants[name][0], median, each, *speed))
    return made


def _break_even(current: Any, rows: Sequence[VariantSpeed]) -> BreakEven | None:
    exact = {"cross_kv_lora_rank": current.hidden_size}
    plain = [row for row in rows if row.name in ("upstream", HeadSharing.label)]
    pairs: list[tuple[Any, Any]] = [(row, other) for row in rows for other in plain if row.fields == exact]
    if not pairs or pairs[-1][0].step_milliseconds is None:
        return None
    ours, multi_head = pairs[-1]  # our own class, where it is there: it is listed after upstream's
    saved = multi_head.first_milliseconds - ours.first_milliseconds
    lost = ours.step_milliseconds - multi_head.step_milliseconds
    tokens = None
    if lost > 0 or (lost == 0 and saved < 0):
        # n tokens take n - 1 steps: the first n at which what was lost is more than what was saved.
        tokens = 1 if saved < 0 else 2 + math.floor(saved / lost)
    return BreakEven(ours.name, multi_head.name, tokens)


def order_of_round(names: Sequence[str], number: int) -> list[str]:
    """Return in which order contestants take their turns in a round.

    Every second round is the one before backwards, and each two begin further on: what one leaves behind, as cold
    caches or threads that still spin, is not always met by the same other one.

    Args:
        names: of the contestants.
        number: the round's.
    """
    first = number // 2 % max(1, len(names))
    order = [*names[first:], *names[:first]]
    return order[::-1] if number % 2 else order


def _timed(
    runs: dict[str, Callable[[], Any]], rounds: int, device: str
) -> tuple[dict[str, list[Times]], dict[str, list[Usage]]]:
    """Return the times of each round of each contestant, and what it took of the kernel."""
    times: dict[str, list[Times]] = {name: [] for name in runs}
    usages: dict[str, list[Usage]] = {name: [] for name in runs}
    for number in progress_bar(range(-1, rounds), desc="timing", unit="round", leave=False):  # the first warms up
        for name in order_of_round(list(runs), number):
            with Watch() as watch:
                found = run_times(runs[name], device)
            if number >= 0:
                times[name].append(found)
                usages[name].append(watch.usage)
    return times, usages


def timed_length(given: int | None, config: Any, auto_class: str) -> int:
    """Return how many tokens, or positions of audio, are read; raise ValueError where there are not so many."""
    positions = source_window(config) if auto_class in HEARING else longest_input(config)
    default = positions if auto_class in HEARING else LENGTH
    length: Any = default if given is None else given
    if positions is not None and length > positions:
        raise ValueError(f"`length` is {length}; the model has {positions} positions.")
    if auto_class == "AutoModelForAudioClassification" and length != positions:
        raise ValueError(f"`length` is {length}; the model reads {positions} positions of audio, always.")
    return length


def _check_device(device: str) -> None:
    try:
        if torch.device(device).type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are timed")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"the device {device!r} is not here: {str(error).splitlines()[0]}") from error


def _with_positions(config: Mapping[str, Any], positions: int | None) -> Mapping[str, Any]:
    """Return a config.json with so many positions, if given; raise ValueError where the model has no table of them."""
    if positions is None:
        return config
    if config.get(POSITIONS) is None:
        raise ValueError(f"`{POSITIONS}` is of models that have it; this one reads any length as it is: leave it out.")
    check_sizes(**{POSITIONS: positions})
    return {**config, POSITIONS: positions}


def _of_checkpoint(
    config: Mapping[str, Any], current: Any, field: str, kv_heads: Sequence[int] | None, talking: bool, latents: bool
) -> Iterator[dict[str, Any]]:
    """Yield the fields of the variants with these numbers of heads, with latents and with talking heads."""
    heads = current.query_heads(field)
    counts = {heads, 4, 2, 1} & set(kv_head_counts(current, field)) if kv_heads is None else set(kv_heads)
    if config["model_type"] == type(current).model_type and not has_latents(current, field):
        counts |= {heads}  # no class of transformers is the baseline then
    yield from variant_rows(current, field, sorted(counts, reverse=True), talking, latents)


def _windows_and_kernels(field: str, windows: Sequence[int], kernels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the fields of sliding windows and kernels, of a hybrid with each window.

    Raises:
        ValueError: for a hybrid without a window.
    """
    prefix = "encoder_" if field.startswith("encoder_") else ""
    for kernel in kernels:
        if kernel_class(kernel).reads_window and not windows:
            raise ValueError(f"a {kernel} reads a window by a softmax: give `attention_window` too.")
    sizes = [{f"{prefix}attention_window": window} for window in windows]
    found = [{f"{prefix}attention_pattern": SlidingWindow.name, **size} for size in sizes]
    for kernel in kernels:
        by_size = sizes if kernel_class(kernel).reads_window else [{}]
        found += [{f"{prefix}attention_kernel": kernel, **size} for size in by_size]
    return found


def _contestants(
    config: Mapping[str, Any], current: Any, auto_class: str, model_class: type, rows: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, tuple[dict[str, Any], Callable[[], Any]]]]:
    """Yield each name with the fields that make it and what builds it; the baseline first."""
    if config["model_type"] != type(current).model_type:
        yield "upstream", ({}, lambda: upstream_model(config, auto_class))
    field = kv_heads_field(model_class, current)
    for fields in rows:
        made = variant_config(config, **fields)
        yield variant_name(made, field), (fields, partial(model_class, made))


def _checked(
    contestants: Mapping[str, Any], multi_head: Callable[[], Any], decodes: bool, dtype: str, device: str
) -> dict[str, Any]:
    """Make the models, and check in float32 that they compute what they should; `multi_head` makes one as upstream's.

    Raises:
        ValueError: for one that does not.
    """
    made = {name: ready_to_time(make(), device) for name, (_, make) in contestants.items()}
    if "upstream" in made:
        check_upstream(ready_to_time(multi_head(), device), made["upstream"], decodes)
    if decodes:
        check_cache({name: model for name, model in made.items() if name != "upstream"})
    return {name: model.to(getattr(torch, dtype)) for name, model in made.items()}


def upstream_model(config: Mapping[str, Any], auto_class: str) -> Any:
    """Return a model of transformers' own with random weights, as a config.json of upstream's describes it."""
    return getattr(transformers, auto_class).from_config(AutoConfig.for_model(**copy.deepcopy(dict(config))))


def ready_to_time(model: Any, device: str) -> Any:
    """Return a model in float32, in evaluation mode and on a device, which ends no text by itself."""
    model = model.float().eval().to(device)
    if model.can_generate():
        model.generation_config.eos_token_id = None  # random weights may end a text at any token
        model.generation_config.use_cache = can_cache(model.config)
    return model


def machine_now(device: str) -> dict[str, Any]:
    """Return the device, threads, load and versions, for the reports."""
    on_cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
