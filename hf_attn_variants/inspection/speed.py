"""Decoding speed of an encoder-decoder with each variant, measured on this machine after a check of the outputs."""

import copy
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoConfig, StoppingCriteria
from transformers.modeling_outputs import BaseModelOutput

from ..model_properties import ignore_saved_length_limits
from ..modeling.fields.variant_config import can_cache
from ..modeling.mechanisms.head_sharing import HeadSharing
from ..modeling.mechanisms.kernels.kernel_table import kernel_class
from ..modeling.mechanisms.patterns.window_pattern import SlidingWindow
from ..progress import progress_bar
from ..registration import longest_input, variant_model_class
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

__all__ = [
    "HEARING",
    "BreakEven",
    "FirstToken",
    "SpeedTable",
    "Times",
    "VariantSpeed",
    "check_cache",
    "check_upstream",
    "checked_models",
    "decoding_or_pass",
    "machine_now",
    "measure_speed",
    "run_times",
]

# Seconds until the first token was there, where there is one, and until the end.
Times = tuple[float | None, float]


class FirstToken(StoppingCriteria):
    """Stops nothing; notes when the first token was there."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.time: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.time is None:
            _wait(self.device)
            self.time = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def decoding_or_pass(
    model: Any, batch_size: int, length: int, decoding: tuple[int, int] | None
) -> Callable[[], StoppingCriteria | None]:
    """Return what is timed, for `run_times`.

    Args:
        model: it must end no text by itself before its time (`eos_token_id`).
        batch_size, length: of the text or audio or, for an encoder-decoder, of the encoder's outputs; all random.
        decoding: the tokens to generate and the beams; None = a pass over the text.
    """
    if decoding is None and model.main_input_name == "input_features":
        shape = (batch_size, model.config.num_mel_bins, 2 * length)  # the encoder halves its frames
        features = torch.randn(shape, device=model.device, dtype=model.dtype)
        return lambda: (model(input_features=features), None)[1]
    if decoding is None:
        ids = torch.randint(model.config.vocab_size, (batch_size, length), device=model.device)
        return lambda: (model(input_ids=ids), None)[1]
    states: Any = torch.randn(batch_size, length, model.config.d_model, device=model.device, dtype=model.dtype)
    mask = torch.ones(batch_size, length, dtype=torch.long, device=model.device)
    options: dict[str, Any] = {"max_new_tokens": decoding[0], "num_beams": decoding[1], "do_sample": False}
    if model.main_input_name == "input_features":  # Whisper's own code would look for further segments of the audio
        options |= {"force_unique_generate_call": True, "return_timestamps": False}

    def run() -> StoppingCriteria:
        # A fresh output for each call: a search with beams writes its repeated states into the one that it is given.
        given = {"encoder_outputs": BaseModelOutput(states), "attention_mask": mask}
        first = FirstToken(str(model.device))
        with ignore_saved_length_limits(model):
            model.generate(**given, **options, stopping_criteria=[first])
        return first

    return run


@torch.no_grad()
def run_times(run: Callable[[], Any], device: str) -> Times:
    """Return the seconds until the first token was there (None for a pass) and until the end."""
    _wait(device)
    start = time.perf_counter()
    first = run()
    _wait(device)
    end = time.perf_counter()
    return None if first is None else first.time - start, end - start


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


TOKENS, PROMPT, SOURCE, ROWS = 8, 4, 16, 2
# Of the largest output: float32 in another order of summation.
TOLERANCE = 1e-4


@torch.no_grad()
def check_upstream(ours: Any, upstream: Any, decodes: bool) -> None:
    """Give our multi-head model the weights of upstream's, and compare what they decode or put out.

    Args:
        ours, upstream: float32 models of one shape on one device.
        decodes: compare eight tokens, decoded greedily; else outputs of two texts, one of them padded (or of audio).

    Raises:
        ValueError: if they differ.
    """
    ours.load_state_dict(upstream.state_dict())
    names = f"{type(ours).__name__} and {type(upstream).__name__} of the same weights"
    if decodes:
        _compare_decoded(f"{names} decode differently", _decoded(ours), _decoded(upstream))
        return
    inputs = _inputs(ours)
    _compare(f"{names} put out different numbers", _output(ours, inputs), _output(upstream, inputs))


@torch.no_grad()
def check_cache(models: Mapping[str, Any]) -> None:
    """Compare the eight tokens that each model decodes through its cache with those that it decodes without one.

    Args:
        models: encoder-decoders by what they are called, in float32.

    Raises:
        ValueError: if they differ.
    """
    for name, model in models.items():
        if can_cache(model.config):
            what = f"{name} decodes differently through its cache and without one"
            _compare_decoded(what, _decoded(model), _decoded(model, use_cache=False))


def _compare_decoded(what: str, *pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Compare tokens [rows, 8] and what they were chosen by, logits [rows, 8, vocabulary].

    The tokens alone say little: models of random weights may write one token over and over, whatever they read.
    """
    (found, logits), (expected, others) = pair
    # A text is compared up to its first tie, broken by the order of summation.
    alike = (found == expected).long().cumprod(1).roll(1, 1).index_fill(1, found.new_tensor(0), 1).bool()
    _compare(what, logits[alike], others[alike])


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise ValueError(f"{what}, {difference:.1e} of the largest number apart: nothing is timed.")


