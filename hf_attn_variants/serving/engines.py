"""Engines that can serve a model: the class of Transformers, `share_memory`, int8, conversions, and CTranslate2."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..inspection.costs import has_latents, kv_heads_field, variant_config, variant_name
from ..inspection.speed import AUDIO_AUTO_CLASSES, make_upstream_model, prepare_for_timing, timed_auto_class
from ..model_properties import ignore_saved_length_limits
from ..quantization.quantize import quantize
from ..registration import variant_model_class
from ..shared_memory.share import share_memory

CTRANSLATE2 = "CTranslate2"


def ctranslate2_problem(config: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> str | None:
    """Return the reason why CTranslate2 cannot serve a checkpoint with some fields changed, or None if it can."""
    from ..export.ctranslate2_check import check_ctranslate2_support
    from ..inspection.costs import variant_config

    try:
        check_ctranslate2_support(served_model_class(config), variant_config(config, **(fields or {})))
    except ValueError as error:
        return str(error)
    if importlib.util.find_spec("ctranslate2") is None:
        return "CTranslate2 is not installed. Run `pip install ctranslate2`."
    return None


@dataclass(frozen=True)
class Engine:
    """One way to serve a model.

    Args:
        name: the name in tables.
        fields: the changed configuration fields of a converted model. None means the unchanged checkpoint.
        shared: whether the model uses `share_memory`.
        int8: whether the linear layers are int8.
        ctranslate2: whether CTranslate2 runs the model instead of torch.
        compiled: whether `torch.compile` compiles the steps, with a static cache.
    """

    name: str
    fields: Mapping[str, Any] | None = None
    shared: bool = False
    int8: bool = False
    ctranslate2: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Load:
    """Batch that each engine serves.

    Args:
        batch_size: the number of texts, or windows of audio.
        length: the number of tokens per text, or of positions of audio.
        max_new_tokens: the number of tokens to generate per text. None means one forward pass of an encoder.
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
    """Return the engines for a checkpoint, the baseline first.

    Args:
        config: the config.json of the checkpoint.
        conversions: the configuration fields of each possible conversion.
        has_ctranslate2: a function that returns whether CTranslate2 is installed and supports the checkpoint with some
            fields changed.
        compiles: whether to add compiled engines of torch for the unchanged checkpoint.
        names: the names of the engines to return in addition to the baseline. None means all.

    Raises:
        ValueError: if a field is unknown or not valid, two engines have the same name, or no engine has one of
            `names`.
    """
    current = variant_config(config)
    is_upstream = config["model_type"] != type(current).model_type
    can_share = is_upstream and is_generative(config)
    baseline = "transformers" if is_upstream else variant_name(current, _get_heads_field(config))
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
        converted = variant_config(config, **fields)
        name = variant_name(converted, _get_heads_field(config))
        engines += [Engine(name, fields), Engine(f"{name}, int8", fields, int8=True)]
        # An export multiplies latents into the weights, and the model without latents is timed already.
        if has_ctranslate2(fields) and not has_latents(converted):
            engines += _list_ctranslate2_engines(f"{name}, ", fields)
    all_names = [engine.name for engine in engines]
    if repeated := next((name for name in all_names if all_names.count(name) > 1), None):
        raise ValueError(f"The models to time must be different, got {repeated} twice. Leave one of them out.")
    if unknown := next((name for name in names or () if name not in all_names), None):
        raise ValueError(f"The engines must be some of {'; '.join(all_names)}, got {unknown!r:.80}.")
    return engines if names is None else [engine for engine in engines if engine.name in (baseline, *names)]


def _list_ctranslate2_engines(prefix: str, fields: Mapping[str, Any] | None) -> list[Engine]:
    name = f"{prefix}{CTRANSLATE2}"
    return [Engine(name, fields, ctranslate2=True), Engine(f"{name}, int8", fields, int8=True, ctranslate2=True)]


def served_auto_class(config: Mapping[str, Any]) -> str:
    """Return the name of the Auto class of the served model."""
    return timed_auto_class(config, variant_config(config))


def is_generative(config: Mapping[str, Any]) -> bool:
    """Return whether the model is an encoder-decoder that generates text. Otherwise a batch is one forward pass."""
    return "Seq2Seq" in served_auto_class(config)


def served_model_class(config: Mapping[str, Any]) -> type:
    """Return the class of this package for the served model."""
    return variant_model_class(variant_config(config).auto_classes[served_auto_class(config)])


def _get_heads_field(config: Mapping[str, Any]) -> str:
    return kv_heads_field(served_model_class(config), variant_config(config))


def _remove_latents(config: Any) -> Any:
    """Return a variant configuration without latents."""
    ranks = config.rank_fields()
    by_layer = {name: values for name, values in (config.per_layer_values or {}).items() if name not in ranks}
    return type(config)(**{**config.to_dict(), **dict.fromkeys(ranks), "per_layer_values": by_layer or None})


def build_model(config: Mapping[str, Any], engine: Engine) -> Any:
    """Return the model of an engine in float32 with random weights, which are equal if the layers are equal.

    For an engine of CTranslate2, it is the model of this package without latents that is exported.
    """
    torch.manual_seed(0)
    if engine.fields is None and not engine.ctranslate2:
        model = _build_baseline(config)
    else:
        current = variant_config(config, **(engine.fields or {}))
        model = served_model_class(config)(_remove_latents(current) if engine.ctranslate2 else current)
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


def _build_baseline(config: Mapping[str, Any]) -> Any:
    """Return the unchanged model in the class of the checkpoint, of Transformers or of this package."""
    current = variant_config(config)
    if config["model_type"] == type(current).model_type:
        return served_model_class(config)(current)
    return make_upstream_model(config, served_auto_class(config))


def random_inputs(config: Mapping[str, Any], load: Load) -> dict[str, torch.Tensor]:
    """Return random inputs: `input_ids` [b, n] with `attention_mask`, or `input_features` for audio."""
    current: Any = variant_config(config)
    generator = torch.Generator().manual_seed(0)
    if served_auto_class(config) in AUDIO_AUTO_CLASSES:
        shape = (load.batch_size, current.num_mel_bins, 2 * load.length)  # the encoder halves the number of frames
        return {"input_features": torch.randn(shape, generator=generator)}
    ids = torch.randint(2, current.vocab_size, (load.batch_size, load.length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_torch_call(
    model: Any, inputs: dict[str, torch.Tensor], load: Load, compiled: bool = False
) -> Callable[[int | None], None]:
    """Return a function that serves a batch with torch. Its argument is the number of new tokens, or None."""
    options: dict[str, Any] = {"num_beams": load.num_beams, "do_sample": False}
    if compiled:  # with another cache, each step has another length and would be compiled again
        options["cache_implementation"] = "static"
    if "input_features" in inputs:  # otherwise the code of Whisper would look for further segments
        options |= {"force_unique_generate_call": True, "return_timestamps": False}
    return partial(_generate_or_pass, model, inputs, options)


@torch.no_grad()
def _generate_or_pass(
    model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any], tokens: int | None
) -> None:
    if tokens is None:
        model(**inputs)
        return
    with ignore_saved_length_limits(model):
        model.generate(**inputs, **options, max_new_tokens=tokens)
