"""The inputs of each attention of the original model on a calibration, recorded in passes that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ...errors import as_value_error
from ...modeling.attention.attention_interface import attention_function
from ...modeling.attention.attention_sites import AttentionSite
from ...modeling.attention.kernel_interface import attend_by_kernel
from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...modeling.mechanisms.patterns.global_tokens import global_tokens_of
from ...modeling.ops.padded_rows import from_first_token
from ...modeling.ops.softmax_attention import attention_with_weights, fused_attention
from ...modeling.ops.window_blocks import as_full_attention
from ...modeling.variant_names import EAGER, RECORDING, SDPA
from ...progress import progress_bar
from ..attention_modules import AttentionModule
from ..attention_tensors import AttentionTensors
from .batches import read_by_decoder, read_by_encoder

__all__ = ["AttentionInputs", "attend", "attention_weights", "recorded_inputs", "recorded_together"]

UNREADABLE = "the source cannot read the calibration: its configuration is wrong"
# What recorded inputs may take; more modules than fit into it are recorded in several passes over the text.
MAX_RECORDED_BYTES = 3 * 2**30


@dataclass(frozen=True)
class AttentionInputs:
    """What one attention module was called with, on one batch.

    Args:
        states: the inputs x of the queries, [b, n, D_x].
        memory: the inputs y of the keys and values, [b, m, D_y]; in self-attention `states` itself, and the latent
            where the model has one.
        mask: additive, broadcastable to [b, h, n, m], or None.
        position_bias: [1, h, n, m] or None.
        valid: which queries are tokens and not padding, [b, n].
        scaling: the factor of the dot products.
        is_causal: whether query i attends to keys 0..i alone (where there is no mask that says so).
    """

    states: torch.Tensor
    memory: torch.Tensor
    mask: torch.Tensor | None
    position_bias: torch.Tensor | None
    valid: torch.Tensor
    scaling: float
    is_causal: bool = False

    def rows(self, index: torch.Tensor) -> AttentionInputs:
        """Return some examples of the batch."""
        memory = self.memory[index]
        states = memory if self.memory is self.states else self.states[index]
        mask = self.mask if self.mask is None or self.mask.shape[0] == 1 else self.mask[index]
        return replace(self, states=states, memory=memory, mask=mask, valid=self.valid[index])

    def memory_valid(self) -> torch.Tensor:
        """Return which keys and values some query may read, [b, m]."""
        if self.memory is self.states:
            return self.valid
        if self.mask is None:
            return torch.ones(self.memory.shape[:2], dtype=torch.bool, device=self.memory.device)
        reachable = self.mask.amax(1) > torch.finfo(self.mask.dtype).min / 2  # [b or 1, n, m]
        return reachable.any(1).expand(self.memory.shape[0], -1)


def attend(tensors: AttentionTensors, inputs: AttentionInputs, query_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one attention on recorded inputs, by torch's fused kernels or by its own one.

    Returns:
        The output [b, n, D] and the heads' outputs [b, n, h*d]. Those of a query that may read nothing, and their
        gradients, are arbitrary: read the valid ones alone.
    """
    projected = _projected(tensors, inputs, query_heads)
    if tensors.kernel is None:
        context = fused_attention(*projected, **_options(inputs)).flatten(2)
    else:
        # The last query's row is of all keys but padding.
        mask = None if inputs.mask is None else inputs.mask[..., -1:, :]
        query, key, value = projected
        attention: Any = tensors  # which has what an attention with a kernel computes with
        context = attend_by_kernel(attention, query, key, value, mask, inputs.scaling)[0].flatten(2)
    return tensors.project("output", context), context


def attention_weights(tensors: AttentionTensors, inputs: AttentionInputs, query_heads: int) -> torch.Tensor:
    """Return the weights [b, h, n, m] of one attention on recorded inputs."""
    return attention_with_weights(*_projected(tensors, inputs, query_heads), **_options(inputs))[1]


def _projected(tensors: AttentionTensors, inputs: AttentionInputs, query_heads: int) -> list[torch.Tensor]:
    """Return queries [b, h, n, d], keys and values [b, k, m, d]."""
    head_dim = tensors.query_weight.shape[0] // query_heads
    memory = tensors.latent(inputs.memory)
    reads = (("query", inputs.states), ("key", memory), ("value", memory))
    return [tensors.project(role, states).unflatten(-1, (-1, head_dim)).transpose(1, 2) for role, states in reads]


def _options(inputs: AttentionInputs) -> dict[str, Any]:
    return {name: getattr(inputs, name) for name in ("mask", "position_bias", "scaling", "is_causal")}


@torch.no_grad()
def recorded_inputs(
    model: AttnVariantModelMixin, paths: Sequence[str], batches: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, list[AttentionInputs]]:
    """Run a model over batches and return what its attentions were called with, {path: calls}.

    Args:
        model: one of this package's, with its own heads.
        paths: the attentions' paths inside the base model; one that is called several times in a pass (ALBERT's shared
            layers) has an entry for each call.
        batches: the model's arguments, with their attention masks.
    """
    recorder = _Recorder(model, paths)
    arguments = read_by_decoder if recorder.is_of_decoder() else read_by_encoder
    implementation = model.config._attn_implementation
    device = next(model.parameters()).device
    with recorder.hooked():
        model.set_attn_implementation(RECORDING)
        try:
            for batch in progress_bar(batches, desc="reading the text", unit="batch", leave=False):
                recorder.batch = {name: tensor.to(device) for name, tensor in batch.items()}
                with as_value_error(UNREADABLE), suppress(_AllRecorded):
                    model.base_model(**arguments(recorder.batch))
                recorder.end_batch()
        finally:
            model.set_attn_implementation(implementation)
    return recorder.calls


