"""Compares variants with the original models if the installed Transformers release has not been tested.

`transformers_internals` checks names and signatures, but not behavior. Before the first model of an architecture is
built, a tiny variant and a tiny original model with the same weights are therefore run on the same tokens, once in a
single pass and once token by token with a cache. This takes at most a few tenths of a second per process and does not
change the state of random number generators.
"""

from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from .transformers_internals import TransformersChangedError, build_change_error, get_cache, get_cache_name
from .variant_names import NEWEST_TESTED

__all__ = ["compare_with_transformers"]

# Follows the verbosity level of Transformers, even in remote code
logger = logging.get_logger("transformers.attn_variants")

NUM_HEADS, HEAD_DIM, VOCABULARY_SIZE, LENGTH = 2, 4, 12, 4
# The largest allowed difference, relative to the largest output.
TOLERANCE = 1e-4
# The error for each compared architecture, or None. All later models of the architecture raise the same error.
_trial_errors: dict[str, str | None] = {}


def compare_with_transformers(model_class: Any) -> None:
    """Compare tiny variants of an architecture with the original models if the Transformers release was not tested.

    Args:
        model_class: any variant model class of the architecture.

    Raises:
        TransformersChangedError: if the outputs differ or the variant raises an error.
    """
    name = model_class.config_class.model_type
    if not is_newer(transformers.__version__, NEWEST_TESTED):
        return
    if name in _trial_errors:
        if (reason := _trial_errors[name]) is not None:
            raise TransformersChangedError(reason)
        return
    _trial_errors[name] = None  # must be set first, because the comparison builds models itself
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        for fields in _yield_model_fields(model_class):
            for implementation in ("eager", "sdpa"):
                try:
                    # Models on the meta device (`init_empty_weights`) cannot be compared. The comparison is repeated
                    # for the next model.
                    if not _compare_tiny_models(model_class, implementation, **fields):
                        del _trial_errors[name]
                        return
                except TransformersChangedError as error:
                    _trial_errors[name] = str(error)
                    raise


def is_newer(version: str, reference: str) -> bool:
    """Return True if `version` belongs to a later minor release than the one in `reference`."""
    minor = [int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2]]
    return minor > [int(part) for part in reference.split(".")]


def _yield_model_fields(model_class: Any) -> Iterator[dict[str, Any]]:
    """Yield the configuration fields that select each kind of model in an architecture, such as a decoder."""
    yield {}
    sites = model_class.attention_sites
    if any(site.is_cross_attention for site in sites) and not hasattr(
        model_class.config_class, "encoder_decoder_layers"
    ):
        yield {"is_decoder": True, "add_cross_attention": True}


def _compare_tiny_models(model_class: Any, implementation: str, **fields: Any) -> bool:
    """Compare tiny models with the given fields. Return False if models are built on the meta device.

    Raises:
        TransformersChangedError: if the outputs differ or the variant raises an error.
    """
    name = model_class.config_class.auto_classes["AutoModel"]
    transformers_class, our_class = next(
        pair for pair in model_class.variant_classes.items() if pair[1].__name__ == name
    )
    try:
        config = _create_tiny_config(our_class.config_class, fields)
        config._attn_implementation = implementation
        original = transformers_class(config).float().eval()
        if any(parameter.is_meta for parameter in original.parameters()):
            return False
        generator = torch.Generator().manual_seed(0)
        for parameter in original.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        expected = _compute_outputs(original, config)
    except Exception as error:  # the original model fails, so the variant may still be correct
        reason = f"{type(error).__name__}: {error}"
        logger.warning(
            f"Skipping the comparison with {transformers_class.__name__} in transformers {transformers.__version__}, "
            f"because it failed: {reason}."
        )
        return True
    exact = dict.fromkeys(our_class.config_class.get_rank_fields(), config.hidden_size)
    shared = dict.fromkeys(our_class.config_class.get_kv_heads_fields(), 1)
    # The other variants only differ in code that does not depend on the attention implementation.
    for variant in ({}, exact, shared) if implementation == "eager" else ({},):
        try:
            variant_model = our_class(our_class.config_class.from_upstream(config, **variant)).float().eval()
            if variant is not shared:
                variant_model.load_state_dict(original.state_dict())
            outputs = _compute_outputs(variant_model, config)
        except Exception as error:
            raise build_change_error(f"a tiny {our_class.__name__} raises {type(error).__name__}: {error}") from error
        for phase, expected_states, actual_states in zip(
            ("for a whole text", "in decoding steps"), expected, outputs, strict=True
        ):
            # Transformers does not support shared heads, so the outputs of this variant are computed but not compared.
            difference = (
                0.0
                if variant is shared
                else float((expected_states - actual_states).abs().max() / expected_states.abs().max())
            )
            if not difference <= TOLERANCE:
                raise build_change_error(
                    f"the outputs of a tiny {our_class.__name__} {phase} differ from those of Transformers by "
                    f"{difference:.0e}"
                )
    return True


