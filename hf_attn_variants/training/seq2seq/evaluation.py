"""The evaluation of text to text: teacher-forced loss, decoding, metrics and decoding speed.

Letters: b examples, n target tokens.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from ...generation_calls import limits_of_the_call
from ...modeling.fields.variant_config import can_cache
from ..engine.evaluation import run_rows
from ..engine.losses import target_logits, token_cross_entropy
from ..engine.tracking import progress_bar
from .data import Seq2SeqSplit
from .settings import Seq2SeqSettings

__all__ = ["Decoded", "Decoder", "GenerationSet", "Seq2SeqEvaluator", "beam_suffix"]


@dataclass(frozen=True)
class GenerationSet:
    """A split to evaluate or predict: its rows are run longest first, `order` says which row came when."""

    split: Seq2SeqSplit
    loader: DataLoader
    order: list[int]


@dataclass(frozen=True)
class Decoded:
    """The texts of a split, one a row."""

    texts: list[str]
    tokens: int  # generated over all processes, each text's end included and padding not
    seconds: float  # in `generate`, of the slowest process


class Decoder:
    """Generates the texts of a split, greedily or by beam search."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        score: Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]],
        settings: Seq2SeqSettings,
    ):
        self.accelerator, self.model, self.tokenizer = accelerator, model, tokenizer
        self.score, self.settings = score, settings

    @torch.no_grad()
    def decode(self, data: GenerationSet, num_beams: int = 1) -> Decoded:
        """Generate the text of every row; with one beam greedily."""
        accelerator, tokenizer = self.accelerator, self.tokenizer
        model = accelerator.unwrap_model(self.model).eval()
        options: dict[str, Any] = {} if can_cache(model.config) else {"use_cache": False}
        if self.settings.no_repeat_ngram_size is not None:
            options["no_repeat_ngram_size"] = self.settings.no_repeat_ngram_size
        if num_beams > 1:
            options["length_penalty"] = self.settings.length_penalty
        texts, tokens, seconds = [], 0, 0.0
        name = f"Decoding {data.split.name}" + (f" with {num_beams} beams" if num_beams > 1 else "")
        for batch in progress_bar(
            accelerator, self.settings.disable_tqdm, iterable=data.loader, desc=name, leave=False
        ):
            start = time.perf_counter()
            with (
                accelerator.autocast(),
                limits_of_the_call(model),
            ):  # accelerate's own is around the model, whose encoder `generate` calls alone
                ids = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=self.settings.max_target_length,
                    num_beams=num_beams,
                    do_sample=False,
                    **options,
                )[:, 1:]  # without the token that the decoder starts with
            lengths = _text_lengths(ids, model.generation_config.eos_token_id)
            seconds += time.perf_counter() - start
            ids = accelerator.pad_across_processes(ids, dim=1, pad_index=tokenizer.pad_token_id)
            # Rows repeated to fill the last batch of each process are left out again.
            ids, lengths = accelerator.gather_for_metrics((ids, lengths))
            texts += tokenizer.batch_decode(ids, skip_special_tokens=True)
            tokens += int(lengths.sum())
        slowest = accelerator.gather(torch.tensor([seconds], device=accelerator.device)).max()
        in_order = [text for _, text in sorted(zip(data.order, texts, strict=True))]
        return Decoded(in_order, tokens, float(slowest))

    def decode_and_score(self, data: GenerationSet, num_beams: int) -> tuple[dict[str, float], list[str]]:
        """Decode a split and compare it with its references, where it has some.

        Return the metrics, "decode_tokens", "decode_seconds" and "decode_tokens_per_second"; and the texts.
        """
        found, references = self.decode(data, num_beams), data.split.references
        values = self.score(found.texts, references) if references is not None else {}
        values |= {
            "decode_tokens": found.tokens,
            "decode_seconds": round(found.seconds, 3),
            "decode_tokens_per_second": round(found.tokens / max(found.seconds, 1e-9), 1),
        }
        return values, found.texts


def _text_lengths(ids: Tensor, eos: int | Sequence[int] | None) -> Tensor:
    """Return the tokens of each row of [b, n] up to its first end token, that one included: [b]."""
    ends = torch.isin(ids, torch.as_tensor([] if eos is None else eos, device=ids.device).view(-1).to(ids.dtype))
    before = ends.cumsum(-1) == 0
    return before.sum(-1) + ends.any(-1)


class Seq2SeqEvaluator:
    """Evaluates the dev split; keeps the last metrics and texts, so that the final ones need no second pass."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        data: GenerationSet,
        decoder: Decoder,
        settings: Seq2SeqSettings,
    ):
        self.accelerator, self.model, self.data = accelerator, model, data
        self.decoder, self.settings = decoder, settings
        self.metrics: dict[str, float] = {}
        self.texts: dict[int, list[str]] = {}
        self.seconds = 0.0

    def __call__(self) -> dict[str, float]:
        """Return the metrics in training: "loss" and, unless `eval_loss_only`, those of the first number of beams."""
        self.evaluate(() if self.settings.eval_loss_only else self.settings.num_beams[:1])
        return dict(self.metrics)

    def evaluate(self, beams: Sequence[int], afresh: bool = True) -> None:
        """Compute the loss, and decode with the numbers of beams, the first of `num_beams` or all.

        `metrics` gets "loss" and the metrics of each number of beams, from the second on with the suffix
        `_beam<number>`; `texts` the texts by number of beams. Unless `afresh`, the weights are those of the last
        evaluation, and only what it left out is computed.
        """
        if afresh:
            self.metrics, self.texts, self.seconds = {}, {}, 0.0
        start = time.perf_counter()
        if "loss" not in self.metrics:
            self.metrics["loss"] = self.loss()
        for i, num_beams in enumerate(beams):
            if num_beams not in self.texts:
                values, self.texts[num_beams] = self.decoder.decode_and_score(self.data, num_beams)
                suffix = beam_suffix(i, num_beams)
                self.metrics |= {f"{key}{suffix}": value for key, value in values.items()}
        self.seconds += time.perf_counter() - start

    def loss(self) -> float:
        """Return the mean cross-entropy of the target tokens in nats, not smoothed."""

        def outputs(batch: dict[str, Tensor]) -> tuple[Tensor]:
            term = token_cross_entropy(target_logits(self.model, batch), batch["labels"])
            return (torch.stack([part.float() for part in term], dim=-1),)  # [b, 2]

        loader, order = self.data.loader, self.data.order
        rows = run_rows(self.accelerator, self.model, loader, order, outputs, "dev loss", self.settings)[0]
        # In the order of the passes: a sum of floats depends on it.
        total, tokens = torch.from_numpy(rows[order]).double().sum(0).tolist()
        return total / max(tokens, 1)


def beam_suffix(position: int, num_beams: int) -> str:
    """Return what the metrics' names end in: nothing for the first number of beams asked for, then `_beam<number>`."""
    return f"_beam{num_beams}" if position else ""
