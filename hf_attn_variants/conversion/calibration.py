"""Calibration: text through the source model, and new heads fitted to what its attentions make of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .methods.base import AttentionTensors, CalibratedMethod, LayerContext
from .plan import AttentionModule, ConversionPlan, initializer_std, seeded_generator
from .recording import recorded_inputs

__all__ = ["Calibration", "calibrate", "method_to_calibrate"]

# Below this many tokens a moment of a layer's inputs says more about the text than about the model.
MIN_TOKENS = 1000
# What recorded inputs may take; more modules than fit into it are recorded in several passes over the text.
MAX_RECORDED_BYTES = 3 * 2**30


@dataclass(frozen=True)
class Calibration:
    """The text that a conversion may look at, and how closely it fits the new heads to what the old ones make of it.

    An encoder needs no labels, and no gradient passes through more than one attention. A few thousand lines of the
    kind of text that the model is for are enough; many short ones say more than a few long ones.

    Args:
        texts: one example each; or pairs of texts for a model that will read pairs, as the tokenizer joins them.
        target_texts: encoder-decoders: the decoder's text for each of them; None = the model's own greedy outputs.
        tokenizer: the model's; None = the one beside the checkpoint (a model in memory has none).
        max_length: tokens at which a text is cut.
        batch_size: texts a forward pass.
        fit_steps: Adam steps a module after the closed form; 0 = the closed form alone.
        fit_learning_rate: the rate at their beginning, relative to the root mean square of each tensor.
        fit_batch_size: texts a step.
        device: where to run; None = a GPU if there is one.
    """

    texts: Sequence[str] | Sequence[tuple[str, str]]
    target_texts: Sequence[str] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int = 64
    batch_size: int = 32
    fit_steps: int = 400
    fit_learning_rate: float = 0.03
    fit_batch_size: int = 32
    device: str | torch.device | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.texts, str) and not len(self.texts):
            raise ValueError("a calibration needs `texts`; the list is empty.")
        pairs = not isinstance(self.texts, str) and all(isinstance(text, tuple) for text in self.texts)
        texts = [text for pair in self.texts for text in pair] if pairs else self.texts
        if isinstance(self.texts, str) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ValueError("`texts` of a calibration must be a list of strings, or of pairs, that are not empty.")
        if pairs and any(len(pair) != 2 for pair in self.texts):
            raise ValueError("a pair of a calibration's `texts` has two strings.")
        if self.target_texts is not None and len(self.target_texts) != len(self.texts):
            raise ValueError(
                f"a calibration has a target for each text: {len(self.texts)} texts, {len(self.target_texts)} targets."
            )
        for name, least in (("max_length", 2), ("batch_size", 1), ("fit_steps", 0), ("fit_batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` of a calibration must be at least {least}; got {getattr(self, name)}.")

    def settings(self) -> dict[str, Any]:
        """Return what a report says of it, as JSON values: how many texts and of what kind, no text itself."""
        names = ("max_length", "fit_steps", "fit_learning_rate", "fit_batch_size")
        kind = "pairs" if isinstance(self.texts[0], tuple) else "texts"
        targets = self.target_texts is not None
        return {"count": len(self.texts), "kind": kind, "targets": targets} | {n: getattr(self, n) for n in names}


def method_to_calibrate(plan: ConversionPlan, calibration: Calibration | None) -> CalibratedMethod | None:
    """Return the plan's method if it has attentions to fit: those it has not seen yet or, with a text, all anew.

    Raises:
        ValueError: where it cannot: for a source with talking heads, or a BERT with cross-attention; or there is a
            text and only talking heads to add.
    """
    method = plan.method
    if calibration is not None and not _pooled(plan) and any(module.projections for module in plan.modules):
        raise ValueError("a calibration fits fewer key/value heads; talking heads are added without: leave it out.")
    if not isinstance(method, CalibratedMethod) or not _pooled(plan):
        return None
    if calibration is not None:
        method.converted.clear()  # of another model, or on another text
    elif all(module.name in method.converted for module in _pooled(plan)):
        return None
    if plan.source_config.talking_heads is not None:
        raise ValueError(
            f"method {method.name!r} fits heads whose weights sum to one; the source has talking heads "
            f'({plan.source_config.talking_heads!r}), whose do not: use method "mean".'
        )
    is_encoder_decoder = getattr(plan.config, "is_encoder_decoder", False)
    if not is_encoder_decoder and any(module.site.name == "cross" for module in plan.modules):
        raise ValueError(
            f"method {method.name!r} cannot reach the cross-attention of a decoder alone: there is no text for the "
            'encoder that it reads. Use method "mean".'
        )
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
    modules = _pooled(plan)
    if calibration is None:
        raise ValueError(f"method {method.name!r} has not seen this model yet: give `calibration=Calibration(texts)`.")
    tokenizer = calibration.tokenizer or tokenizer
    if tokenizer is None:
        raise ValueError("calibration needs the model's tokenizer: give `Calibration(..., tokenizer=tokenizer)`.")
    device = calibration.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = model.eval().to(device)
    if model.can_generate():  # its own settings, beams or penalties, are for its users
        model.generation_config = GenerationConfig.from_model_config(model.config)
    batches = _batches(model, tokenizer, calibration)
    attentions = {path: module for _, path, module in model.named_attentions()}
    with tqdm(total=len(modules), desc="calibrating", unit="attention") as progress:
        for group in _recorded_together(modules, model.config, batches):
            calls = recorded_inputs(model, [module.name for module in group], batches)
            for module in group:
                tensors = _tensors_of(attentions[module.name], module)
                generator = seeded_generator(plan.seed, module.name)
                inputs = calls.pop(module.name)
                uses = max(1, len(inputs) // len(batches))
                layer = LayerContext(module.name, module.site.name, generator, initializer_std(plan.config), uses)
                converted = method.convert_module(tensors, module.heads, layer, inputs, calibration)
                method.remember(module.name, tensors, _on_cpu(converted))
                progress.update()


def _pooled(plan: ConversionPlan) -> list[AttentionModule]:
    return [module for module in plan.modules if module.heads.relation == "pool"]


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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, calibration: Calibration
) -> list[dict[str, torch.Tensor]]:
    """Tokenize the text into the model's arguments, texts of similar length together."""
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
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    batches = []
    for start in range(0, len(order), calibration.batch_size):
        rows = order[start : start + calibration.batch_size]
        batch = _padded([encoded[i] for i in rows], tokenizer.pad_token_id)
        if segments is not None and getattr(model.config, "type_vocab_size", 0) > 1:
            batch["token_type_ids"] = _padded([segments[i] for i in rows], 0)["input_ids"]
        if model.config.is_encoder_decoder:
            chosen = None if targets is None else [targets[i] for i in rows]
            batch |= _decoder_arguments(model, batch, chosen, calibration)
        batches.append(batch)
    return batches


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