def _generator(model: Any) -> torch.Generator:
    return torch.Generator(device=model.device).manual_seed(0)


def _decoded(model: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens decoded from outputs of an encoder, half of the second text padding, and their logits."""
    shape = (ROWS, SOURCE, model.config.d_model)
    states: Any = torch.randn(shape, generator=_generator(model), device=model.device)
    given = {"encoder_outputs": BaseModelOutput(states), "attention_mask": _mask(model, SOURCE)}
    # A text of one token over and over, as random weights write it, gives the same whether it is remembered or not.
    given["decoder_input_ids"] = _words(model, PROMPT)
    options |= {"max_new_tokens": TOKENS, "num_beams": 1, "do_sample": False}
    found = model.generate(**given, **options, output_logits=True, return_dict_in_generate=True)
    return found.sequences[:, -TOKENS:], torch.stack(found.logits, 1)


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    if model.main_input_name == "input_features":
        shape = (ROWS, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=_generator(model), device=model.device)}
    length = min(SOURCE, getattr(model.config, "max_position_embeddings", None) or SOURCE)
    return {"input_ids": _words(model, length), "attention_mask": _mask(model, length)}


def _words(model: Any, length: int) -> torch.Tensor:
    shape, generator = (ROWS, length), _generator(model)
    return torch.randint(model.config.vocab_size, shape, generator=generator, device=model.device)


def _mask(model: Any, length: int) -> torch.Tensor:
    mask = torch.ones(ROWS, length, dtype=torch.long, device=model.device)
    mask[1, length // 2 :] = 0
    return mask


def _output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the first tensor that a model puts out, of tokens that are no padding."""
    output = model(**inputs)[0].float()
    return output[inputs["attention_mask"].bool()] if "attention_mask" in inputs else output


__all__ += ["order_of_round", "ready_to_time", "timed_auto_class", "timed_length", "upstream_model"]

# Tokens of a text where none are given; what reads audio reads a whole window.
LENGTH = 128
HEARING = ("AutoModelForAudioClassification", "AutoModelForSpeechSeq2Seq")


@dataclass(frozen=True)
class VariantSpeed:
    """One row.

    Args:
        name: of the attention; "upstream" is the class of Transformers.
        fields: of the configuration.
        milliseconds: median over the rounds of one generation.
        all_milliseconds: of each round.
        tokens_per_second: tokens generated in it.
        speedup: compared with the first row.
        first_milliseconds: median until the first token, with the encoder keys and values.
        step_milliseconds: median of a further token; None if only one was generated.
    """

    name: str
    fields: dict[str, Any]
    milliseconds: float
    all_milliseconds: list[float]
    tokens_per_second: float
    speedup: float
    first_milliseconds: float
    step_milliseconds: float | None


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
    """All rows, with what they hold for.

    Args:
        checkpoint: its name.
        architecture: the class of the model.
        batch_size: texts at once.
        length: tokens of the encoder outputs, from which each text is generated.
        max_new_tokens: tokens generated for each text.
        num_beams: of the search; 1 is greedy.
        dtype, device: of the models.
        machine: processor, threads, load and versions.
        rows: the variants, the baseline first.
        break_even: of cached encoder outputs, if they were timed over two tokens or more.
    """

    checkpoint: str
    architecture: str
    batch_size: int
    length: int
    max_new_tokens: int
    num_beams: int
    dtype: str
    device: str
    machine: dict[str, Any]
    rows: list[VariantSpeed]
    break_even: BreakEven | None = None

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
    max_new_tokens: int = 32,
    num_beams: int = 1,
    rounds: int = 5,
    dtype: str = "float32",
    device: str = "cpu",
) -> SpeedTable:
    """Time how an encoder-decoder generates with other heads. Weights are random: speed does not depend on them.

    The variants run in turn, and each round begins with another one, so that other work of the machine affects all.

    Args:
        config: of the checkpoint (config.json).
        checkpoint: its name, for the table.
        kv_heads: numbers of key/value heads of the decoder; None: all heads, 4, 2 and 1, as far as they divide.
        talking_heads, latents: whether talking heads and latents are timed, too.
        windows: sizes of sliding windows of the decoder to time (`attention_window`).
        kernels: kernels of linear attention of the decoder to time (`attention_kernel`); "hybrid" with each window.
        batch_size: texts at once.
        length: tokens of the encoder outputs; None: 128, for a Whisper its window.
        max_new_tokens: tokens to generate.
        num_beams: beams of the search; 1 is greedy. Tokens are counted once, not for each beam.
        rounds: timings of each variant, of which the median counts.
        dtype, device: of the models.

    Raises:
        ValueError: if the model does not generate, a number does not fit it, or variants compute something else.
    """
    check_sizes(
        batch_size=batch_size, length=length, max_new_tokens=max_new_tokens, num_beams=num_beams, rounds=rounds
    )
    _check_device(device)
    current = variant_config(config)
    auto_class = timed_auto_class(config, current)
    if "Seq2Seq" not in auto_class:
        raise ValueError(
            f"`benchmark` times the decoding of encoder-decoders, got {current.model_type} with {auto_class}."
        )
    length = timed_length(length, current, auto_class)
    found = checked_models(config, kv_heads, talking_heads, latents, windows, kernels, dtype, device)
    runs = {
        name: decoding_or_pass(m, batch_size, length, (max_new_tokens, num_beams)) for name, (_, m) in found.items()
    }
    times = _timed(runs, rounds, device)
    rows = _rows({name: fields for name, (fields, _) in found.items()}, times, batch_size, max_new_tokens)
    return SpeedTable(
        checkpoint, current.auto_classes[auto_class], batch_size, length, max_new_tokens, num_beams, dtype, device,
        machine_now(device), rows, _break_even(current, rows),
    )  # fmt: skip


