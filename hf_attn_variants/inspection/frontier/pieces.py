"""Converted attentions, kept by what they are, and models put together from them.

A calibrated conversion makes each attention (of a shared latent: all that share it) from the source's alone. So the
attentions of one conversion go with those of another in one model, the one that converting both at once would make.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ...conversion.calibration.batches import with_lengths
from ...conversion.calibration.calibrate import calibrate
from ...conversion.calibration.methods import Calibrated
from ...conversion.calibration.source_models import source_in_memory
from ...conversion.calibration_settings import Calibration
from ...conversion.checkpoint.models import ModelReader, assemble
from ...conversion.plan import make_plan, why_source_is_not_fitted
from ...conversion.writing import converted_tensors
from ...modeling.attention.attention_sites import AttentionSite
from ...modeling.attention.variant_mixins import AttnVariantModelMixin

__all__ = ["ConvertedAttentions"]

Tensors = dict[str, torch.Tensor]
# An attention's path with its heads; with those of all layers where these share a latent.
Key = tuple[str, Any]


class ConvertedAttentions:
    """The attentions of a source's conversions, made when they are first asked for."""

    def __init__(self, source: AttnVariantModelMixin, calibration: Calibration, seed: int = 0) -> None:
        """Begin with the source's own.

        Args:
            source: a variant model, in float32.
            calibration: the text or audio that new ones are fitted to, with its tokenizer or feature extractor.
            seed: of everything random in a conversion.

        Raises:
            ValueError: for a source to which nothing can be fitted.
        """
        if (reason := why_source_is_not_fitted(source.config)) is not None:
            raise ValueError(f"a calibration makes the variants, and cannot be used here: {reason}")
        self.source, self.seed = source, seed
        self.calibration = with_lengths(calibration, calibration.processor, source.config)
        self._prefix = "" if source.base_model is source else f"{source.base_model_prefix}."
        self._tensors: dict[Key, Tensors] = {}
        self._errors: dict[Key, float | None] = {}
        # The examples as the source reads them, from the first conversion on: what it writes of them, it writes once.
        self._batches: Any = None
        self._keep(source, {})

    def config(self, fields: Mapping[str, Any]) -> Any:
        """Return the source's configuration with these fields.

        Raises:
            ValueError: if they make none.
        """
        config: Any = self.source.config
        return type(config).from_upstream(config, **fields)

    def model(self, fields: Mapping[str, Any]) -> AttnVariantModelMixin:
        """Return the source as a variant of these fields; parameters that stay share the source's memory.

        Raises:
            ValueError: if there is no conversion to it.
        """
        config = self.config(fields)
        if missing := self._missing(config, fields):
            self._convert(missing)
        tensors = {name: each.detach() for name, each in self.source.named_parameters(remove_duplicate=False)}
        for key, own in self._keys(config):
            for name in self._tensors[own] if key != own else ():
                tensors.pop(f"{self._prefix}{name}", None)  # a shared latent is gone after the first
        for key, own in self._keys(config):
            if key != own:
                tensors |= {f"{self._prefix}{name}": each for name, each in self._tensors[key].items()}
        return assemble(type(self.source), config, tensors, self.source)

    def _convert(self, fields: Mapping[str, Any]) -> None:
        """Keep the attentions of a conversion to these fields, with their errors."""
        reader = ModelReader(self.source)
        config = self.source.config.to_dict() | {"architectures": [type(self.source).__name__]}
        plan = make_plan(config, reader.entries, Calibrated(), fields, self.seed)
        source = source_in_memory(reader, self.source)
        result = calibrate(plan, reader, source, self.calibration, with_source_outputs=False, batches=self._batches)
        fits, self._batches = result.attentions, result.batches or self._batches
        tensors = converted_tensors(plan, reader, fits)
        converted = assemble(plan.model_class, plan.config, tensors, self.source)
        self._keep(converted, {path: fit.details.get("output_relative_error") for path, fit in fits.items()})

    def attention_error(self, fields: Mapping[str, Any]) -> float | None:
        """Return the mean relative error of the outputs of the attentions that `model` changed, on held-out text."""
        errors = [self._errors.get(key) for key, own in self._keys(self.config(fields)) if key != own]
        known = [error for error in errors if error is not None]
        if len(known) < len(errors):
            return None
        return sum(known) / len(known) if known else 0.0

    def is_at_hand(self, fields: Mapping[str, Any]) -> bool:
        """Say whether `model` takes no conversion any more."""
        return not self._missing(self.config(fields), fields)

    def _missing(self, config: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields whose attentions are not there."""
        absent = {path for (path, _), _ in self._keys_not_kept(config)}
        sites = [site for site, path, _ in self.source.named_attentions() if path in absent]
        names = {name for site in sites for name in (site.kv_heads_field, site.rank_field)}
        missing = {name: value for name, value in fields.items() if name in names}
        by_layer = {name: v for name, v in (fields.get("per_layer_values") or {}).items() if name in names}
        return missing | ({"per_layer_values": by_layer} if by_layer else {})

    def _keys_not_kept(self, config: Any) -> list[tuple[Key, Key]]:
        return [(key, own) for key, own in self._keys(config) if key not in self._tensors]

    def _keys(self, config: Any) -> list[tuple[Key, Key]]:
        """Return each attention's key in a model of this configuration, and in the source."""
        attentions = [(site, path) for site, path, _ in self.source.named_attentions()]
        return [
            (self._key(config, site, path), self._key(self.source.config, site, path)) for site, path in attentions
        ]

    def _key(self, config: Any, site: AttentionSite, path: str) -> Key:
        def heads(path: str) -> Any:
            counts = site.heads(config, path)
            # The input itself takes no other tensors than none.
            return counts._replace(rank=None) if counts.rank == config.hidden_size else counts

        if not site.shares_latent or heads(path).rank is None:
            return path, heads(path)
        return path, tuple(heads(each) for other, each, _ in self.source.named_attentions() if other is site)

    def _keep(self, model: AttnVariantModelMixin, errors: Mapping[str, float | None]) -> None:
        parameters = {name: each.detach() for name, each in model.base_model.named_parameters(remove_duplicate=False)}
        for site, path, _ in model.named_attentions():
            key, shared = self._key(model.config, site, path), f"{site.latent_path(path)}.weight"
            if key not in self._tensors:
                belongs = {name: each for name, each in parameters.items() if name.startswith(f"{path}.")}
                belongs |= {shared: parameters[shared]} if shared in parameters else {}
                self._tensors[key], self._errors[key] = belongs, errors.get(path)
