"""Measures the decoding speed of an encoder-decoder and its variants, after checking their outputs."""

import copy
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from transformers import AutoConfig, StoppingCriteria
from transformers.modeling_outputs import BaseModelOutput

from ..model_properties import get_encoder_width, ignore_saved_length_limits
from ..modeling.fields.variant_config import supports_decoder_cache
from ..modeling.mechanisms.head_sharing import HeadSharing
from ..modeling.mechanisms.kernels.kernel_table import get_kernel_class
from ..modeling.mechanisms.patterns.window_pattern import SlidingWindowPattern
from ..progress import progress_bar
from ..registration import get_max_input_length, get_variant_model_class
from .costs import (
    check_sizes,
    get_num_audio_positions,
    get_variant_name,
    get_varied_heads_field,
    has_latents,
    iterate_variant_fields,
    list_kv_head_counts,
    make_variant_config,
)

# The number of seconds until the first token (None for a forward pass) and until the end.
Times = tuple[float | None, float]


class FirstTokenTimer(StoppingCriteria):
    """Stopping criterion that never stops the generation, but records the time of the first token."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.time: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.time is None:
            _synchronize(self.device)
            self.time = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def make_timed_function(
    model: Any, batch_size: int, length: int, decoding: tuple[int, int] | None
) -> Callable[[], StoppingCriteria | None]:
    """Return a function for `time_run` that decodes, or runs a forward pass, on random inputs.

    Args:
        model: The model, which must not stop early when it generates (see `disable_early_stopping`).
        batch_size: The number of sequences per batch.
        length: The number of tokens or audio positions, or of encoder outputs if an encoder-decoder decodes.
        decoding: The number of tokens to generate and the number of beams. If None, a forward pass is run.
    """
    if decoding is None and model.main_input_name == "input_features":
        shape = (batch_size, model.config.num_mel_bins, 2 * length)  # the encoder halves the number of frames
        features = torch.randn(shape, device=model.device, dtype=model.dtype)
        return lambda: (model(input_features=features), None)[1]
    if decoding is None:
        ids = torch.randint(model.config.vocab_size, (batch_size, length), device=model.device)
        return lambda: (model(input_ids=ids), None)[1]
    shape = (batch_size, length, get_encoder_width(model.config))
    states: Any = torch.randn(shape, device=model.device, dtype=model.dtype)
    mask = torch.ones(batch_size, length, dtype=torch.long, device=model.device)
    options: dict[str, Any] = {"max_new_tokens": decoding[0], "num_beams": decoding[1], "do_sample": False}
    if model.main_input_name == "input_features":  # otherwise, Whisper would decode further segments of the audio
        options |= {"force_unique_generate_call": True, "return_timestamps": False}

    def run() -> StoppingCriteria:
        # Each call needs a new output object because beam search modifies it.
        inputs: dict[str, Any] = {"encoder_outputs": BaseModelOutput(states), "attention_mask": mask}
        first = FirstTokenTimer(str(model.device))
        with ignore_saved_length_limits(model):
            model.generate(**inputs, **options, stopping_criteria=[first])
        return first

    return run


@torch.no_grad()
def time_run(run: Callable[[], Any], device: str) -> Times:
    """Time a run and return the seconds until the first token (None for a forward pass) and until the end."""
    _synchronize(device)
    start = time.perf_counter()
    first = run()
    _synchronize(device)
    end = time.perf_counter()
    return None if first is None else first.time - start, end - start


def _synchronize(device: str) -> None:
    """Wait until an accelerator has finished all pending work."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(device)


# The sizes of the inputs and outputs that are compared.
NUM_TOKENS, NUM_PROMPT_TOKENS, NUM_SOURCE_TOKENS, NUM_TEXTS = 8, 4, 16, 2
# The largest difference, relative to the largest output, that a different order of float32 additions can cause.
MAX_RELATIVE_DIFFERENCE = 1e-4


