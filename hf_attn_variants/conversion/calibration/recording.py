"""Records the inputs of the original attention modules on calibration data, in passes that fit into memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ...errors import convert_to_value_error
from ...modeling.attention.attention_interface import get_attention_function
from ...modeling.attention.attention_mixin import AttentionVariantMixin
from ...modeling.attention.attention_sites import AttentionSite
from ...modeling.attention.mechanism_attention import attend_with_kernel
from ...modeling.attention.model_mixin import AttnVariantModelMixin
from ...modeling.mechanisms.patterns.window_pattern import get_global_token_mask
from ...modeling.ops.key_ranges import key_range_to_mask_and_bias
from ...modeling.ops.padded_rows import roll_padded_rows
from ...modeling.ops.softmax_attention import attention_with_weights, fused_attention
from ...modeling.variant_names import EAGER, RECORDING_IMPLEMENTATION, SDPA
from ...progress import progress_bar
from ..attention_modules import AttentionModule
from ..attention_tensors import AttentionInputs, AttentionTensors
from ..rotary_positions import RotaryPositions
from .batches import with_known_encoder_outputs, without_known_encoder_outputs

UNREADABLE = "The original model cannot read the calibration data, so its configuration is invalid"
# Maximum size of recorded inputs. If all modules together need more memory, they are recorded in several passes over
# the data.
MAX_RECORDED_BYTES = 3 * 2**30


def compute_attention(
    tensors: AttentionTensors, inputs: AttentionInputs, query_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a module's output for recorded inputs with PyTorch's fused attention, or with the module's own kernel.

    Args:
        tensors: The projections of the module.
        inputs: The recorded inputs.
        query_heads: Number of query heads.

    Returns:
        The output [b, n, D] and the concatenated head outputs [b, n, h*d]. Only valid rows should be used because the
        rows of queries without keys, and their gradients, are arbitrary.
    """
    projected = _project_heads(tensors, inputs, query_heads)
    if tensors.kernel is None and inputs.softcap is None:
        context = fused_attention(*projected, **_get_attention_arguments(inputs)).flatten(2)
    elif tensors.kernel is None:
        context = _attend_with_weights(projected, inputs)[0].flatten(2)
    else:
        # The last query attends to all keys except padding, so its row is the key mask.
        mask = None if inputs.mask is None else inputs.mask[..., -1:, :]
        query, key, value = projected
        attention: Any = tensors  # it has the attributes of a module with a kernel
        context = attend_with_kernel(attention, query, key, value, mask, inputs.scaling)[0].flatten(2)
    return tensors.project("output", context), context


def compute_attention_weights(tensors: AttentionTensors, inputs: AttentionInputs, query_heads: int) -> torch.Tensor:
    """Return the attention weights [b, h, n, m]. Takes the same arguments as `compute_attention`."""
    return _attend_with_weights(_project_heads(tensors, inputs, query_heads), inputs)[1]