def _create_tiny_config(config_class: Any, fields: dict[str, Any]) -> Any:
    """Return a Transformers configuration for a tiny model without dropout."""
    original = next(
        base
        for base in config_class.__mro__
        if base.__dict__.get("model_type") in config_class.transformers_model_types
    )
    names = (*config_class.layer_fields, *config_class.size_fields)
    sizes = {name: 1 if name in config_class.layer_fields else NUM_HEADS * HEAD_DIM for name in names}
    sizes |= {"vocab_size": VOCABULARY_SIZE}
    if config_class.head_dim_field is not None:
        sizes[config_class.head_dim_field] = HEAD_DIM
    heads = getattr(config_class, "encoder_decoder_heads", ("num_attention_heads",))
    sizes |= {config_class.attribute_map.get(name, name): NUM_HEADS for name in heads}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return original(**sizes | tokens | fields)


def _compute_outputs(model: PreTrainedModel, config: Any) -> tuple[Tensor, Tensor]:
    """Compute the last hidden states [1, n, D] of a text twice: in one pass, and token by token with a cache.

    For an encoder, the second output is computed from a text with padding instead. The encoder outputs that a decoder
    attends to also contain padding.
    """
    ids = torch.arange(3, 3 + LENGTH)[None]
    encoder_arguments: dict[str, Any] = {}
    name = "input_ids"
    if getattr(config, "is_encoder_decoder", False):
        source = {model.main_input_name: _create_encoder_input(model, config, ids)}
        if model.main_input_name == "input_ids":
            source["attention_mask"] = encoder_arguments["attention_mask"] = _create_padding_mask(ids.shape[1])
        encoder_arguments, name = (
            encoder_arguments | {"encoder_outputs": model.get_encoder()(**source)},
            "decoder_input_ids",
        )
    elif getattr(config, "is_decoder", False):
        states = torch.linspace(-1.0, 1.0, 3 * config.hidden_size).view(1, 3, -1)
        encoder_arguments = {"encoder_hidden_states": states, "encoder_attention_mask": _create_padding_mask(3)}
    else:
        padded = model(input_ids=ids, attention_mask=_create_padding_mask(LENGTH))[0]
        return model(input_ids=ids)[0], padded[:, :-1]
    steps, cache = [], None
    for token in ids.split(1, dim=1):
        caches: dict[str, Any] = {} if cache is None else {get_cache_name(): cache}
        output = model(**encoder_arguments, **{name: token}, **caches, use_cache=True)
        cache = get_cache(output)
        steps.append(output.last_hidden_state)
    return model(**encoder_arguments, **{name: ids}, use_cache=False).last_hidden_state, torch.cat(steps, 1)


def _create_padding_mask(length: int) -> Tensor:
    """Return a mask [1, length] whose last token is padding."""
    return torch.tensor([[1] * (length - 1) + [0]])


def _create_encoder_input(model: PreTrainedModel, config: Any, ids: Tensor) -> Tensor:
    if model.main_input_name == "input_ids":
        return ids
    size = (1, config.num_mel_bins, 2 * config.max_source_positions)
    return torch.linspace(-1.0, 1.0, size[1] * size[2]).view(size)