class _AllRecorded(Exception):
    """Ends a forward pass once everything is recorded."""


class _Recorder:
    """Collects the calls of some attentions, in the order in which they happen."""

    def __init__(self, model: AttnVariantModelMixin, paths: Sequence[str]):
        self.batch: dict[str, torch.Tensor] = {}
        self._calls_in_batch = 0
        self._calls_expected: int | None = None  # as many as in the first batch
        self.calls: dict[str, list[AttentionInputs]] = {path: [] for path in paths}
        # By the submodule that calls the attention function: path, site, and the linear maps of queries and keys.
        self._modules: dict[nn.Module, tuple[str, AttentionSite, nn.Module, nn.Module]] = {}
        for site, path, module in model.named_attentions():
            if path in self.calls:
                maps = module.get_submodule(site.query), module.get_submodule(site.key)
                self._modules[module.get_submodule(site.core)] = (path, site, *maps)
        self._inputs: dict[nn.Module, torch.Tensor] = {}

    def is_of_decoder(self) -> bool:
        """Say whether all that is recorded happens after the encoder."""
        return all(site.stack == "decoder" for _, site, _, _ in self._modules.values())

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Record while the block runs."""
        maps = [linear for _, _, *linears in self._modules.values() for linear in linears]
        hooks = [linear.register_forward_pre_hook(self._note_input) for linear in maps]
        token = _RECORDER.set(self)
        try:
            yield
        finally:
            _RECORDER.reset(token)
            for hook in hooks:
                hook.remove()

    def end_batch(self) -> None:
        """Note how many calls a batch has."""
        self._calls_expected, self._calls_in_batch = self._calls_in_batch, 0

    def _note_input(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._inputs[module] = args[0]

    def attention(
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
        """The attention function of upstream's interface: notes what it is called with, and answers."""
        if module in self._modules:
            path, site, query_map, key_map = self._modules[module]
            states, memory = self._inputs[query_map], self._inputs[key_map]
            mask_name = "decoder_attention_mask" if site.stack == "decoder" else "attention_mask"
            # A decoder alone has its text where others have the encoder's; all of audio's positions count.
            valid = self.batch.get(mask_name, self.batch.get("attention_mask"))
            valid = torch.ones_like(states[..., 0], dtype=torch.bool) if valid is None else valid.bool()
            mask, bias = _mask_and_bias(module, query, key, attention_mask, position_bias, **kwargs)
            causal = mask is None and query.shape[2] > 1 and bool(getattr(module, "is_causal", False))
            factor = query.shape[-1] ** -0.5 if scaling is None else scaling
            bias = None if bias is None else bias[:1]
            self.calls[path].append(AttentionInputs(states, memory, mask, bias, valid, factor, causal))
            self._calls_in_batch += 1
            if self._calls_in_batch == self._calls_expected:
                raise _AllRecorded
        attend = attention_function(SDPA)
        return attend(module, query, key, value, attention_mask, scaling, position_bias=position_bias, **kwargs)


def _mask_and_bias(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    position_bias: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the additive mask and the bias by which full attention reads what a call does; a pattern's is in them."""
    bias = position_bias

    @from_first_token  # which moves rows, and the weights back: here the mask stands for them
    def pattern_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        nonlocal bias
        reach = kwargs.get("reach", module.reach)
        told = (reach, query, key, mask, position_bias, global_tokens_of(reach, kwargs))
        mask, bias = as_full_attention(*told)
        if mask is not None:
            shape = query.shape[0], *mask.shape[1:]
            mask = mask.expand(shape)
        return query.transpose(1, 2), mask

    if module.reach is not None:
        mask = pattern_mask(module, query, key, key, mask, **kwargs)[1]
    if mask is not None and mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
    return mask, bias


# The recorder of the conversion that runs in this thread; none is kept when it is over.
_RECORDER: ContextVar[_Recorder] = ContextVar("recorder")


def _recording_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _RECORDER.get().attention(*args, **kwargs)


# Registered by name because that is how upstream finds a function and the mask that it needs.
AttentionInterface.register(RECORDING, _recording_attention)
AttentionMaskInterface.register(RECORDING, ALL_MASK_ATTENTION_FUNCTIONS[EAGER])


def recorded_together(
    modules: list[AttentionModule], model_class: Any, config: Any, batches: Sequence[dict[str, torch.Tensor]]
) -> Iterator[list[AttentionModule]]:
    """Split the modules so that what is recorded for each part fits into `MAX_RECORDED_BYTES`.

    An attention's own inputs count for each, the encoder's outputs once for all cross-attentions.
    """
    read, written = map(sum, zip(*map(_positions, batches), strict=True))

    def size(module: AttentionModule, others: list[AttentionModule]) -> int:
        own = (written if module.site.stack == "decoder" else read) * model_class.module_runs(config, module.name)
        is_first = module.site.is_cross_attention and not any(other.site.is_cross_attention for other in others)
        return (own + (read if is_first else 0)) * config.hidden_size * 4

    group: list[AttentionModule] = []
    total = 0
    for module in modules:
        if group and total + size(module, group) > MAX_RECORDED_BYTES:
            yield group
            group, total = [], 0
        total += size(module, group)
        group.append(module)
    if group:
        yield group


def _positions(batch: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Return how many positions the encoder (or the only stack) and the decoder read of a batch.

    Of audio's features [b, bins, frames] the encoder reads every other frame.
    """
    audio = batch.get("input_features")
    read = batch["input_ids"].numel() if audio is None else audio[:, 0].numel() // 2
    return read, batch["decoder_input_ids"].numel() if "decoder_input_ids" in batch else read
