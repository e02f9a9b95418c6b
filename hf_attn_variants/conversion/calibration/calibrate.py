"""Calibration: text through the source model, and new heads fitted to what its attentions make of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...progress import is_watched, progress_bar
from ..grouping import HeadCounts
from ..methods.base import AttentionTensors, CalibratedMethod, LayerContext
from ..methods.mean import MeanPooling
from ..plan import AttentionModule, ConversionPlan, initializer_std, seeded_generator
from .fitting import FIT_DEFAULTS, relative_error, rounded
from .recording import AttentionInputs, attend, recorded_inputs

__all__ = ["Calibration", "calibrate", "method_to_calibrate", "why_not_calibrated"]

# Below this many tokens a moment of a layer's inputs says more about the text than about the model.
MIN_TOKENS = 1000
# One to fit to, one that is held out.
MIN_TEXTS = 2
# The share of the texts that nothing is fitted to: on them errors are measured.
HELD_OUT = 0.1
# What recorded inputs may take; more modules than fit into it are recorded in several passes over the text.
MAX_RECORDED_BYTES = 3 * 2**30


@dataclass(frozen=True)
class Calibration:
    """The text that a conversion may look at, and how closely it fits the new heads to what the old ones make of it.

    An encoder needs no labels, and no gradient passes through more than one attention. A few thousand lines of the
    kind of text that the model is for are enough; many short ones say more than a few long ones. A tenth of them is
    held out: nothing is fitted to it, and the errors of the report are measured on it.

    Args:
        texts: one example each, two at least; or pairs of texts for a model that will read pairs, as the tokenizer
            joins them.
        target_texts: encoder-decoders: the decoder's text for each of them; None = the model's own greedy outputs.
        tokenizer: the model's; None = the one beside the checkpoint (a model in memory has none).
        max_length: tokens at which a text is cut.
        batch_size: texts a forward pass.
        fit_steps: method "calibrated": Adam steps a module after the closed form; None = 400, 0 = it alone.
        fit_learning_rate: of these steps, at their beginning and relative to the root mean square of each tensor;
            None = 0.03.
        fit_batch_size: texts a step; None = 32.
        device: where to run; None = a GPU if there is one.

    Raises:
        TypeError: if `texts` holds anything but strings or pairs of them, or `target_texts` anything but strings.
        ValueError: if there are too few, one is empty, or a number is out of its range.
    """

    texts: Sequence[str] | Sequence[tuple[str, str]]
    target_texts: Sequence[str] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int = 64
    batch_size: int = 32
    fit_steps: int | None = None
    fit_learning_rate: float | None = None
    fit_batch_size: int | None = None
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        if isinstance(self.texts, str) or not isinstance(self.texts, Sequence):
            raise TypeError(f"`texts` of a calibration must be a list; got a {type(self.texts).__name__}.")
        if not len(self.texts):
            raise ValueError("a calibration needs `texts`; the list is empty.")
        # A pair that was read from JSON is a list.
        rows = [tuple(text) if isinstance(text, list | tuple) else text for text in self.texts]
        object.__setattr__(self, "texts", rows)
        pairs = isinstance(rows[0], tuple)
        wrong = [row for row in rows if not _is_example(row, pairs)]
        if wrong:
            raise TypeError(f"`texts` of a calibration must be strings, or pairs of strings; got {wrong[0]!r:.80}.")
        if pairs and any(len(pair) != 2 for pair in rows):
            raise ValueError("a pair of a calibration's `texts` has two strings.")
        if any(not text.strip() for row in rows for text in (row if pairs else [row])):
            raise ValueError("`texts` of a calibration must not be empty; one of them is.")
        if len(rows) < MIN_TEXTS:
            raise ValueError(
                f"a calibration needs {MIN_TEXTS} `texts` at least, one to fit to and one that is held out to measure "
                f"errors on; got {len(rows)}."
            )
        if self.target_texts is not None:
            self._check_targets(self.target_texts)
        for name, least in (("max_length", 2), ("batch_size", 1), ("fit_steps", 0), ("fit_batch_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"`{name}` of a calibration must be at least {least}; got {value}.")
        rate = self.fit_learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"`fit_learning_rate` of a calibration must be more than 0; got {rate}.")

    def _check_targets(self, targets: Sequence[str]) -> None:
        if isinstance(targets, str) or not isinstance(targets, Sequence):
            raise TypeError(f"`target_texts` of a calibration must be a list; got a {type(targets).__name__}.")
        wrong = [text for text in targets if not isinstance(text, str)]
        if wrong:
            raise TypeError(f"`target_texts` of a calibration must be strings; got {wrong[0]!r:.80}.")
        if len(targets) != len(self.texts):
            raise ValueError(
                f"a calibration has a target for each text: {len(self.texts)} texts, {len(targets)} targets."
            )

    @property
    def held_out_count(self) -> int:
        """How many of the texts are held out."""
        return max(1, round(HELD_OUT * len(self.texts)))

    def fit_option(self, name: str) -> Any:
        """Return `fit_steps`, `fit_learning_rate` or `fit_batch_size`: as given, or the default."""
        given = getattr(self, name)
        return FIT_DEFAULTS[name] if given is None else given

    def settings(self, method: CalibratedMethod) -> dict[str, Any]:
        """Return what a report says of it, as JSON values: how many texts and of what kind, no text itself.

        Args:
            method: whose options are said too.
        """
        kind = "pairs" if isinstance(self.texts[0], tuple) else "texts"
        targets, held_out = self.target_texts is not None, self.held_out_count
        said = {"count": len(self.texts), "kind": kind, "targets": targets, "held_out": held_out}
        return said | {"max_length": self.max_length} | {name: self.fit_option(name) for name in method.options}


def why_not_calibrated(plan: ConversionPlan) -> str | None:
    """Return why no text can say how the plan's source is to be pooled; None where it can."""
    talking_heads = plan.source_config.talking_heads
    if talking_heads is not None:
        return (
            f"it fits heads whose weights sum to one; the source has talking heads ({talking_heads!r}), whose do not"
        )
    is_encoder_decoder = getattr(plan.config, "is_encoder_decoder", False)
    if not is_encoder_decoder and any(module.site.is_cross_attention for module in plan.modules):
        return (
            "it cannot reach the cross-attention of a decoder alone: there is no text for the encoder that this reads"
        )
    return None


