"""Engines that can serve a model: Transformers' class, one line on it, a conversion, and CTranslate2."""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..inspection.costs import has_latents, kv_heads_field, variant_config, variant_name
from ..inspection.speed import AUDIO_AUTO_CLASSES, ready_to_time, timed_auto_class, upstream_model
from ..model_properties import limits_of_the_call
from ..quantization.quantize import quantize
from ..registration import variant_model_class
from ..shared_memory.share import share_memory

if TYPE_CHECKING:
    import torch

__all__ = [
    "CTRANSLATE2",
    "Engine",
    "Exported",
    "Load",
    "auto_class",
    "build_model",
    "ctranslate2_run",
    "engines_of",
    "generates",
    "model_class_of",
    "why_not",
    "write_folder",
]

# What CTranslate2 looks for in a Whisper's vocabulary.
TRANSCRIPT, NO_TIMES, END = "<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>"


@dataclass(frozen=True)
class Exported:
    """A model that CTranslate2 can run, and what it is given.

    Args:
        folder: the model's.
        int8: whether its weights are.
        inputs: rows of token numbers, or the features of audio, a numpy array [b, mel bins, frames].
        prompt: of a Whisper, the tokens that its decoder reads first; of others empty.
    """

    folder: str
    int8: bool
    inputs: Any
    prompt: list[int]


