"""Cross-attention modules and a cache layer that let beams share keys and values or encoder outputs."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..modeling.attention.beam_shared_rows import (
    BeamSharedDynamicLayer,
    get_empty_layer,
    get_unrepeated_encoder_outputs,
    share_rows_between_beams,
)
from ..modeling.attention.latent_attention import compute_keys_and_values, is_plain_linear, matmul_per_head
from ..modeling.ops.beams import count_beams, repeat_for_beams
from ..modeling.ops.softmax_attention import attention_with_weights, fused_attention
from ..modeling.ops.variant_attention import is_traced
from ..modeling.transformers_internals import (
    MethodSignature,
    check_cache_internals,
    check_known_arguments,
    guarded_imports,
)

# The names of cross-attention modules in Transformers decoder layers.
CROSS_ATTENTION_NAMES = ("EncDecAttention", "encoder_attn", "cross_attention")


@dataclass(frozen=True)
class CrossAttentionLayout:
    """The attribute names and conventions of one kind of Transformers cross-attention module.

    Args:
        query, key, value, output: The names of the linear layers.
        head_dim: The name of the attribute for the head size d.
        roles: The arguments of `forward` that this package reads (see `transformers_internals.ARGUMENT_ROLES`).
        returns: The number of values that `forward` returns. Two values are the outputs and the weights. With three
            values, the position bias is between them.
        has_finite_masks: Whether masks contain the lowest finite number instead of -inf. If so, a query whose keys are
            all masked attends to all keys equally. Otherwise, its output is 0.
    """

    query: str
    key: str
    value: str
    output: str
    head_dim: str
    roles: tuple[str, ...] = ("states", "encoder_outputs", "cache", "mask")
    returns: int = 2
    has_finite_masks: bool = False

    @property
    def attributes(self) -> tuple[str, ...]:
        """The names of the module attributes that this package reads."""
        names = (self.query, self.key, self.value, self.output, self.head_dim)
        return (*names, "config", "dropout", "layer_idx", "scaling")


T5_ROLES = ("states", "encoder_outputs", "cache", "mask", "bias")
T5_LAYOUT = CrossAttentionLayout(
    "q", "k", "v", "o", "key_value_proj_dim", roles=T5_ROLES, returns=3, has_finite_masks=True
)
UMT5_LAYOUT = CrossAttentionLayout("q", "k", "v", "o", "key_value_proj_dim", has_finite_masks=True)
BART_LAYOUT = CrossAttentionLayout("q_proj", "k_proj", "v_proj", "out_proj", "head_dim")

# Layouts by the class that defines `forward`. Classes with the same layout have the same code in Transformers 5.15 and
# 5.24.
BART_CLASSES = (
    """BartAttention BigBirdPegasusDecoderAttention BlenderbotAttention BlenderbotSmallAttention M2M100Attention
    MBartAttention MarianAttention NllbMoeAttention PLBartAttention PegasusAttention PegasusXAttention
    Speech2TextAttention WhisperAttention"""  # Whisper scales the queries instead of the logits
).split()
LAYOUTS_BY_CLASS: dict[str, CrossAttentionLayout] = {
    **dict.fromkeys(("LongT5Attention", "MT5Attention", "SwitchTransformersAttention", "T5Attention"), T5_LAYOUT),
    "UMT5Attention": UMT5_LAYOUT,
    **dict.fromkeys(BART_CLASSES, BART_LAYOUT),
}


def get_forward_owner(cls: type) -> type:
    """Return the class that defines `forward` for a module class, which may be one of its base classes."""
    return next(base for base in cls.__mro__ if "forward" in vars(base))


def get_cross_attention_layout(cls: type) -> CrossAttentionLayout | None:
    """Return the layout of a cross-attention class, or None if the class that defines `forward` is not supported."""
    owner = get_forward_owner(cls)
    return LAYOUTS_BY_CLASS.get(owner.__name__) if owner.__module__.startswith("transformers.models.") else None


def iterate_cross_attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and the module for each cross-attention module, even if its class is not supported."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in CROSS_ATTENTION_NAMES:
            yield path, module


with guarded_imports():
    from transformers.cache_utils import EncoderDecoderCache


# The values of `cross_cache`, which determine the content of the cache.
KEYS_AND_VALUES, ENCODER_OUTPUTS = "keys_and_values", "encoder_outputs"

# The supported attention implementations. With any other implementation, the Transformers code runs.
SUPPORTED_IMPLEMENTATIONS = ("sdpa", "eager")

# `SharedMemoryMixin` is a mixin that is combined with a Transformers class. Type checkers see it as a module.
if TYPE_CHECKING:

    class _Attention(nn.Module):
        config: Any
        dropout: float
        layer_idx: int
        scaling: float
else:
    _Attention = object


class SharedMemoryMixin(_Attention):
    """Mixin for Transformers cross-attention classes that attends to shared keys and values or to encoder outputs.

    The `forward` method of the Transformers class is called during training, if gradients are recorded, or if there is
    one row of keys and values per query row.

    Class attributes:
        original_class: The original class of the module, which is a Transformers class or a subclass.
        layout: The layout of the original class.
        arguments: The arguments of the original `forward`, by role.
        cross_cache: `KEYS_AND_VALUES` or `ENCODER_OUTPUTS`.
    """

    original_class: type
    layout: CrossAttentionLayout
    arguments: MethodSignature
    cross_cache: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend from hidden states [b B, n, D] of B beams to encoder outputs [b, m, D]. See the overridden method."""
        states, encoder_outputs, cache, mask, *bias = self.arguments.read(args, kwargs)
        if encoder_outputs is None or not (cache is None or isinstance(cache, EncoderDecoderCache)):
            return super().forward(*args, **kwargs)
        layer: Any = None
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
        if not self.training:
            encoder_outputs = get_unrepeated_encoder_outputs(encoder_outputs, self.key_value_projections())
        cached_outputs = None
        if self.cross_cache == ENCODER_OUTPUTS:
            cached_outputs = self._cache_encoder_outputs(states, encoder_outputs, cache, layer)
        if cached_outputs is None:
            rows = encoder_outputs.shape[0] if layer is None else layer.keys.shape[0]
            beams = states.shape[0] // rows if rows and states.shape[0] % rows == 0 else 1
            if beams <= 1 and _is_mask_broadcastable(mask, states):
                return super().forward(*args, **kwargs)
            has_shared_rows = layer is not None or cache is None
            can_share = beams > 1 and self._uses_supported_implementation()
            if not can_share or not (has_shared_rows or share_rows_between_beams(cache, self.layer_idx, beams)):
                return super().forward(**self._repeat_arguments(args, kwargs))
        check_known_arguments({name: value for name, value in kwargs.items() if name not in self.arguments.names})
        options = {"mask": self._convert_mask(mask, states), "position_bias": bias[0] if bias else None}
        if cached_outputs is not None and self._should_absorb_projections(states, cached_outputs):
            output, weights = self._attend_absorbed(self._compute_queries(states), cached_outputs, **options)
        else:
            key, value = self._get_keys_and_values(encoder_outputs, cache, layer, cached_outputs)
            output, weights = self._attend(self._compute_queries(states), key, value, **options)
        output = self._get_linear("output")(output.flatten(2))
        return (output, *bias, weights)

    def _cache_encoder_outputs(
        self, states: torch.Tensor, encoder_outputs: torch.Tensor, cache: Any, layer: Any
    ) -> torch.Tensor | None:
        """Cache the encoder outputs and return them, or return None if this call cannot attend to encoder outputs."""
        can_read = layer is None or holds_encoder_outputs(layer)
        if self.training or not can_read or not self._uses_supported_implementation():
            return None
        cached_outputs: torch.Tensor = encoder_outputs if layer is None else layer.encoder_outputs
        key_linear, value_linear = self.key_value_projections()
        if not (is_plain_linear(key_linear, cached_outputs) and is_plain_linear(value_linear, cached_outputs)):
            return None
        if states.dtype != key_linear.weight.dtype:
            return None
        tensors = (states, cached_outputs, key_linear.weight, value_linear.weight)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return None
        if is_traced() or torch.is_autocast_enabled(states.device.type):
            return cached_outputs if layer is not None else None
        if cached_outputs.shape[0] == 0 or states.shape[0] % cached_outputs.shape[0]:
            return None
        if layer is None and cache is not None:
            projections = (key_linear, value_linear)
            layer = EncoderOutputsLayer(
                cached_outputs, projections, self._get_head_dim(), count_beams(states, cached_outputs)
            )
            if not try_store_layer(cache, self.layer_idx, layer):
                return None
        return cached_outputs

    def _should_absorb_projections(self, states: torch.Tensor, encoder_outputs: torch.Tensor) -> bool:
        """Return whether attending to encoder outputs needs no more multiplications than computing keys and values."""
        if is_traced():
            return True
        rows, (sentences, length, width) = states.shape[0] * states.shape[1], encoder_outputs.shape
        inner_dim, head_dim = self.key_value_projections()[0].out_features, self._get_head_dim()
        absorbed_flops = 2 * rows * (inner_dim // head_dim) * width * (head_dim + length)
        return absorbed_flops <= 2 * length * inner_dim * (sentences * width + rows)

    def _attend_absorbed(
        self, query: torch.Tensor, encoder_outputs: torch.Tensor, mask: torch.Tensor | None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from queries [b B, h, n, d] to encoder outputs [b, m, D], which serve as a single key and value head.

        The bias of the key projection is omitted because it adds the same constant to all logits of a query. The bias
        of the value projection is multiplied by the sum of the attention weights, which is 0 for a query whose keys
        are all masked, and otherwise 1.
        """
        (key_linear, value_linear), head_dim = self.key_value_projections(), self._get_head_dim()
        latent = encoder_outputs[:, None]
        absorbed_query = matmul_per_head(query, key_linear.weight, head_dim)
        output, weights = self._attend(absorbed_query, latent, latent, mask, **options)
        output = matmul_per_head(output.transpose(1, 2), value_linear.weight, head_dim, transposed=True)
        output = output.transpose(1, 2)
        if value_linear.bias is not None:
            bias = value_linear.bias.view(-1, head_dim)
            if mask is not None and mask.dtype == torch.bool:
                has_keys = mask.any(-1).transpose(1, 2)[..., None]  # [b or 1, n or 1, 1, 1]
                if has_keys.shape[0] > 1:
                    has_keys = repeat_for_beams(has_keys, output.shape[0])
                bias = has_keys * bias
            output = output + bias
        return output, weights

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        position_bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attention outputs and, for eager attention, the attention weights."""
        options: dict[str, Any] = {"scaling": self.scaling, "dropout": self.dropout if self.training else 0.0}
        is_eager = self.config._attn_implementation_internal == "eager"
        # On CPUs, the fused kernel uses one thread per sentence and key head.
        is_on_cpu = key.device.type == "cpu" and not is_traced()
        if is_eager or (key is value and is_on_cpu and key.shape[0] < torch.get_num_threads()):
            output, weights = attention_with_weights(query, key, value, mask, position_bias, **options)
            return output, weights if is_eager else None
        return fused_attention(query, key, value, mask, position_bias, **options), None

    def _get_keys_and_values(
        self, encoder_outputs: torch.Tensor, cache: Any, layer: Any, cached_encoder_outputs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values, which are read from the cache or computed from the encoder outputs."""
        if cached_encoder_outputs is not None:  # the cache stores the encoder outputs instead of these keys and values
            return compute_keys_and_values(cached_encoder_outputs, self.key_value_projections(), self._get_head_dim())
        if layer is not None:
            return layer.keys, layer.values
        key, value = compute_keys_and_values(encoder_outputs, self.key_value_projections(), self._get_head_dim())
        if cache is not None:
            key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
            cache.is_updated[self.layer_idx] = True
        return key, value

    def _repeat_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for the original `forward`, with the encoder outputs repeated for each beam."""
        states, encoder_outputs, _, mask, *_ = self.arguments.read(args, kwargs)
        if len(encoder_outputs) != len(states):
            encoder_outputs = repeat_for_beams(encoder_outputs, len(states))
        changes = {"encoder_outputs": encoder_outputs}
        if not _is_mask_broadcastable(mask, states):
            changes["mask"] = repeat_for_beams(mask, states.shape[0])
        return self.arguments.to_keywords(args, kwargs, **changes)

    def _convert_mask(self, mask: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor | None:
        """Reduce a mask with identical query rows to a single row, and make it finite if the layout requires it."""
        if mask is None:
            return None
        if mask.dim() == 4 and mask.shape[2] > 1 and mask.stride(2) == 0:
            mask = mask[:, :, :1]
        if mask.dtype == torch.bool and self.layout.has_finite_masks:
            return torch.zeros_like(mask, dtype=states.dtype).masked_fill(~mask, torch.finfo(states.dtype).min)
        return mask

    def _compute_queries(self, states: torch.Tensor) -> torch.Tensor:
        """Compute the queries [b B, h, n, d]."""
        return self._get_linear("query")(states).unflatten(-1, (-1, self._get_head_dim())).transpose(1, 2)

    def _get_linear(self, role: str) -> Any:
        """Return the linear layer for a role ("query", "key", "value" or "output")."""
        return getattr(self, getattr(self.layout, role))

    def key_value_projections(self) -> tuple[Any, Any]:
        """Return the key and value projections, whose weights are applied to the encoder outputs."""
        return self._get_linear("key"), self._get_linear("value")

    def _get_head_dim(self) -> int:
        return getattr(self, self.layout.head_dim)

    def _uses_supported_implementation(self) -> bool:
        # The private field is read because the public property takes microseconds for each layer in each step.
        return self.config._attn_implementation_internal in SUPPORTED_IMPLEMENTATIONS

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickles refer to the original class because the sharing class is created at run time.
        return _make_empty_instance, (self.original_class, self.cross_cache), vars(self)


def _is_mask_broadcastable(mask: Any, states: torch.Tensor) -> bool:
    """Return whether a mask is missing, has a single batch row, or has as many batch rows as the hidden states."""
    return not isinstance(mask, torch.Tensor) or mask.shape[0] in (1, states.shape[0])


@functools.cache
def make_cache_sharing_class(base_class: type, cross_cache: str) -> type:
    """Create the class that replaces a Transformers cross-attention class. It has the same name.

    Args:
        base_class: A class in `LAYOUTS_BY_CLASS`, or a subclass with the same `forward`.
        cross_cache: `KEYS_AND_VALUES` or `ENCODER_OUTPUTS`.

    Raises:
        TransformersChangedError: If `forward` has unknown arguments or return values.
    """
    layout: Any = get_cross_attention_layout(base_class)
    arguments = MethodSignature(get_forward_owner(base_class), layout.roles, returns=layout.returns)
    attributes = {"original_class": base_class, "layout": layout, "arguments": arguments, "cross_cache": cross_cache}
    attributes |= {"__module__": base_class.__module__, "__qualname__": base_class.__qualname__}
    return type(base_class.__name__, (SharedMemoryMixin, base_class), attributes)


def _make_empty_instance(base_class: type, cross_cache: str) -> Any:
    cls: Any = make_cache_sharing_class(base_class, cross_cache)
    return cls.__new__(cls)


with guarded_imports():
    from transformers.cache_utils import DynamicLayer

check_cache_internals()


class EncoderOutputsLayer(BeamSharedDynamicLayer):
    """A cache layer that stores the encoder outputs [b, m, D] and computes keys and values when they are first read.

    After that, it is an ordinary cache layer. Keys and values are only read by code outside of this module, such as
    the code that collects the outputs of Whisper. The encoder outputs are never modified, because other layers and
    callers use the same tensor.

    Args:
        encoder_outputs: The encoder outputs.
        projections: The key and value projections.
        head_dim: The head size d.
        beams: The number of decoder rows per row of the encoder outputs.
    """

    def __init__(
        self, encoder_outputs: torch.Tensor, projections: tuple[nn.Module, nn.Module], head_dim: int, beams: int
    ) -> None:
        self.encoder_outputs: torch.Tensor | None = encoder_outputs
        self.projections: Any = projections
        self.head_dim, self.beams = head_dim, beams
        self.is_initialized = True
        self.dtype, self.device = encoder_outputs.dtype, encoder_outputs.device
        self._keys: Any = None
        self._values: Any = None

    @property
    def keys(self) -> Any:
        """The keys [b, h, m, d], computed when they are first read."""
        self._compute_keys_and_values()
        return self._keys

    @keys.setter
    def keys(self, states: Any) -> None:
        self._keys = states

    @property
    def values(self) -> Any:
        """The values [b, h, m, d], computed when they are first read."""
        self._compute_keys_and_values()
        return self._values

    @values.setter
    def values(self, states: Any) -> None:
        self._values = states

    def _compute_keys_and_values(self) -> None:
        """Replace the encoder outputs, if they are still stored, with keys and values."""
        if self.encoder_outputs is not None:
            encoder_outputs, self.encoder_outputs = self.encoder_outputs, None
            with torch.no_grad():  # the layer is only created if gradients are not recorded
                states: Any = compute_keys_and_values(encoder_outputs, self.projections, self.head_dim)
            self._keys, self._values = states
            self.projections = None

    def _num_rows(self) -> int:
        return super()._num_rows() if self.encoder_outputs is None else self.encoder_outputs.shape[0]

    def _apply_to_tensors(self, fn: Any) -> None:
        if self.encoder_outputs is None:
            super()._apply_to_tensors(fn)
        else:
            self.encoder_outputs = fn(self.encoder_outputs)

    def get_seq_length(self) -> int:
        """Return the number of encoder positions m."""
        return super().get_seq_length() if self.encoder_outputs is None else self.encoder_outputs.shape[1]

    def reset(self) -> None:
        """Remove all tensors, unlike Transformers before 5.23, which overwrites them with zeros."""
        self.encoder_outputs = self.projections = self._keys = self._values = None
        self.is_initialized, self.beams = False, 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times."""
        if self._num_rows():
            self._apply_to_tensors(lambda states: states.repeat_interleave(repeats, dim=0))

    def __reduce__(self) -> Any:
        # Copies and pickles contain keys and values, so that they do not contain model weights.
        if self.keys is None:
            return BeamSharedDynamicLayer, ()
        return _make_shared_layer, (self.keys, self.values, self.beams)


def _make_shared_layer(keys: torch.Tensor, values: torch.Tensor, num_beams: int) -> BeamSharedDynamicLayer:
    """Create a cache layer with keys and values that beams share."""
    layer = BeamSharedDynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values, layer.beams = keys, values, num_beams
    return layer


def holds_encoder_outputs(layer: Any) -> bool:
    """Return whether a cache layer still stores encoder outputs instead of keys and values."""
    return type(layer) is EncoderOutputsLayer and layer.encoder_outputs is not None


def try_store_layer(cache: Any, index: int, layer: EncoderOutputsLayer) -> bool:
    """Store a cache layer with encoder outputs in an encoder-decoder cache, if the cache supports it.

    Args:
        cache: The cache.
        index: The index of the layer.
        layer: The cache layer with the encoder outputs.

    Returns:
        True if the layer was stored. Static caches, offloaded caches and other types of layers are left unchanged.
    """
    cross_attention_cache = cache.cross_attention_cache
    if (
        getattr(cross_attention_cache, "offloading", False)
        or type(get_empty_layer(cross_attention_cache, index)) is not DynamicLayer
    ):
        return False
    cross_attention_cache.layers[index] = layer
    cache.is_updated[index] = True
    return True