def method_to_calibrate(plan: ConversionPlan, calibration: Calibration | None) -> CalibratedMethod | None:
    """Return the plan's method if it has attentions to fit: those it has not seen yet or, with a text, all anew.

    Raises:
        ValueError: where it cannot: for a source with talking heads, or a BERT with cross-attention; or there is a
            text and only talking heads to add.
    """
    method = plan.method
    if calibration is not None and not plan.pooled and any(module.projections for module in plan.modules):
        raise ValueError("a calibration fits fewer key/value heads; talking heads are added without: leave it out.")
    if not isinstance(method, CalibratedMethod) or not plan.pooled:
        return None
    if calibration is not None:
        method.converted.clear()  # of another model, or on another text
    elif all(module.name in method.converted for module in plan.pooled):
        return None
    if (reason := why_not_calibrated(plan)) is not None:
        raise ValueError(f'method {method.name!r} cannot be used here: {reason}. Use method "mean".')
    return method


def calibrate(
    plan: ConversionPlan,
    method: CalibratedMethod,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    calibration: Calibration | None,
) -> None:
    """Give a method the new projections of every attention that the plan pools.

    Args:
        plan: the conversion.
        method: the plan's, as `method_to_calibrate` returned it.
        model: the source as this package's model with its own heads, in float32; only how it generates is changed.
        tokenizer: the one beside the checkpoint, if any.
        calibration: the text.

    Raises:
        ValueError: if there is too little text, no tokenizer, or an attention that text alone does not reach.
    """
    modules = plan.pooled
    if calibration is None:
        raise ValueError(f"method {method.name!r} has not seen this model yet: give `calibration=Calibration(texts)`.")
    tokenizer = calibration.tokenizer or tokenizer
    if tokenizer is None:
        raise ValueError("calibration needs the model's tokenizer: give `Calibration(..., tokenizer=tokenizer)`.")
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.eval().to(device)
    if model.can_generate():  # its own settings, beams or penalties, are for its users
        model.generation_config = GenerationConfig.from_model_config(model.config)
    used, held_out = _batches(model, tokenizer, calibration, seeded_generator(plan.seed, "held-out texts"))
    attentions = {path: module for _, path, module in model.named_attentions()}
    # A step each for the closed form, whose time no number of steps is known for; the estimate is of the mean so far.
    steps = 1 + method.steps(calibration)
    errors = []
    with progress_bar(total=steps * len(modules), desc="calibrating", unit="step", smoothing=0) as bar:
        for group in _recorded_together(modules, model.config, used + held_out):
            calls = recorded_inputs(model, [module.name for module in group], used + held_out)
            for module in group:
                bar.set_description(f"calibrating attention {len(errors) + 1} of {len(modules)}", refresh=is_watched())
                tensors = _tensors_of(attentions[module.name], module)
                generator = seeded_generator(plan.seed, module.name)
                inputs = calls.pop(module.name)
                uses = max(1, len(inputs) // len(used + held_out))
                inputs, held = inputs[: uses * len(used)], inputs[uses * len(used) :]
                std = initializer_std(plan.config)
                error = _held_out_error(tensors, module.heads, held)
                layer = LayerContext(module.name, module.site.name, generator, std, uses, held, error, bar.update)
                converted = method.convert_module(tensors, module.heads, layer, inputs, calibration)
                details = _output_errors(tensors, converted, module.heads, layer)
                method.remember(module.name, tensors, _on_cpu(replace(converted, details=details)))
                errors.append(details["output_relative_error"])
                bar.update(steps * len(errors) - bar.n)
                if None not in errors:
                    mean = sum(errors) / len(errors)
                    bar.set_postfix_str(f"outputs {mean:.1%} off on held-out text", refresh=is_watched())


@torch.no_grad()
def _held_out_error(
    tensors: AttentionTensors, heads: HeadCounts, held_out: Sequence[AttentionInputs]
) -> Callable[[AttentionTensors], float | None]:
    """Return the function that measures other projections' outputs on held-out text against one attention's own."""
    targets = [attend(tensors, batch, heads.query)[0] for batch in held_out]
    return lambda converted: relative_error(converted, heads, held_out, targets)


def _output_errors(
    tensors: AttentionTensors, converted: AttentionTensors, heads: HeadCounts, layer: LayerContext
) -> dict[str, Any]:
    """Return the method's details with the errors on held-out text: its own, and those that averaged heads have."""
    details, name = dict(converted.details), "output_relative_error"
    if name not in details:
        details[name] = rounded(layer.held_out_error(converted))
    averaged = MeanPooling().pool(tensors, heads, layer)
    return details | {f"{name}_averaged": rounded(layer.held_out_error(averaged))}


def _is_example(row: Any, is_pair: bool) -> bool:
    if not is_pair:
        return isinstance(row, str)
    return isinstance(row, tuple) and all(isinstance(text, str) for text in row)


def _tensors_of(attention: torch.nn.Module, module: AttentionModule) -> AttentionTensors:
    tensors = {}
    for part in module.tensors:
        role, _, name = part.partition("_")
        tensors[part] = attention.get_submodule(getattr(module.site, role)).get_parameter(name).detach()
    return AttentionTensors(**tensors)


def _on_cpu(tensors: AttentionTensors) -> AttentionTensors:
    return AttentionTensors(
        **{name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in vars(tensors).items()}
    )


def _recorded_together(
    modules: list[AttentionModule], config: Any, batches: Sequence[dict[str, torch.Tensor]]
) -> Iterator[list[AttentionModule]]:
    """Split the modules so that what is recorded for each part fits into `MAX_RECORDED_BYTES`."""
    positions = sum(max(tensor.numel() for tensor in batch.values()) for batch in batches)
    is_albert = config.model_type.endswith("albert")
    calls = math.ceil(config.num_hidden_layers / config.num_hidden_groups) if is_albert else 1
    at_once = max(1, MAX_RECORDED_BYTES // (positions * config.hidden_size * 4 * calls))
    for start in range(0, len(modules), at_once):
        yield modules[start : start + at_once]


def _batches(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    calibration: Calibration,
    generator: torch.Generator,
) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Make batches of texts of similar length: of those to fit to, and of those that are held out.

    Args:
        generator: draws the texts that are held out.
    """
    encoded, segments, targets = _tokenized(model, tokenizer, calibration)
    drawn = torch.randperm(len(encoded), generator=generator).tolist()
    parts = drawn[calibration.held_out_count :], drawn[: calibration.held_out_count]
    chunks = [
        (part, order[start : start + calibration.batch_size])
        for part, order in enumerate(sorted(rows, key=lambda i: (len(encoded[i]), i)) for rows in parts)
        for start in range(0, len(order), calibration.batch_size)
    ]
    generates = model.config.is_encoder_decoder and targets is None
    if generates:
        chunks = progress_bar(chunks, desc="generating targets", unit="batch", leave=False)
    batches: tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]] = ([], [])
    for part, rows in chunks:
        batch = _padded([encoded[i] for i in rows], tokenizer.pad_token_id)
        if segments is not None and getattr(model.config, "type_vocab_size", 0) > 1:
            batch["token_type_ids"] = _padded([segments[i] for i in rows], 0)["input_ids"]
        if model.config.is_encoder_decoder:
            chosen = None if targets is None else [targets[i] for i in rows]
            batch |= _decoder_arguments(model, batch, chosen, calibration)
        batches[part].append(batch)
    return batches


def _tokenized(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration
) -> tuple[list[list[int]], list[list[int]] | None, list[list[int]] | None]:
    """Return the numbers of each example's tokens, which text of a pair each is of, and those of its target."""
    if calibration.target_texts is not None and not model.config.is_encoder_decoder:
        raise ValueError("the calibration has target texts; the model has no decoder to read them.")
    if tokenizer.pad_token_id is None:
        raise ValueError("the calibration's tokenizer has no padding token; texts cannot be batched without one.")
    limit = {"truncation": True, "max_length": calibration.max_length}
    texts = calibration.texts
    columns = [texts] if isinstance(texts[0], str) else zip(*texts, strict=True)
    # ALBERT's tokenizer tells the texts of a pair apart only when asked.
    types = {"return_token_type_ids": True} if getattr(model.config, "type_vocab_size", 0) > 1 else {}
    arguments = tokenizer(*map(list, columns), **types, **limit)
    encoded, segments = arguments["input_ids"], arguments.get("token_type_ids")
    if max(map(max, encoded)) >= model.config.vocab_size:
        raise ValueError(f"the calibration's tokenizer has more tokens than the model ({model.config.vocab_size}).")
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and (longest := max(map(len, encoded))) > positions:
        raise ValueError(
            f"a calibration text has {longest} tokens and the model {positions} positions: give a `max_length` of at "
            f"most {positions}."
        )
    tokens = sum(map(len, encoded))
    if tokens < MIN_TOKENS:
        raise ValueError(
            f"the calibration text has {tokens} tokens in {len(encoded)} lines: {MIN_TOKENS} are the least, a "
            "thousand lines of the model's own kind of text are enough."
        )
    targets = None
    if model.config.is_encoder_decoder and calibration.target_texts is not None:
        targets = tokenizer(text_target=list(calibration.target_texts), **limit)["input_ids"]
    return encoded, segments, targets


def _decoder_arguments(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], targets: list[list[int]] | None, calibration: Calibration
) -> dict[str, torch.Tensor]:
    config = model.config
    if targets is None:
        if not model.can_generate():
            raise ValueError(f"{type(model).__name__} cannot generate: give the calibration `target_texts`.")
        device = next(model.parameters()).device
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        generated = model.generate(**on_device, do_sample=False, num_beams=1, max_new_tokens=calibration.max_length)
        ids = generated[:, :-1].cpu()  # begins with the start token
        mask = torch.cat([torch.ones_like(ids[:, :1]), (ids[:, 1:] != config.pad_token_id).long()], dim=1)
        return {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    padded = _padded([[config.decoder_start_token_id, *ids[:-1]] for ids in targets], config.pad_token_id)
    return {f"decoder_{name}": tensor for name, tensor in padded.items()}


def _padded(rows: list[list[int]], pad_token_id: int) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, pad_token_id)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask}
