"""The mixin that turns Transformers attention classes into variants.

The symbols for tensor sizes are defined in `softmax_attention`.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..fields.composition import check_implementation
from ..mechanisms.patterns.window_pattern import check_global_mask
from ..mechanisms.talking_heads import get_projection_shapes, get_projection_std
from ..ops.variant_attention import AttentionHeads, VariantAttention, get_attn_implementation, should_return_weights
from ..transformers_internals import (
    MethodArguments,
    check_attention_function,
    check_attributes,
    get_transformers_class,
    guarded_imports,
)
from ..variant_names import EAGER, SDPA
from .attention_interface import get_attention_function
from .decoder_caches import prepare_cache
from .latent_attention import attend_to_latent, compute_keys_and_values, get_shared_latent
from .shared_rows import store_num_beams

with guarded_imports():
    from transformers import initialization as init
    from transformers.cache_utils import EncoderDecoderCache

__all__ = ["AttentionVariantMixin"]


# At runtime, this mixin is combined with a Transformers class. Only type checkers see it as a module.
if TYPE_CHECKING:
    _Attention = VariantAttention
else:
    _Attention = object


class AttentionVariantMixin(_Attention):
    """A mixin that adds the attention variants to a Transformers attention class.

    It must precede the Transformers class in the list of base classes.

    Class attributes:
        roles: the arguments of the original `forward` that the variant uses (see `ARGUMENT_ROLES`).
        returns: the number of values that `forward` returns.
        transformers_attributes: the attributes of the original module that the variant uses, except the linear layers.
        arguments: the arguments of the original `forward`, by role. They are set for each subclass.
    """

    roles: tuple[str, ...] = ()
    returns = 2
    transformers_attributes: tuple[str, ...] = ()
    arguments: MethodArguments

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, nn.Module):
            owner = get_transformers_class(cls, AttentionVariantMixin)
            check_attention_function(owner)
            cls.arguments = MethodArguments(owner, cls.roles, returns=cls.returns)

    def install_variant(self, config: Any, heads: AttentionHeads, query_dim: int, key_input_dim: int) -> None:
        """Store the head counts and add the talking-heads parameters, which the model initializes later.

        Args:
            config: the model configuration.
            heads: the head counts, latent rank and talking-heads settings of the attention module.
            query_dim: the input size of the query projection.
            key_input_dim: the size of the key-side inputs that are passed to the attention module.
        """
        check_attributes(self, ("config", *self.transformers_attributes))
        self.heads = heads
        self.num_key_value_groups = heads.query // heads.key
        # Transformers assumes that value heads are as wide as key heads.
        self.owns_projections = heads.rank is not None or heads.value_dim != heads.head_dim
        like = next(self.parameters())
        shapes = get_projection_shapes(heads, query_dim, key_input_dim) if heads.talking is not None else {}
        self.projection_names = tuple(shapes)
        self.dynamic_names = heads.dynamic
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device)))
        if shapes:
            # Transformers has already initialized this module, but without the new parameters.
            self._is_hf_initialized = False
        self.resolve_attn_implementation()

    def resolve_attn_implementation(self) -> None:
        """Check the attention implementation that the configuration selects, and store it in the module.

        `prepare_variant_inputs` only repeats this check if the implementation in the configuration has changed.

        Raises:
            ValueError: if the implementation does not support the module's mechanisms.
        """
        implementation = get_attn_implementation(self)
        check_implementation(self.config, implementation)
        self.implementation, self.is_own = implementation, implementation in (EAGER, SDPA)

    def extra_repr(self) -> str:
        """Describe the module's heads and mechanisms for printing."""
        heads, pattern = self.heads, getattr(self.key_range, "kind", self.key_range)
        shown: dict[str, Any] = {"heads": heads.query, "key_value_heads": heads.key, "kv_lora_rank": heads.rank}
        shown |= {"talking_heads": heads.talking, "kernel": getattr(self.kernel, "name", None)}
        shown |= {"pattern": getattr(pattern, "name", pattern), "score": self.score, "compression": self.compression}
        return ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)

    def init_projections(self) -> None:
        """Initialize the talking-heads parameters according to `talking_heads_init`."""
        for name in self.projection_names:
            parameter = getattr(self, name)
            std = get_projection_std(name, parameter.shape, self.heads.talking_init)
            if std is None:
                init.copy_(parameter, torch.eye(*parameter.shape, dtype=parameter.dtype, device=parameter.device))
            else:
                init.normal_(parameter, mean=0.0, std=std)

    def prepare_variant_inputs(
        self, states: torch.Tensor, encoder_outputs: torch.Tensor | None, cache: Any, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Check the inputs of a call and return additional keyword arguments for the attention function.

        Args:
            states: the query-side inputs x [b, n, query size].
            encoder_outputs: the key-side inputs [b, m, key input size], or None for self-attention, which uses
                `states`.
            cache: the cache that this call reads and writes, if any.
            kwargs: the remaining arguments of the call.

        Returns:
            A dictionary that contains the input-dependent terms of P_l and P_w [b, n or m, heads in, heads out], or
            the cache for kernel states. It is empty if the attention function needs neither.

        Raises:
            ValueError: if the attention implementation or the cache does not support the variant.
        """
        if get_attn_implementation(self) != self.implementation:
            self.resolve_attn_implementation()
        if not self.is_own and should_return_weights(self, kwargs):
            raise ValueError(
                '`attn_implementation` must be "sdpa" or "eager" with `output_attentions=True`, got '
                f'"{self.implementation}". Other implementations do not return attention weights.'
            )
        if cache is not None:
            prepare_cache(self, cache, encoder_outputs)
            if encoder_outputs is not None and self.heads.rank is None:
                store_num_beams(cache, self.layer_idx, states, encoder_outputs)
        if self.key_range is not None:
            check_global_mask(self, states, kwargs)
        if self.kernel is not None and cache is not None:
            name = "self_attention_cache" if encoder_outputs is None else "cross_attention_cache"
            return {"kernel_cache": getattr(cache, name, cache)}
        if not self.dynamic_names:
            return {}
        inputs = {"x": states, "m": states if encoder_outputs is None else encoder_outputs}
        return {
            name: torch.einsum("bld,dij->blij", inputs[name[0]], getattr(self, f"{name}_proj"))
            for name in self.dynamic_names
        }

    def attend_with_projections(
        self,
        linears: tuple[nn.Linear, nn.Linear, nn.Linear],
        states: torch.Tensor,
        mask: torch.Tensor | None,
        dropout: float,
        encoder_outputs: torch.Tensor | None = None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the outputs of all heads [b, n, h_v d_v], and the weights if they are requested.

        This method replaces the original `forward` if `owns_projections` is True, which means that there is a latent
        or that value heads and key heads have different sizes.

        Args:
            linears: the linear layers that compute the queries, keys and values.
            mask: see `attention_with_weights`.
            dropout: the dropout probability during training.
            states, encoder_outputs, cache: see `get_latent` and `get_keys_and_values`.
            options: additional arguments of the attention function.
        """
        query_linear, key_linear, value_linear = linears
        query = query_linear(states).unflatten(-1, (-1, self.heads.head_dim)).transpose(1, 2)  # [b, h_k, n, d]
        options |= {"dropout": dropout if self.training else 0.0, "scaling": self.scaling}
        if self.heads.rank is None:
            key, value = self.get_keys_and_values((key_linear, value_linear), states, encoder_outputs, cache)
            output, weights = get_attention_function(self.implementation)(self, query, key, value, mask, **options)
        else:
            latent, layer = self.get_latent(states, encoder_outputs, cache)
            output, weights = attend_to_latent(self, query, latent, mask, (key_linear, value_linear), layer, **options)
        return output.flatten(2), weights

    def get_keys_and_values(
        self,
        linears: tuple[nn.Module, nn.Module],
        states: torch.Tensor,
        encoder_outputs: torch.Tensor | None,
        cache: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys [b, k, m, d] and values [b, k, m, d_v], starting with those in the cache.

        Args:
            linears: the linear layers that compute the keys and values.
            states: the inputs of self-attention [b, n, D].
            encoder_outputs: the key-side inputs of cross-attention, or None for self-attention. Their keys and values
                are only computed once.
            cache: the cache that this call reads and writes, if any.
        """
        is_cross_attention = encoder_outputs is not None
        seen: dict[int, bool] = {}
        if isinstance(cache, EncoderDecoderCache):
            seen = cache.is_updated if is_cross_attention else seen
            cache = cache.cross_attention_cache if is_cross_attention else cache.self_attention_cache
        if seen and seen.get(self.layer_idx):
            # The encoder outputs do not change between decoding steps.
            return cache.layers[self.layer_idx].keys, cache.layers[self.layer_idx].values
        encoder_outputs = states if encoder_outputs is None else encoder_outputs
        key, value = compute_keys_and_values(encoder_outputs, linears, self.heads.head_dim, self.heads.value_dim)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
            seen[self.layer_idx] = True
        return key, value

    def get_latent(
        self, states: torch.Tensor, encoder_outputs: torch.Tensor | None, cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """Return the latent c [b, 1, m, r] and, in cross-attention, the cache layer that stores it.

        Args:
            states: the inputs of self-attention [b, n, D].
            encoder_outputs: the latent that `CrossLatentMixin` has computed from the encoder outputs, or None for
                self-attention.
            cache: the cache that this call reads and writes, if any.
        """
        if encoder_outputs is not None:
            return get_shared_latent(cache, encoder_outputs, self.layer_idx, states)
        return self.compute_own_latent(states, cache), None

    def compute_own_latent(self, states: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the self-attention latent c [b, 1, m, r], which consists of the cached latent and that of `states`.

        The cache stores c as its keys, and its values have size 0.

        Raises:
            ValueError: if the cache contains anything other than latents, such as the keys and values of a PEFT
                prefix.
        """
        latent = self.kv_a_proj(states) if hasattr(self, "kv_a_proj") else states
        latent = latent[:, None]
        if cache is None:
            return latent
        cache = getattr(cache, "self_attention_cache", cache)
        past = cache.layers[self.layer_idx].keys if self.layer_idx < len(cache.layers) else None
        if past is not None and past.shape[1::2] != latent.shape[1::2]:
            raise ValueError(
                f"The cache must have latents of dimension {latent.shape[-1]} (`kv_lora_rank`), got "
                f"{past.shape[1]} heads of size {past.shape[-1]}. Use a cache that was created by this model."
            )
        return cache.update(latent, latent[..., :0], self.layer_idx)[0]