def why_not(config: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> str | None:
    """Return why CTranslate2 cannot serve a checkpoint with some fields changed, in a sentence; None where it can."""
    from ..export.ctranslate2_check import check_ctranslate2_support
    from ..inspection.costs import variant_config

    try:
        check_ctranslate2_support(model_class_of(config), variant_config(config, **(fields or {})))
    except ValueError as error:
        return str(error)
    if importlib.util.find_spec("ctranslate2") is None:
        return "CTranslate2 is not installed: `pip install ctranslate2`."
    return None


def write_folder(
    config: Mapping[str, Any], model: Any, inputs: "dict[str, torch.Tensor]", folder: Path, int8: bool
) -> Exported:
    """Write a model of this package as CTranslate2's, which never ends a text by itself.

    Args:
        config: the checkpoint's config.json.
        model: in float32; a quantisation changes its tensors.
        inputs: what a batch is, as torch's engines get it, without padding.
        folder: an empty one.
        int8: whether its weights become int8.

    Raises:
        ValueError: if nobody says with which token the decoder starts, or which ends a text.
    """
    from ..export.ctranslate2_check import Tokens
    from ..export.ctranslate2_specs import model_specification

    vocabulary = [_text(number) for number in range(model.config.vocab_size)]
    start, end = (_token(config, model, name) for name in ("decoder_start_token_id", "eos_token_id"))
    prompt = [start]
    if hears := "input_features" in inputs:
        no_times = next(number for number in range(len(vocabulary) - 1, 0, -1) if number not in (start, end))
        vocabulary[start], vocabulary[no_times], vocabulary[end] = TRANSCRIPT, NO_TIMES, END
        prompt.append(no_times)
    tokens = Tokens(vocabulary, prompt, end, vocabulary[0], [end], [])
    spec = model_specification(model, tokens, config["model_type"])
    spec.optimize(quantization="int8_float32" if int8 else "float32")
    spec.save(os.fspath(folder))
    given = inputs["input_features"].numpy() if hears else inputs["input_ids"].tolist()
    return Exported(os.fspath(folder), int8, given, prompt if hears else [])


def _token(config: Mapping[str, Any], model: Any, name: str) -> int:
    found = getattr(model.generation_config, name, None)
    found = config.get(name) if found is None else found
    if found is None:
        raise ValueError(f"config.json has no `{name}`, without which nothing is generated: set it there")
    return found[0] if isinstance(found, list) else found


def _text(number: int) -> str:
    return f"<{number}>"


def ctranslate2_run(exported: Exported, num_beams: int, threads: int) -> Callable[[int], None]:
    """Return what is timed: called with a number of new tokens. Imports no torch.

    Args:
        exported: the model and its inputs.
        num_beams: of the search.
        threads: of one call.
    """
    import ctranslate2

    compute_type = "int8_float32" if exported.int8 else "float32"
    options = {"device": "cpu", "compute_type": compute_type, "intra_threads": threads}
    if exported.prompt:
        whisper = ctranslate2.models.Whisper(exported.folder, **options)
        prompts = [exported.prompt] * len(exported.inputs)

        def hear(tokens: int) -> None:
            features = ctranslate2.StorageView.from_array(exported.inputs)
            # It writes half as many tokens as `max_length`.
            whisper.generate(features, prompts, beam_size=num_beams, max_length=2 * tokens)

        return hear
    translator = ctranslate2.Translator(exported.folder, **options)
    rows = [[_text(number) for number in row] for row in exported.inputs]

    def translate(tokens: int) -> None:
        limits = {"min_decoding_length": tokens, "max_decoding_length": tokens, "max_input_length": 0}
        translator.translate_batch(rows, beam_size=num_beams, **limits)

    return translate


__all__ += ["random_inputs", "torch_run"]

CTRANSLATE2 = "CTranslate2"


@dataclass(frozen=True)
class Engine:
    """One way to serve a model.

    Args:
        name: what a table calls it.
        fields: what the converted model's configuration has otherwise; None: the checkpoint as it is.
        shared: whether `share_memory` was called.
        int8: whether its linear maps are int8.
        ctranslate2: whether CTranslate2 runs it; else torch.
        compiled: whether its steps are compiled by `torch.compile`, with a static cache.
    """

    name: str
    fields: Mapping[str, Any] | None = None
    shared: bool = False
    int8: bool = False
    ctranslate2: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Load:
    """What each engine is given.

    Args:
        batch_size: texts, or windows of audio, at once.
        length: tokens of each, or positions of audio.
        max_new_tokens: tokens that are generated for each; None: a pass over the text.
        num_beams: of the search.
    """

    batch_size: int
    length: int
    max_new_tokens: int | None
    num_beams: int


def engines_of(
    config: Mapping[str, Any],
    conversions: Sequence[Mapping[str, Any]],
    has_ctranslate2: Callable[[Mapping[str, Any]], bool],
    compiles: bool = False,
    names: Sequence[str] | None = None,
) -> list[Engine]:
    """Return the engines of a checkpoint, the baseline first.

    Args:
        config: its config.json.
        conversions: the fields of each model that it could be converted to.
        has_ctranslate2: says whether CTranslate2 is here and has a form for the checkpoint with some fields changed.
        compiles: whether torch's engines of the checkpoint as it is are there compiled, too.
        names: of those that are returned, beside the baseline; None: all.

    Raises:
        ValueError: if a field is unknown, a value breaks a rule, two engines share a name, or none has one of `names`.
    """
    current = variant_config(config)
    is_upstreams = config["model_type"] != type(current).model_type
    can_share = is_upstreams and generates(config)
    own = "transformers" if is_upstreams else variant_name(current, _heads_field(config))
    found = [Engine(own)]
    if can_share:
        found.append(Engine("share_memory", shared=True))
    found.append(Engine("int8" if is_upstreams else f"{own}, int8", int8=True))
    if can_share:
        found.append(Engine("share_memory, int8", shared=True, int8=True))
    if compiles:
        found += [replace(engine, name=f"{engine.name}, compiled", compiled=True) for engine in found]
    if has_ctranslate2({}):
        found += _ctranslate2_engines("" if is_upstreams else f"{own}, ", None)
    for fields in conversions:
        converted = variant_config(config, **fields)
        name = variant_name(converted, _heads_field(config))
        found += [Engine(name, fields), Engine(f"{name}, int8", fields, int8=True)]
        # An export multiplies latents in: without them the model is timed already.
        if has_ctranslate2(fields) and not has_latents(converted):
            found += _ctranslate2_engines(f"{name}, ", fields)
    there = [engine.name for engine in found]
    if twice := next((name for name in there if there.count(name) > 1), None):
        raise ValueError(f"two of the models to time are {twice}: leave one out")
    if unknown := next((name for name in names or () if name not in there), None):
        raise ValueError(f"no engine is called {unknown!r:.80}; there are: {'; '.join(there)}")
    return found if names is None else [engine for engine in found if engine.name in (own, *names)]


def _ctranslate2_engines(prefix: str, fields: Mapping[str, Any] | None) -> list[Engine]:
    name = f"{prefix}{CTRANSLATE2}"
    return [Engine(name, fields, ctranslate2=True), Engine(f"{name}, int8", fields, int8=True, ctranslate2=True)]


def auto_class(config: Mapping[str, Any]) -> str:
    """Return the Auto class of what is served."""
    return timed_auto_class(config, variant_config(config))


def generates(config: Mapping[str, Any]) -> bool:
    """Say whether it is an encoder-decoder that generates; else a batch is one pass."""
    return "Seq2Seq" in auto_class(config)


def model_class_of(config: Mapping[str, Any]) -> type:
    """Return this package's class of what is served."""
    return variant_model_class(variant_config(config).auto_classes[auto_class(config)])


def _heads_field(config: Mapping[str, Any]) -> str:
    return kv_heads_field(model_class_of(config), variant_config(config))


def _without_latents(config: Any) -> Any:
    """Return a variant configuration whose keys and values are made from no latent."""
    ranks = config.rank_fields()
    by_layer = {name: values for name, values in (config.per_layer_values or {}).items() if name not in ranks}
    return type(config)(**{**config.to_dict(), **dict.fromkeys(ranks), "per_layer_values": by_layer or None})


def build_model(config: Mapping[str, Any], engine: Engine) -> Any:
    """Return the model of an engine in float32, of random weights, the same for each that has the same maps.

    An engine of CTranslate2 gets this package's class without latents, from which it is exported.
    """
    torch.manual_seed(0)
    if engine.fields is None and not engine.ctranslate2:
        model = _own_model(config)
    else:
        current = variant_config(config, **(engine.fields or {}))
        model = model_class_of(config)(_without_latents(current) if engine.ctranslate2 else current)
    model = ready_to_time(model, "cpu")
    if engine.ctranslate2:
        return model
    if engine.shared:
        share_memory(model)
    if engine.int8:
        quantize(model)
    if engine.compiled:
        model.compile()
    return model


def _own_model(config: Mapping[str, Any]) -> Any:
    """Return the checkpoint's own class: transformers', or this package's."""
    current = variant_config(config)
    if config["model_type"] == type(current).model_type:
        return model_class_of(config)(current)
    return upstream_model(config, auto_class(config))


def random_inputs(config: Mapping[str, Any], load: Load) -> dict[str, torch.Tensor]:
    """Return what a model reads, random: `input_ids` [b, n] with `attention_mask`, or `input_features` of audio."""
    current: Any = variant_config(config)
    generator = torch.Generator().manual_seed(0)
    if auto_class(config) in AUDIO_AUTO_CLASSES:
        shape = (load.batch_size, current.num_mel_bins, 2 * load.length)  # the encoder halves its frames
        return {"input_features": torch.randn(shape, generator=generator)}
    ids = torch.randint(2, current.vocab_size, (load.batch_size, load.length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def torch_run(
    model: Any, inputs: dict[str, torch.Tensor], load: Load, compiled: bool = False
) -> Callable[[int | None], None]:
    """Return what is timed: called with a number of new tokens, None for a pass, the encoder included."""
    options: dict[str, Any] = {"num_beams": load.num_beams, "do_sample": False}
    if compiled:  # else each step is of another length, and compiled anew
        options["cache_implementation"] = "static"
    if "input_features" in inputs:  # Whisper's own code would look for further segments of the audio
        options |= {"force_unique_generate_call": True, "return_timestamps": False}
    return partial(_generate_or_pass, model, inputs, options)


@torch.no_grad()
def _generate_or_pass(
    model: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any], tokens: int | None
) -> None:
    if tokens is None:
        model(**inputs)
        return
    with limits_of_the_call(model):
        model.generate(**inputs, **options, max_new_tokens=tokens)
