"""How many tokens and FLOPs a run's batches cost: tokens per second and, with a device's peak, MFU.

Model FLOPs utilisation (arXiv:2204.02311, appendix B) is the share of the peak that goes into the model's own
arithmetic: a forward pass and twice that for the gradients; padding, recomputed activations and a teacher do not
count. Letters: b examples, n tokens of an example, t target tokens of a decoder.
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ...modeling.attention.variant_mixins import AttnVariantModelMixin
from ...registration import variant_model_class

__all__ = ["TrainingCost", "utilization"]


class TrainingCost:
    """Counts the tokens and the training FLOPs of batches.

    Args:
        model: the model that is trained, not wrapped; one that is no architecture here has tokens and no FLOPs.
        head_of_items: whether what follows the base model is given the counted items of a batch alone (masked
            tokens), and not all tokens.
    """

    def __init__(self, model: nn.Module, head_of_items: bool = False):
        config = getattr(model, "config", None)
        self.is_encoder_decoder = bool(getattr(config, "is_encoder_decoder", False))
        self.stacks = _coefficients(model, config)
        # The gradient of activations costs a forward pass, that of weights another one where they are trained. A
        # frozen head counts as if the gradient went through it.
        self.passes = 2 + _trained_share(model, config)
        self.head = sum(2 * each.weight.numel() for each in _head(model)) if head_of_items and self.stacks else 0
        if self.head:
            stack = next(iter(self.stacks))  # a masked-LM model has one
            per_token, per_attended = self.stacks[stack]
            self.stacks[stack] = per_token - self.head, per_attended

    def count(self, batch: dict[str, Tensor], items: int) -> tuple[int, int]:
        """Return the tokens of a batch, without padding, and the FLOPs of training on it.

        It has "input_ids" or "attention_mask" [b, n], or [b, c, n] of c choices; and "labels" [b, t] of a decoder,
        negative at padding.
        """
        lengths = _lengths(batch)
        if not lengths:
            return 0, 0
        labels = batch.get("labels")
        own_targets = self.is_encoder_decoder and labels is not None and labels.ndim == 2
        targets = (labels >= 0).sum(-1).tolist() if own_targets and labels is not None else lengths
        tokens = sum(lengths) + (sum(targets) if own_targets else 0)
        flops = self.head * items
        for n, t in zip(lengths, targets, strict=True):
            for stack, (per_token, (own, source)) in self.stacks.items():
                length = n if stack == "encoder" else t
                flops += length * (per_token + own * length + source * n)
        return tokens, round(self.passes * flops)


def _coefficients(model: nn.Module, config: Any) -> dict[str, tuple[int, tuple[int, int]]]:
    """Return of each stack the FLOPs a token, and those for each token attended to, its own and the source's."""
    from ...inspection.costs import variant_config
    from ...inspection.counting import flops_per_token

    if config is None:
        return {}
    try:
        with torch.device("meta"):
            twin = _variant_class(model)(variant_config(config.to_dict()))
    except ValueError:
        return {}
    none, own, source = (flops_per_token(twin, *lengths) for lengths in ((0, 0), (1, 0), (0, 1)))
    return {stack: (none[stack], (own[stack] - none[stack], source[stack] - none[stack])) for stack in none}


def _head(model: Any) -> list[nn.Linear]:
    """Return the linear maps behind the base model that read each token."""
    from ...inspection.counting import runs_once_a_sequence

    base = {id(each) for each in model.base_model.modules()}
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    return [each for name, each in found if id(each) not in base and not runs_once_a_sequence(model, name)]


def _variant_class(model: nn.Module) -> type[AttnVariantModelMixin]:
    """Return our class for a model of ours or of upstream's; raise ValueError where there is none."""
    # FSDP2 makes a class of this prefix for a model it shards.
    return variant_model_class(type(model).__name__.removeprefix("FSDP"))


def _trained_share(model: nn.Module, config: Any) -> float:
    """Return the share of a pass through the model's matrices that goes through trained ones."""
    try:
        module_runs = _variant_class(model).module_runs
    except ValueError:
        module_runs = AttnVariantModelMixin.module_runs
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    runs = trained = 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            size = module.weight.numel() * (module_runs(config, name.removeprefix(prefix)) if config else 1)
            runs += size
            trained += size if module.weight.requires_grad else 0
    return trained / max(runs, 1)


def _lengths(batch: dict[str, Tensor]) -> list[int]:
    if "attention_mask" in batch:
        return batch["attention_mask"].sum(-1).flatten().tolist()
    ids = batch.get("input_ids")
    return [] if ids is None else [ids.shape[-1]] * len(ids)


def utilization(accelerator: Accelerator, flops: int, seconds: float, peak_tflops: float | None) -> dict[str, float]:
    """Return "train_tflops_per_second" of all processes and, with a device's peak, "train_mfu" and "peak_tflops".

    Return nothing where no FLOPs were counted.
    """
    if not (flops and seconds):
        return {}
    figures = {"train_tflops_per_second": flops / seconds / 1e12}
    if peak_tflops is not None:
        figures["train_mfu"] = figures["train_tflops_per_second"] / (peak_tflops * accelerator.num_processes)
        figures["peak_tflops"] = peak_tflops
    return {name: float(f"{value:.4g}") for name, value in figures.items()}
