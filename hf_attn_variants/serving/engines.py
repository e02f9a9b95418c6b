"""The engines that can serve a model, such as Transformers, `share_memory`, int8 and CTranslate2."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..inspection.costs import get_variant_name, get_varied_heads_field, has_latents, make_variant_config
from ..inspection.speed import AUDIO_AUTO_CLASSES, make_upstream_model, prepare_for_timing, select_timed_auto_class
from ..model_properties import ignore_saved_length_limits
from ..quantization.quantize import quantize
from ..registration import get_variant_model_class
from ..shared_memory.share import share_memory

CTRANSLATE2 = "CTranslate2"


def get_ctranslate2_unsupported_reason(
    config: Mapping[str, Any], fields: Mapping[str, Any] | None = None
) -> str | None:
    """Return why CTranslate2 cannot serve a checkpoint with the given fields changed, or None if it can."""
    from ..export.ctranslate2_check import check_ctranslate2_support

    try:
        check_ctranslate2_support(get_served_model_class(config), make_variant_config(config, **(fields or {})))
    except ValueError as error:
        return str(error)
    if importlib.util.find_spec("ctranslate2") is None:
        return "CTranslate2 is not installed. Run `pip install ctranslate2`."
    return None


@dataclass(frozen=True)
class Engine:
    """A way to serve a model.

    Args:
        name: the name that tables show.
        fields: the configuration fields that a conversion changes. None means that the checkpoint is not converted.
        shared: whether the model uses `share_memory`.
        int8: whether the linear layers are quantized to int8.
        ctranslate2: whether CTranslate2 runs the model instead of torch.
        compiled: whether the decoding steps are compiled with `torch.compile` and a static cache.
    """

    name: str
    fields: Mapping[str, Any] | None = None
    shared: bool = False
    int8: bool = False
    ctranslate2: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Workload:
    """The batch that each engine serves.

    Args:
        batch_size: the number of texts or audio windows.
        length: the number of tokens per text or positions per audio window.
        max_new_tokens: the number of tokens to generate per text. None means a single forward pass of an encoder.
        num_beams: the number of beams.
    """

    batch_size: int
    length: int
    max_new_tokens: int | None
    num_beams: int


def list_engines(
    config: Mapping[str, Any],
    conversions: Sequence[Mapping[str, Any]],
    has_ctranslate2: Callable[[Mapping[str, Any]], bool],
    compiles: bool = False,
    names: Sequence[str] | None = None,
) -> list[Engine]:
    """Return the engines for a checkpoint, starting with the baseline.

    Args:
        config: the config.json of the checkpoint.
        conversions: the configuration fields of each possible conversion.
        has_ctranslate2: a function that returns whether CTranslate2 is installed and supports the checkpoint with the
            given fields changed.
        compiles: whether to include compiled torch engines for the unchanged checkpoint.
        names: the names of the engines to return in addition to the baseline. If None, all engines are returned.

    Raises:
        ValueError: if a field is unknown or not valid, two engines have the same name, or `names` contains an unknown
            engine.
    """
    current = make_variant_config(config)
    is_upstream = config["model_type"] != type(current).model_type
    can_share = is_upstream and is_generative(config)
    baseline = "transformers" if is_upstream else get_variant_name(current, _get_heads_field(config))
    engines = [Engine(baseline)]
    if can_share:
        engines.append(Engine("share_memory", shared=True))
    engines.append(Engine("int8" if is_upstream else f"{baseline}, int8", int8=True))
    if can_share:
        engines.append(Engine("share_memory, int8", shared=True, int8=True))
    if compiles:
        engines += [replace(engine, name=f"{engine.name}, compiled", compiled=True) for engine in engines]
    if has_ctranslate2({}):
        engines += _list_ctranslate2_engines("" if is_upstream else f"{baseline}, ", None)
    for fields in conversions:
        converted = make_variant_config(config, **fields)
        name = get_variant_name(converted, _get_heads_field(config))
        engines += [Engine(name, fields), Engine(f"{name}, int8", fields, int8=True)]
        # The export multiplies latents into the weights, and the model without latents is already included.
        if has_ctranslate2(fields) and not has_latents(converted):
            engines += _list_ctranslate2_engines(f"{name}, ", fields)
    all_names = [engine.name for engine in engines]
    if repeated := next((name for name in all_names if all_names.count(name) > 1), None):
        raise ValueError(f"The models to time must be different, got {repeated} twice. Remove one of them.")
    if unknown := next((name for name in names or () if name not in all_names), None):
        raise ValueError(f"The engine {unknown!r:.80} is unknown. Use one of {'; '.join(all_names)}.")
    return engines if names is None else [engine for engine in engines if engine.name in (baseline, *names)]


def _list_ctranslate2_engines(prefix: str, fields: Mapping[str, Any] | None) -> list[Engine]:
    name = f"{prefix}{CTRANSLATE2}"
    return [Engine(name, fields, ctranslate2=True), Engine(f"{name}, int8", fields, int8=True, ctranslate2=True)]


def get_served_auto_class(config: Mapping[str, Any]) -> str:
    """Return the name of the Auto class for the served model."""
    return select_timed_auto_class(config, make_variant_config(config))


def is_generative(config: Mapping[str, Any]) -> bool:
    """Return whether the model is an encoder-decoder that generates text, instead of running a single forward pass."""
    return "Seq2Seq" in get_served_auto_class(config)


def get_served_model_class(config: Mapping[str, Any]) -> type:
    """Return the class from this package for the served model."""
    return get_variant_model_class(make_variant_config(config).auto_classes[get_served_auto_class(config)])


def _get_heads_field(config: Mapping[str, Any]) -> str:
    return get_varied_heads_field(get_served_model_class(config), make_variant_config(config))


def _remove_latents(config: Any) -> Any:
    """Return a variant configuration without latents."""
    ranks = config.get_rank_fields()
    per_layer_values = {name: values for name, values in (config.per_layer_values or {}).items() if name not in ranks}
    return type(config)(**{**config.to_dict(), **dict.fromkeys(ranks), "per_layer_values": per_layer_values or None})


def build_model(config: Mapping[str, Any], engine: Engine) -> Any:
    """Build a model with random weights for an engine. Engines with the same layers are given the same weights.

    For a CTranslate2 engine, the result is the float32 model to export, which is from this package and has no latents.
    """
    torch.manual_seed(0)
    current = make_variant_config(config, **(engine.fields or {}))
    is_unconverted = engine.fields is None and not engine.ctranslate2
    if is_unconverted and config["model_type"] != type(current).model_type:
        model = make_upstream_model(config, get_served_auto_class(config))
    else:
        model = get_served_model_class(config)(_remove_latents(current) if engine.ctranslate2 else current)
    model = prepare_for_timing(model, "cpu")
    if engine.ctranslate2:
        return model
    if engine.shared:
        share_memory(model)
    if engine.int8:
        quantize(model)
    if engine.compiled:
        model.compile()
    return model


def make_workload_inputs(config: Mapping[str, Any], workload: Workload) -> dict[str, torch.Tensor]:
    """Return random inputs, which are `input_ids` [b, n] and `attention_mask` or, for audio, `input_features`."""
    current: Any = make_variant_config(config)
    generator = torch.Generator().manual_seed(0)
    if get_served_auto_class(config) in AUDIO_AUTO_CLASSES:
        # The encoder halves the number of frames.
        shape = (workload.batch_size, current.num_mel_bins, 2 * workload.length)
        return {"input_features": torch.randn(shape, generator=generator)}
    ids = torch.randint(2, current.vocab_size, (workload.batch_size, workload.length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_torch_call(
    model: Any, inputs: dict[str, torch.Tensor], workload: Workload, compiled: bool = False
) -> Callable[[int | None], None]:
    """Return a function that serves a batch with torch. Its argument is the value of `max_new_tokens`, or None."""
    options: dict[str, Any] = {"num_beams": workload.num_beams, "do_sample": False}
    if compiled:  # with other caches, the length changes in each step, which requires recompilation
        options["cache_implementation"] = "static"
    if "input_features" in inputs:  # otherwise, the Whisper code would look for further segments
        options |= {"force_unique_generate_call": True, "return_timestamps": False}

    @torch.no_grad()
    def serve(max_new_tokens: int | None) -> None:
        if max_new_tokens is None:
            model(**inputs)
            return
        with ignore_saved_length_limits(model):
            model.generate(**inputs, **options, max_new_tokens=max_new_tokens)

    return serve