def _check_decoded_match(
    error_message: str, actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Compare the logits [texts, tokens, vocabulary] of decoded tokens [texts, tokens].

    Comparing tokens is not sufficient because a model with random weights may generate the same token for any input.
    """
    (tokens, logits), (expected_tokens, expected_logits) = actual, expected
    # Each text is compared up to and including the first different token, because the order of summation can decide a
    # tie between tokens.
    matches = (tokens == expected_tokens).long().cumprod(1)
    is_compared = matches.roll(1, 1).index_fill(1, tokens.new_tensor(0), 1).bool()
    _compare(error_message, logits[is_compared], expected_logits[is_compared])


def _compare(error_message: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise a ValueError with `error_message` as its message if two outputs differ by more than rounding errors."""
    difference = float((actual - expected).abs().max() / expected.abs().max())
    if not difference <= MAX_RELATIVE_DIFFERENCE:
        raise ValueError(f"{error_message}: the largest relative difference is {difference:.1e}. Nothing was timed.")


def _make_generator(model: Any) -> torch.Generator:
    return torch.Generator(device=model.device).manual_seed(0)


def _decode_greedily(model: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return greedily decoded tokens [texts, tokens] and their logits.

    The encoder outputs are random, and the second half of the second text is padding.
    """
    shape = (NUM_TEXTS, NUM_SOURCE_TOKENS, get_encoder_width(model.config))
    states: Any = torch.randn(shape, generator=_make_generator(model), device=model.device)
    inputs: dict[str, Any] = {"encoder_outputs": BaseModelOutput(states)}
    inputs["attention_mask"] = _make_padding_mask(model, NUM_SOURCE_TOKENS)
    # The prompt is random because a model with random weights may repeat one token, which would hide cache errors.
    inputs["decoder_input_ids"] = _make_random_tokens(model, NUM_PROMPT_TOKENS)
    options |= {"max_new_tokens": NUM_TOKENS, "num_beams": 1, "do_sample": False}
    output = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    return output.sequences[:, -NUM_TOKENS:], torch.stack(output.logits, 1)


def _make_random_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return random audio features or two random texts. The second half of the second text is padding."""
    if model.main_input_name == "input_features":
        shape = (NUM_TEXTS, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": torch.randn(shape, generator=_make_generator(model), device=model.device)}
    length = min(NUM_SOURCE_TOKENS, getattr(model.config, "max_position_embeddings", None) or NUM_SOURCE_TOKENS)
    return {"input_ids": _make_random_tokens(model, length), "attention_mask": _make_padding_mask(model, length)}


def _make_random_tokens(model: Any, length: int) -> torch.Tensor:
    shape, generator = (NUM_TEXTS, length), _make_generator(model)
    return torch.randint(model.config.vocab_size, shape, generator=generator, device=model.device)


def _make_padding_mask(model: Any, length: int) -> torch.Tensor:
    """Return an attention mask in which the second half of the second text is padding."""
    mask = torch.ones(NUM_TEXTS, length, dtype=torch.long, device=model.device)
    mask[1, length // 2 :] = 0
    return mask


def _compute_output(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the first output of a model for all tokens that are not padding."""
    output = model(**inputs)[0].float()
    return output[inputs["attention_mask"].bool()] if "attention_mask" in inputs else output


# The default number of tokens in a text. Audio models read a whole window.
DEFAULT_LENGTH = 128
AUDIO_AUTO_CLASSES = ("AutoModelForAudioClassification", "AutoModelForSpeechSeq2Seq")


@dataclass(frozen=True)
class VariantSpeed:
    """The speed of one variant, which forms one row in a `SpeedTable`.

    Args:
        name: The name of the variant, or "transformers" for the Transformers class.
        fields: The configuration fields of the variant.
        milliseconds: The median generation time over all rounds.
        all_milliseconds: The generation time in each round.
        tokens_per_second: The number of tokens generated per second.
        speedup: The speed relative to the first row.
        first_milliseconds: The median time until the first token, including the encoder keys and values.
        step_milliseconds: The median time of each further token, or None if only one token was generated.
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
    """The number of new tokens at which cached encoder outputs become slower than multi-head attention.

    Cached encoder outputs avoid the one-time computation of encoder keys and values, but require more operations per
    step. If they do not save time before the first token, the number is 1.

    Args:
        exact: The name of the row for cached encoder outputs.
        multi_head: The name of the row for multi-head attention.
        new_tokens: The number of tokens, or None if the steps with cached encoder outputs are not slower.
    """

    exact: str
    multi_head: str
    new_tokens: int | None


@dataclass(frozen=True)
class SpeedTable:
    """The speed of all variants, with the sizes for which it was measured.

    Args:
        checkpoint: The name of the checkpoint.
        architecture: The name of the model class.
        batch_size: The number of texts per batch.
        length: The number of encoder output positions per text.
        max_new_tokens: The number of tokens generated per text.
        num_beams: The number of beams. 1 means greedy decoding.
        dtype: The dtype of the models.
        device: The device of the models.
        machine: The processor, number of threads, load and package versions.
        rows: The variants, with the baseline first.
        break_even: The break-even point of cached encoder outputs, if they were timed over at least two tokens.
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
        """Return the table as JSON values."""
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
    """Measure the generation speed of an encoder-decoder and its variants.

    The weights are random because the speed does not depend on them. All variants are timed in each round.

    Args:
        config: The checkpoint's `config.json`.
        checkpoint: The name of the checkpoint, for the table.
        kv_heads: The numbers of key/value heads in the decoder. Defaults to the number of query heads, and to 4, 2 and
            1 if they divide this number.
        talking_heads, latents: Whether to time variants with talking heads and with latents.
        windows: The sliding window sizes to time in the decoder (`attention_window`).
        kernels: The kernels to time in the decoder (`attention_kernel`). "hybrid" is timed with each window.
        batch_size: The number of texts per batch.
        length: The number of encoder output positions. Defaults to 128, or to the window of an audio encoder.
        max_new_tokens: The number of tokens to generate.
        num_beams: The number of beams (1 for greedy decoding). Tokens per second do not count each beam separately.
        rounds: The number of timings per variant.
        dtype, device: The dtype and the device ("cpu" or a CUDA device) of the models.

    Raises:
        ValueError: If the model does not generate text, a size does not fit it, or the outputs of a variant are wrong.

    Example:
        >>> from hf_attn_variants.inspection.costs import read_checkpoint_config
        >>> table = measure_speed(read_checkpoint_config("google-t5/t5-small"), rounds=3)
        >>> {row.name: row.speedup for row in table.rows}
    """
    check_sizes(batch_size=batch_size, length=length, max_new_tokens=max_new_tokens)
    check_sizes(rounds=rounds, num_beams=num_beams)
    current = make_variant_config(config)
    auto_class = select_timed_auto_class(config, current)
    if "Seq2Seq" not in auto_class:
        raise ValueError(f"`benchmark` requires an encoder-decoder that generates text, got {current.model_type}.")
    length = resolve_timed_length(length, current, auto_class)
    variants = build_verified_models(config, kv_heads, talking_heads, latents, windows, kernels, dtype, device)
    decoding = (max_new_tokens, num_beams)
    runs = {name: make_timed_function(model, batch_size, length, decoding) for name, (_, model) in variants.items()}
    times = _time_engines(runs, rounds, device)
    rows = _make_rows({name: fields for name, (fields, _) in variants.items()}, times, batch_size, max_new_tokens)
    return SpeedTable(
        checkpoint, current.auto_classes[auto_class], batch_size, length, max_new_tokens, num_beams, dtype, device,
        describe_machine(device), rows, _compute_break_even(current, rows),
    )  # fmt: skip


def build_verified_models(
    config: Mapping[str, Any],
    kv_heads: Sequence[int] | None = None,
    talking_heads: bool = True,
    latents: bool = True,
    windows: Sequence[int] = (),
    kernels: Sequence[str] = (),
    dtype: str = "float32",
    device: str = "cpu",
) -> dict[str, tuple[dict[str, Any], Any]]:
    """Build all variants with random weights, after checking their outputs in float32.

    See `measure_speed` for the arguments.

    Returns:
        {name: (fields, model)} with the baseline first.

    Raises:
        ValueError: If a variant does not fit the model or its outputs are wrong.
    """
    _check_device(device)
    current = make_variant_config(config)
    auto_class = select_timed_auto_class(config, current)
    model_class = get_variant_model_class(current.auto_classes[auto_class])
    field = get_varied_heads_field(model_class, current)
    heads, is_upstream = current.get_query_heads(field), config["model_type"] != type(current).model_type
    counts = {heads, 4, 2, 1} & set(list_kv_head_counts(current, field)) if kv_heads is None else set(kv_heads)
    if not is_upstream and not has_latents(current, field):
        counts |= {heads}  # this package's class is the baseline instead of a Transformers class
    rows = list(iterate_variant_fields(current, field, sorted(counts, reverse=True), talking_heads, latents))
    rows += _list_window_and_kernel_fields(field, windows, kernels)
    models: dict[str, tuple[dict[str, Any], Any]] = {}
    if is_upstream:
        models["transformers"] = {}, prepare_for_timing(make_upstream_model(config, auto_class), device)
    for fields in rows:
        variant = make_variant_config(config, **fields)
        models[get_variant_name(variant, field)] = fields, prepare_for_timing(model_class(variant), device)
    check_outputs(models, lambda: prepare_for_timing(model_class(current), device), "Seq2Seq" in auto_class)
    return {name: (fields, model.to(getattr(torch, dtype))) for name, (fields, model) in models.items()}


def select_timed_auto_class(config: Mapping[str, Any], current: Any) -> str:
    """Return the name of the Auto class for the model to time.

    If the architecture consists of only the encoder or the decoder of an encoder-decoder, only this part is timed.
    """
    architecture = (config.get("architectures") or [""])[0]
    # In a T5EncoderModel's configuration, `is_encoder_decoder` may be True or False.
    if architecture.endswith("EncoderModel"):
        return "AutoModelForTextEncoding"
    for head in ("ForCausalLM", "ForAudioClassification"):
        if architecture.endswith(head):
            return f"AutoModel{head}"
    seq2seq = [name for name in current.auto_classes if "Seq2Seq" in name]
    return seq2seq[0] if seq2seq and current.is_encoder_decoder else "AutoModel"


def _make_rows(
    fields: Mapping[str, dict[str, Any]], times: Mapping[str, list[Times]], batch_size: int, max_new_tokens: int
) -> list[VariantSpeed]:
    """Return one row per variant, computed from the times measured in each round."""
    rows: list[VariantSpeed] = []
    for name, rounds in times.items():
        totals = [end * 1e3 for _, end in rounds]
        firsts = [(first or 0) * 1e3 for first, _ in rounds]  # until the first token
        median, first, step = statistics.median(totals), statistics.median(firsts), None
        if max_new_tokens > 1:
            steps = [end - begin for begin, end in zip(firsts, totals, strict=True)]
            step = statistics.median(steps) / (max_new_tokens - 1)
        speed = batch_size * max_new_tokens / median * 1e3, (rows[0].milliseconds if rows else median) / median
        rows.append(VariantSpeed(name, fields[name], median, totals, *speed, first, step))
    return rows


def _compute_break_even(current: Any, rows: Sequence[VariantSpeed]) -> BreakEven | None:
    """Return the break-even point of cached encoder outputs, or None if they were not timed."""
    exact = {"cross_kv_lora_rank": current.hidden_size}
    baselines = [row for row in rows if row.name in ("transformers", HeadSharing.label)]
    pairs: list[tuple[Any, Any]] = [(row, baseline) for row in rows for baseline in baselines if row.fields == exact]
    if not pairs or pairs[-1][0].step_milliseconds is None:
        return None
    # The last baseline is this package's multi-head model if there is one, because it follows "transformers".
    cached, multi_head = pairs[-1]
    saved = multi_head.first_milliseconds - cached.first_milliseconds
    lost = cached.step_milliseconds - multi_head.step_milliseconds
    tokens = None
    if lost > 0 or (lost == 0 and saved < 0):
        # n tokens take n - 1 steps. The result is the smallest n for which the additional time of all steps exceeds
        # the saved time.
        tokens = 1 if saved < 0 else 2 + math.floor(saved / lost)
    return BreakEven(cached.name, multi_head.name, tokens)


def get_round_order(names: Sequence[str], round_index: int) -> list[str]:
    """Return the order in which variants are timed in a round.

    Every second round reverses the previous order, and each pair of rounds starts with a different variant. Otherwise,
    the side effects of a variant (cold caches, spinning threads) would always affect the same other variant.

    Args:
        names: The names of the variants.
        round_index: The number of the round.
    """
    first = round_index // 2 % max(1, len(names))
    order = [*names[first:], *names[:first]]
    return order[::-1] if round_index % 2 else order


def _time_engines(runs: Mapping[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, list[Times]]:
    """Time all variants and return {name: times in each round}."""
    times: dict[str, list[Times]] = {name: [] for name in runs}
    for number in progress_bar(range(-1, rounds), desc="timing", unit="round", leave=False):
        for name in get_round_order(list(runs), number):
            times[name].append(time_run(runs[name], device))
    return {name: rounds[1:] for name, rounds in times.items()}  # the first round is a warm-up round


def resolve_timed_length(requested: int | None, config: Any, auto_class: str) -> int:
    """Return the number of tokens or audio positions to read.

    Args:
        requested: The number set by the user, or None for the default.
        config: The configuration of the model.
        auto_class: The result of `select_timed_auto_class`.

    Raises:
        ValueError: If the model does not support this number of positions.
    """
    positions = get_num_audio_positions(config) if auto_class in AUDIO_AUTO_CLASSES else get_max_input_length(config)
    default = positions if auto_class in AUDIO_AUTO_CLASSES else DEFAULT_LENGTH
    length: Any = default if requested is None else requested
    if positions is not None and length > positions:
        raise ValueError(f"`length` must be at most {positions}, the number of positions of the model, got {length}.")
    return length


def _check_device(device: str) -> None:
    """Raise `ValueError` if a device is not available."""
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"`device` must be an available device, got {device!r} ({reason}).") from error


def _list_window_and_kernel_fields(field: str, windows: Sequence[int], kernels: Sequence[str]) -> list[dict[str, Any]]:
    """Return the fields of variants with sliding windows and kernels. Hybrid kernels are combined with each window.

    Raises:
        ValueError: If a hybrid is requested without a window.
    """
    prefix = "encoder_" if field.startswith("encoder_") else ""
    sizes = [{f"{prefix}attention_window": window} for window in windows]
    rows = [{f"{prefix}attention_pattern": SlidingWindowPattern.name, **size} for size in sizes]
    for kernel in kernels:
        if (needs_window := get_kernel_class(kernel).needs_window) and not windows:
            raise ValueError(f"`attention_kernel` {kernel!r} requires a window. Also set `attention_window`.")
        rows += [{f"{prefix}attention_kernel": kernel, **size} for size in (sizes if needs_window else [{}])]
    return rows


@torch.no_grad()
def check_outputs(
    models: Mapping[str, tuple[Any, Any]], build_multi_head_model: Callable[[], Any], decodes: bool
) -> None:
    """Check that the outputs of the models are correct.

    The outputs of the model "transformers" must equal those of this package's multi-head model. The other models must
    decode identically with and without the cache.

    Args:
        models: {name: (fields, float32 model)}.
        build_multi_head_model: Function that creates this package's equivalent of the Transformers model.
        decodes: Whether the models are encoder-decoders that decode. If False, the outputs for audio or for two texts
            (one of them padded) are compared.

    Raises:
        ValueError: If the outputs of a model are wrong.
    """
    if "transformers" in models:
        variant_model, upstream = build_multi_head_model(), models["transformers"][1]
        variant_model.load_state_dict(upstream.state_dict())
        names = f"{type(variant_model).__name__} and {type(upstream).__name__} with the same weights"
        if decodes:
            outputs = _decode_greedily(variant_model), _decode_greedily(upstream)
            _check_decoded_match(f"{names} decode differently", *outputs)
        else:
            inputs = _make_random_inputs(variant_model)
            hidden_states = (_compute_output(model, inputs) for model in (variant_model, upstream))
            _compare(f"{names} have different outputs", *hidden_states)
    for name, (_, model) in models.items():
        if decodes and name != "transformers" and supports_decoder_cache(model.config):
            fault = f"{name} decodes differently with and without its cache"
            _check_decoded_match(fault, _decode_greedily(model), _decode_greedily(model, use_cache=False))


def make_upstream_model(config: Mapping[str, Any], auto_class: str) -> Any:
    """Create a Transformers model with random weights from the `config.json` of a Transformers checkpoint."""
    return getattr(transformers, auto_class).from_config(AutoConfig.for_model(**copy.deepcopy(dict(config))))


def prepare_for_timing(model: Any, device: str) -> Any:
    """Move a model to a device in float32 and evaluation mode, and disable early stopping."""
    return disable_early_stopping(model.float().eval().to(device))


def disable_early_stopping(model: Any) -> Any:
    """Change the generation config of a model so that it always generates `max_new_tokens` tokens."""
    if model.can_generate():
        model.generation_config = copy.deepcopy(model.generation_config)  # other models may share it
        model.generation_config.eos_token_id = None
        model.generation_config.use_cache = supports_decoder_cache(model.config)
    return model


def describe_machine(device: str) -> dict[str, Any]:
    """Return the device, number of threads, load and package versions for reports."""
    is_on_cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_on_cuda else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