def _attend_with_weights(
    projected: Sequence[torch.Tensor], inputs: AttentionInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the head outputs [b, n, h, d] and the attention weights [b, h, n, m]."""
    options, scaling = _get_attention_arguments(inputs), inputs.scaling
    cap: Any = inputs.softcap

    def compute_capped_scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return cap * torch.tanh(query @ key.mT * (scaling / cap))

    if cap is not None:
        options["score"] = compute_capped_scores
    return attention_with_weights(*projected, **options)


def _project_heads(tensors: AttentionTensors, inputs: AttentionInputs, query_heads: int) -> list[torch.Tensor]:
    """Return the queries [b, h, n, d], keys [b, k, m, d] and values [b, k, m, d]."""
    head_dim = tensors.query_weight.shape[0] // query_heads
    latent = tensors.compute_latent(inputs.key_value_states)
    states = {"query": inputs.states, "key": latent, "value": latent}
    projected = {role: tensors.project(role, x).unflatten(-1, (-1, head_dim)) for role, x in states.items()}
    if inputs.rotary is not None:
        projected |= {role: inputs.rotary.rotate(projected[role]) for role in ("query", "key")}
    return [heads.transpose(1, 2) for heads in projected.values()]


def _get_attention_arguments(inputs: AttentionInputs) -> dict[str, Any]:
    """Return the recorded inputs as keyword arguments for attention functions."""
    return {name: getattr(inputs, name) for name in ("mask", "position_bias", "scaling", "is_causal")}


@torch.no_grad()
def record_inputs(
    model: AttnVariantModelMixin, paths: Sequence[str], batches: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, list[AttentionInputs]]:
    """Run a model on batches and record the inputs of its attention modules.

    Args:
        model: A model from this package.
        paths: Paths of attention modules inside the base model.
        batches: Model inputs with their attention masks.

    Returns:
        {path: inputs of each call}. If a forward pass calls a module several times (ALBERT's shared layers), each call
        has its own item.
    """
    recorder = _Recorder(model, paths)
    arguments = with_known_encoder_outputs if recorder.only_needs_decoder() else without_known_encoder_outputs
    with recorder.record(model):
        for batch in progress_bar(batches, desc="recording attention inputs", unit="batch", leave=False):
            recorder.batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
            with convert_to_value_error(UNREADABLE), suppress(_AllRecorded):
                model.base_model(**arguments(recorder.batch))
            recorder.end_batch()
    return recorder.calls


class _AllRecorded(Exception):
    """Raised to end a forward pass when all requested modules have been recorded."""


class _Recorder:
    """Records the inputs of the given attention modules in the order of their calls."""

    def __init__(self, model: AttnVariantModelMixin, paths: Sequence[str]):
        self.batch: dict[str, torch.Tensor] = {}
        self._calls_in_batch = 0
        self._calls_expected: int | None = None  # the number of calls in the first batch
        self.calls: dict[str, list[AttentionInputs]] = {path: [] for path in paths}
        # The path, site, query projection and key projection for each submodule that calls the attention function.
        self._modules: dict[nn.Module, tuple[str, AttentionSite, nn.Module, nn.Module]] = {}
        for site, path, module in model.named_attention_modules():
            if path in self.calls:
                projections = module.get_submodule(site.query), module.get_submodule(site.key)
                self._modules[module.get_submodule(site.core)] = (path, site, *projections)
        self._inputs: dict[nn.Module, torch.Tensor] = {}
        # The cosines and sines of rotary positions that each submodule received.
        self._positions: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def only_needs_decoder(self) -> bool:
        """Return whether all modules to record are in the decoder."""
        return all(site.stack == "decoder" for _, site, _, _ in self._modules.values())

    @contextmanager
    def record(self, model: AttnVariantModelMixin) -> Iterator[None]:
        """Record all calls of the model within this context."""
        projections = [linear for _, _, *linears in self._modules.values() for linear in linears]
        hooks = [linear.register_forward_pre_hook(self._store_input) for linear in projections]
        rotary = [core for core, (_, site, *_) in self._modules.items() if site.rotary is not None]
        hooks += [core.register_forward_pre_hook(self._store_positions, with_kwargs=True) for core in rotary]
        implementation, token = model.config._attn_implementation, _RECORDER.set(self)
        model.set_attn_implementation(RECORDING_IMPLEMENTATION)
        try:
            yield
        finally:
            model.set_attn_implementation(implementation)
            _RECORDER.reset(token)
            for hook in hooks:
                hook.remove()

    def end_batch(self) -> None:
        """Store the number of calls in the batch. It is the same for all batches."""
        self._calls_expected, self._calls_in_batch = self._calls_in_batch, 0

    def _store_input(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Store the input of a projection. This is a forward pre-hook."""
        self._inputs[module] = args[0]

    def _store_positions(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the rotary positions of an attention module. This is a forward pre-hook."""
        self._positions[module] = kwargs["position_embeddings"]

    def attend_and_record(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        position_bias: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Record a call and compute its result. The signature is that of a Transformers attention function."""
        if module in self._modules:
            path, site, query_linear, key_linear = self._modules[module]
            states, key_value_states = self._inputs[query_linear], self._inputs[key_linear]
            mask_name = "decoder_attention_mask" if site.stack == "decoder" else "attention_mask"
            # In a decoder-only model, the mask is `attention_mask`. Audio has no mask, so all positions are valid.
            valid = self.batch.get(mask_name, self.batch.get("attention_mask"))
            valid = torch.ones_like(states[..., 0], dtype=torch.bool) if valid is None else valid.bool()
            mask, bias = _compute_mask_and_bias(module, query, key, attention_mask, position_bias, **kwargs)
            causal = mask is None and query.shape[2] > 1 and bool(getattr(module, "is_causal", False))
            factor = query.shape[-1] ** -0.5 if scaling is None else scaling
            bias = None if bias is None else bias[:1]
            rotary = None
            if site.rotary is not None:
                rotary = RotaryPositions.from_embeddings(*self._positions[module], site.rotary)
            other_inputs = (mask, bias, valid, factor, causal, rotary, kwargs.get("softcap"))
            self.calls[path].append(AttentionInputs(states, key_value_states, *other_inputs))
            self._calls_in_batch += 1
            if self._calls_in_batch == self._calls_expected:
                raise _AllRecorded
        if not isinstance(module, AttentionVariantMixin):
            # Transformers passes this function to the attention interface as the default.
            eager = sys.modules[type(module).__module__].eager_attention_forward
            return eager(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        attend = get_attention_function(SDPA)
        options = kwargs | {"scaling": scaling, "position_bias": position_bias}
        return attend(module, query, key, value, attention_mask, **options)


def _compute_mask_and_bias(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the additive mask and bias that make full attention equivalent to the module's attention pattern."""
    bias = position_bias

    @roll_padded_rows  # reorders rows, and restores their order in the result (the mask)
    def create_pattern_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        nonlocal bias
        key_range = kwargs.get("key_range", module.key_range)
        global_tokens = get_global_token_mask(key_range, kwargs)
        mask, bias = key_range_to_mask_and_bias(key_range, query, key, mask, position_bias, global_tokens)
        if mask is not None:
            shape = query.shape[0], *mask.shape[1:]
            mask = mask.expand(shape)
        return query.transpose(1, 2), mask

    if isinstance(module, AttentionVariantMixin) and module.key_range is not None:
        mask = create_pattern_mask(module, query, key, key, mask, **kwargs)[1]
    if mask is not None and mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
    return mask, bias


# The recorder that is active in this thread. It is reset after recording so that no model stays in memory.
_RECORDER: ContextVar[_Recorder] = ContextVar("recorder")


def _recording_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pass a call to this thread's recorder."""
    return _RECORDER.get().attend_and_record(*args, **kwargs)


# Transformers looks up attention functions and their mask functions by name.
AttentionInterface.register(RECORDING_IMPLEMENTATION, _recording_attention)
AttentionMaskInterface.register(RECORDING_IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS[EAGER])


def group_modules(
    modules: Sequence[AttentionModule], model_class: Any, config: Any, batches: Sequence[dict[str, torch.Tensor]]
) -> Iterator[list[AttentionModule]]:
    """Yield groups of modules whose recorded inputs fit into `MAX_RECORDED_BYTES`.

    Each module needs memory for its own inputs. All cross-attention modules in a group share the memory of the encoder
    outputs.

    Args:
        modules: The attention modules.
        model_class: Class of the model.
        config: Configuration of the model.
        batches: The batches to record.
    """
    encoder_positions, decoder_positions = map(sum, zip(*map(_count_positions, batches), strict=True))

    def compute_size(module: AttentionModule, others: list[AttentionModule]) -> int:
        positions = decoder_positions if module.site.stack == "decoder" else encoder_positions
        positions *= model_class.count_module_runs(config, module.name)
        is_first = module.site.is_cross_attention and not any(other.site.is_cross_attention for other in others)
        return (positions + (encoder_positions if is_first else 0)) * config.hidden_size * 4

    group: list[AttentionModule] = []
    total = 0
    for module in modules:
        if group and total + compute_size(module, group) > MAX_RECORDED_BYTES:
            yield group
            group, total = [], 0
        total += compute_size(module, group)
        group.append(module)
    if group:
        yield group


def _count_positions(batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return how many positions in a batch the encoder (or decoder-only model) reads, and how many the decoder reads.

    For audio features [b, bins, frames], the encoder reads every second frame.
    """
    audio = batch.get("input_features")
    encoder_positions = batch["input_ids"].numel() if audio is None else audio[:, 0].numel() // 2
    has_decoder = "decoder_input_ids" in batch
    return encoder_positions, batch["decoder_input_ids"].numel() if has_decoder else encoder_positions