def checked_models(
    config: Mapping[str, Any],
    kv_heads: Sequence[int] | None = None,
    talking_heads: bool = True,
    latents: bool = True,
    windows: Sequence[int] = (),
    kernels: Sequence[str] = (),
    dtype: str = "float32",
    device: str = "cpu",
) -> dict[str, tuple[dict[str, Any], Any]]:
    """Return the fields and the model of each variant by its name, the baseline first (see `measure_speed`).

    Raises:
        ValueError: if a variant does not fit, or does not compute in float32 what it should.
    """
    current = variant_config(config)
    auto_class = timed_auto_class(config, current)
    model_class = variant_model_class(current.auto_classes[auto_class])
    field = kv_heads_field(model_class, current)
    own = list(_of_checkpoint(config, current, field, kv_heads, talking_heads, latents))
    own += _windows_and_kernels(field, windows, kernels)
    contestants = dict(_contestants(config, current, auto_class, model_class, own))
    models = _checked(contestants, lambda: model_class(current), "Seq2Seq" in auto_class, dtype, device)
    return {name: (fields, models[name]) for name, (fields, _) in contestants.items()}


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
    fields: Mapping[str, dict[str, Any]], times: Mapping[str, list[Times]], batch_size: int, max_new_tokens: int
) -> list[VariantSpeed]:
    made: list[VariantSpeed] = []
    for name, found in times.items():
        each = [end * 1e3 for _, end in found]
        begins = [(begin or 0) * 1e3 for begin, _ in found]  # the first token is there
        median, first, step = statistics.median(each), statistics.median(begins), None
        if max_new_tokens > 1:
            steps = [end - begin for begin, end in zip(begins, each, strict=True)]
            step = statistics.median(steps) / (max_new_tokens - 1)
        speed = batch_size * max_new_tokens / median * 1e3, (made[0].milliseconds if made else median) / median
        made.append(VariantSpeed(name, fields[name], median, each, *speed, first, step))
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


def _timed(runs: Mapping[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[Times]]:
    """Return the times of each round of each contestant."""
    times: dict[str, list[Times]] = {name: [] for name in runs}
    for number in progress_bar(range(-1, rounds), desc="timing", unit="round", leave=False):  # the first warms up
        for name in order_of_round(list(runs), number):
            found = run_times(runs[name], device)
            if number >= 0:
                times[name].append(found)
    return times


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
