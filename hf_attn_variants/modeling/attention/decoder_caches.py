"""Cache checks and cache layers for variant attention."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops.key_ranges import MAX_SIZE
from ..ops.variant_attention import VariantAttention
from ..transformers_internals import check_cache_internals, guarded_imports

with guarded_imports():
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

__all__ = ["KernelStateLayer", "limit_cache_to_window", "prepare_cache"]

check_cache_internals()


class KernelStateLayer(DynamicLayer):
    """A dynamic cache layer that stores the constant-size state of causal linear attention."""

    is_croppable = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._state: Any = None
        self.tokens_seen = 0

    @property
    def state(self) -> Any:
        """The state returned by `AttentionKernel.attend` (a named tuple), or None if no tokens have been seen."""
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        self._state = state
        # Whisper's `generate` splits and joins the keys and values of all layers in order to return them. No attention
        # module in this package uses them.
        self.keys = None if state is None else state[0]
        self.values = None if state is None else state[0][..., :0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and return their keys and values, which the attention module adds to the state."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.tokens_seen += key_states.shape[-2]
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the number of tokens seen so far."""
        return self.tokens_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a mask covers (all past and new tokens) and the position of the first key."""
        return self.tokens_seen + query_length, 0

    def reset(self) -> None:
        """Remove all tokens."""
        self.state, self.tokens_seen = None, 0

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raise an error, because tokens cannot be removed from sums over tokens.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "`crop` is not supported by a cache with `attention_kernel`. The cache stores sums over all "
            "tokens, from which no token can be removed."
        )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows for beam search."""
        self._apply_to_state(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self._apply_to_state(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the selected rows."""
        self._apply_to_state(lambda tensor: tensor[indices])

    def _apply_to_state(self, fn: Callable[[Tensor], Tensor]) -> None:
        if self.state is not None:
            changed = (None if tensor is None else fn(tensor) for tensor in self.state)
            self.state = type(self.state)._make(changed)


def prepare_cache(module: VariantAttention, cache: Any, encoder_outputs: Tensor | None) -> None:
    """Check that a variant attention module supports a cache, and prepare its cache layer.

    Args:
        module: the attention module.
        cache: the cache that is passed to the module.
        encoder_outputs: the encoder outputs [b, m, size], or None for self-attention.

    Raises:
        ValueError: if the module does not support a cache, if it requires a dynamic cache but the cache is static, or
            if it uses linear attention but the cache contains keys and values. Windows, linear attention, and
            different numbers of key and value heads require a dynamic cache.
    """
    heads, is_static = module.heads, getattr(cache, "is_compileable", False)
    has_window = encoder_outputs is None and module.key_range is not None
    if is_static and (has_window or module.kernel is not None or (heads.rank is None and heads.key != heads.value)):
        raise ValueError(
            "The cache must be dynamic with `attention_pattern`, with `attention_kernel`, or if `num_value_heads` "
            f"differs from the number of key heads, got {type(cache).__name__}. Use a `DynamicCache`."
        )
    if not module.supports_cache:
        name = "talking_heads_dynamic" if encoder_outputs is None else "cross_talking_heads_dynamic"
        raise ValueError(
            f"`use_cache` must be False with the terms m2l and m2w of `{name}`. These terms need the inputs of past "
            "tokens, which a cache does not store."
        )
    if encoder_outputs is not None:
        return
    if module.kernel is not None:
        _prepare_state_layer(cache, module.layer_idx)
    if has_window:
        limit_cache_to_window(module, cache)


def _prepare_state_layer(cache: Any, layer: int) -> None:
    layers = ensure_cache_layers(cache, layer)
    if type(layers[layer]) is DynamicLayer and not layers[layer].is_initialized:
        layers[layer] = KernelStateLayer()
    if not isinstance(layers[layer], KernelStateLayer):
        raise ValueError(
            "The cache must be dynamic and empty with `attention_kernel`, got a "
            f"{type(layers[layer]).__name__} layer. Linear attention stores sums instead of keys and "
            "values."
        )


def limit_cache_to_window(module: VariantAttention, cache: Any) -> None:
    """Limit an empty self-attention cache layer to the keys in the next token's window.

    Cross-attention layers are not changed. The Transformers field `sliding_window` would shorten them as well.
    """
    key_range, layer = module.key_range, module.layer_idx
    if module.kernel is not None or key_range is None or key_range.before >= MAX_SIZE:
        return
    layers = ensure_cache_layers(cache, layer)
    if type(layers[layer]) is DynamicLayer and not layers[layer].is_initialized:
        layers[layer] = DynamicSlidingWindowLayer(key_range.before + 1)


def ensure_cache_layers(cache: Any, layer: int) -> list[Any]:
    """Return the self-attention layers of a cache, after adding missing layers up to the given index."""
    layers = getattr(cache, "self_attention_cache", cache).layers
    while len(layers) <= layer:
        layers.append(DynamicLayer())
    return layers
