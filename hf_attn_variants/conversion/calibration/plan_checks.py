"""Whether text or audio can say how a plan's attentions are to be fitted."""

from typing import Any

from ...modeling.fields.kernel_fields import has_kernel
from ...modeling.mechanisms.mechanism import NONE
from ...modeling.mechanisms.patterns.pattern_table import pattern_class, pattern_prefixes
from ...modeling.mechanisms.talking_heads import KIND, talks
from ..calibration_settings import Calibration
from ..plan import ConversionPlan
from .batches import check_targets

__all__ = ["is_calibrated", "why_not_calibrated", "why_source_is_not_fitted"]


def why_source_is_not_fitted(config: Any) -> str | None:
    """Return why nothing can be fitted to what a source of this configuration computes; None where something can."""
    if talks(config):
        names = [name for name in config.talking_fields() if name.endswith(KIND)]
        kind = next(value for name in names if (value := getattr(config, name)) not in (None, NONE))
        what = f"the source has talking heads ({kind!r}), whose do not"
        return f"it fits heads whose weights sum to one; {what}"
    if has_kernel(config):
        return "it fits to a softmax's outputs; the source has a kernel in its place"
    patterns = (getattr(config, f"{prefix}attention_pattern") for prefix in pattern_prefixes(config))
    if learned := [each for each in patterns if each is not None and pattern_class(each).learned]:
        return f"it fits to what reads tokens; the source's pattern {learned[0]!r} also reads what it makes of several"
    return None


def why_not_calibrated(plan: ConversionPlan) -> str | None:
    """Return why no text can say how the plan's source is to be pooled; None where it can."""
    if (reason := why_source_is_not_fitted(plan.source_config)) is not None:
        return reason
    is_encoder_decoder = getattr(plan.config, "is_encoder_decoder", False)
    if not is_encoder_decoder and any(module.site.is_cross_attention for module in plan.reduced):
        return (
            "it cannot reach the cross-attention of a decoder alone: there is no text for the encoder that this reads"
        )
    return None


def is_calibrated(plan: ConversionPlan, calibration: Calibration) -> bool:
    """Return whether a plan has attentions to fit to the text or audio.

    Raises:
        ValueError: where it cannot: for a source with talking heads, or a BERT with cross-attention; or there are only
            talking heads to add.
    """
    if not plan.reduced:
        if any(module.projections for module in plan.modules):
            raise ValueError(
                "a calibration fits fewer key/value heads, a latent or a kernel; talking heads are added without: "
                "leave it out."
            )
        return False
    _check_kind(plan, calibration)
    if (reason := why_not_calibrated(plan)) is not None:
        raise ValueError(f'method {plan.method.name!r} cannot be used here: {reason}. Use method "mean".')
    if not plan.hears:
        check_targets(plan.model_class, plan.config, calibration)
    return True


def _check_kind(plan: ConversionPlan, calibration: Calibration) -> None:
    name = plan.model_class.__name__.removeprefix("AttnVariant")
    if plan.hears and calibration.audio is None:
        raise ValueError(f"{name} reads audio: give the calibration `audio` (--calibration_audio_dir), no texts.")
    if not plan.hears and calibration.audio is not None:
        raise ValueError(f"{name} reads text: give the calibration `texts` (--calibration_file), no audio.")
