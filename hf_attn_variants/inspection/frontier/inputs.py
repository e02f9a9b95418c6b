"""What a frontier begins with: the checkpoint as a model, its options, and examples to fit to and to measure on."""

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...conversion.calibration.source_models import load_processor
from ...conversion.calibration_settings import Calibration
from ...conversion.checkpoint.models import reading_checkpoint
from ...conversion.checkpoint.source import read_config, resolve_source
from ...conversion.checkpoint.tensor_files import checked_finite
from ...conversion.plan import seeded_generator
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...registration import variant_model_class
from ..costs import kv_heads_field, variant_config
from .options import default_options, options_of

__all__ = ["load_source", "split_text", "variants_to_try"]


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
        checked_finite(parameter, name, os.fspath(checkpoint))  # before anything is measured
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
