"""A linear map whose weight is int8."""

from typing import Any

import torch
from torch import nn

from .int8_products import LARGEST, Int8Weight

__all__ = ["Int8Linear"]


class Int8Linear(nn.Module):
    """y = W x + b with W [out, in] in int8 and a scale a row, inputs rounded at each call (`int8_products.py`).

    It has no parameters and computes no gradients. Of half-precision inputs (autocast) it makes float32 and puts out
    what came in.

    Args:
        linear: the map of float32 that it stands for.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = linear.weight.detach()
        scales = weight.abs().amax(1) / LARGEST
        scales[scales == 0] = 1.0
        self._bias = None if linear.bias is None else linear.bias.detach().clone()
        self._weight = Int8Weight((weight / scales[:, None]).round_().to(torch.int8), scales)
        self.eval()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map [..., in] to [..., out].

        Raises:
            RuntimeError: for inputs that record gradients, or that are not on a CPU.
        """
        if states.requires_grad or not states.is_cpu:
            raise RuntimeError(
                f"{self} computes on a CPU and without gradients; its inputs "
                + ("record gradients." if states.is_cpu else f"are on {states.device}.")
            )
        if states.dtype != torch.float32 or states.dim() < 2:
            made: torch.Tensor = self(states.float().view(-1, self.in_features))
            return made.view(*states.shape[:-1], self.out_features).to(states.dtype)
        return self._weight.product(states, self._bias)

    # Methods, as of torch's own quantized modules: what reads a float weight of a map (T5 asks for its dtype) must not
    # take these for one.
    def weight(self) -> torch.Tensor:
        """Return W [out, in] in float32, as it is computed with."""
        numbers, scales = self._weight.unpacked()
        return numbers * scales[:, None]

    def bias(self) -> torch.Tensor | None:
        """Return b [out]."""
        return self._bias

    def extra_repr(self) -> str:
        """Return what stands in the brackets of its description."""
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype=int8"

    def __getstate__(self) -> dict[str, Any]:
        # Of a copy, or a pickle, which packs anew for its processor.
        return vars(self) | {"_weight": self._weight.unpacked()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._weight = Int8Weight(*state["_weight"])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"], destination[f"{prefix}scales"] = self._weight.unpacked()
        if self._bias is not None:
            destination[f"{prefix}bias"] = self._bias

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        shapes: dict[str, tuple[int, ...]] = {"weight": (self.out_features, self.in_features)}
        shapes["scales"] = (self.out_features,)
        if self._bias is not None:
            shapes["bias"] = (self.out_features,)
        missing_keys += [prefix + name for name in shapes if prefix + name not in state_dict]
        given = {name: state_dict[prefix + name] for name in shapes if prefix + name in state_dict}
        found = {name: tuple(each.shape) for name, each in given.items()}
        if (dtype := getattr(given.get("weight"), "dtype", torch.int8)) != torch.int8:
            error_msgs.append(f"{prefix}weight is {dtype}, and the model's is int8: load before `quantize`.")
        elif found.keys() == shapes.keys() and found != shapes:
            error_msgs.append(f"{prefix}: the model has {shapes}, what is loaded {found}.")
        elif found == shapes:
            self._weight = Int8Weight(given["weight"], given["scales"])
            if self._bias is not None:
                self._bias = given["bias"].detach().clone()
