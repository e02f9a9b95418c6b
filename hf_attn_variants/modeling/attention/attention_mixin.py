"""The mixin that turns Transformers attention classes into variants.

The symbols for tensor sizes are defined in `softmax_attention`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..fields.composition import check_implementation
from ..mechanisms.patterns.window_pattern import check_global_mask
from ..mechanisms.talking_heads import get_talking_heads_init_std, get_talking_heads_parameter_shapes
from ..ops.variant_attention import AttentionHeads, get_attn_implementation, should_return_weights
from ..transformers_internals import (
    MethodSignature,
    check_attention_function,
    check_attributes,
    get_transformers_class,
    guarded_imports,
)
from .attention_interface import ATTENTION_FUNCTIONS
from .decoder_caches import prepare_cache
from .latent_attention import attend_with_projections

with guarded_imports():
    from transformers import initialization as init

__all__ = ["AttentionVariantMixin"]


_Attention: Any = object  # the type of the Transformers class with which the mixin is combined


class AttentionVariantMixin(_Attention):
    """A mixin that adds the attention variants to a Transformers attention class.

    It must precede the Transformers class in the list of base classes.

    Class attributes:
        roles: the arguments of the original `forward` that the variant uses (see `ARGUMENT_ROLES`). The order of
            "states", "mask", "cache" and "encoder_outputs" is fixed, and the last ones may be missing.
        linears: the names of the linear layers that compute the queries, keys and values.
        dropout_name: the name of the dropout probability or module.
        returns: the number of values that `forward` returns.
        transformers_attributes: the attributes of the original module that the variant uses, except the linear layers.
        arguments: the arguments of the original `forward`, by role. They are set for each subclass.
    """

    roles: tuple[str, ...] = ("states", "mask", "cache", "encoder_outputs")
    linears = ("query", "key", "value")
    dropout_name = "dropout"
    returns = 2
    transformers_attributes: tuple[str, ...] = ()
    arguments: MethodSignature

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if issubclass(cls, nn.Module):
            owner = get_transformers_class(cls, AttentionVariantMixin)
            check_attention_function(owner)
            cls.arguments = MethodSignature(owner, cls.roles, returns=cls.returns)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute self-attention over hidden states [b, n, D], or cross-attention from them to encoder outputs.

        The arguments are the same as in the Transformers class.
        """
        states, mask, cache, encoder_outputs = (*self.arguments.read(args, kwargs), None, None)[:4]
        dynamic = self.prepare_attention_kwargs(states, encoder_outputs, cache, kwargs)
        if not self.owns_projections:
            return super().forward(*args, **kwargs, **dynamic)
        _, other_arguments = self.arguments.split(args, kwargs)
        output, weights = attend_with_projections(
            self, states, mask, cache, encoder_outputs, other_arguments | dynamic
        )
        return self.compute_output(output, states), weights

    def compute_output(self, head_outputs: Tensor, states: Tensor) -> Tensor:
        """Compute the module's output from the head outputs [b, n, h_v d_v]. By default, return them unchanged."""
        return head_outputs

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
        self.extensions: dict[str, tuple[str, ...]] = {}
        like = next(self.parameters())
        shapes = (
            get_talking_heads_parameter_shapes(heads, query_dim, key_input_dim) if heads.talking is not None else {}
        )
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

        `prepare_attention_kwargs` only repeats this check if the implementation in the configuration has changed.

        Raises:
            ValueError: if the implementation does not support the module's mechanisms.
        """
        implementation = get_attn_implementation(self)
        check_implementation(self.config, implementation)
        self.implementation, self.is_own = implementation, implementation in ATTENTION_FUNCTIONS

    def extra_repr(self) -> str:
        """Describe the module's heads and mechanisms for printing."""
        heads, pattern = self.heads, getattr(self.key_range, "kind", self.key_range)
        description: dict[str, Any] = {"heads": heads.query, "key_value_heads": heads.key, "kv_lora_rank": heads.rank}
        description |= {"talking_heads": heads.talking, "kernel": getattr(self.kernel, "name", None)}
        description |= {
            "pattern": getattr(pattern, "name", pattern),
            "score": self.score,
            "compression": self.compression,
        }
        return ", ".join(f"{name}={value}" for name, value in description.items() if value is not None)

    def init_variant_parameters(self) -> None:
        """Initialize the talking-heads parameters according to `talking_heads_init`."""
        for name in self.projection_names:
            parameter = getattr(self, name)
            std = get_talking_heads_init_std(name, parameter.shape, self.heads.talking_init)
            if std is None:
                init.copy_(parameter, torch.eye(*parameter.shape, dtype=parameter.dtype, device=parameter.device))
            else:
                init.normal_(parameter, mean=0.0, std=std)

    def prepare_attention_kwargs(
        self, states: Tensor, encoder_outputs: Tensor | None, cache: Any, kwargs: dict[str, Any]
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
