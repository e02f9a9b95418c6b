"""The objective of text to text, and its evaluation: teacher-forced loss, decoding, metrics and decoding speed.

Letters: b examples, m source tokens, n target tokens, V tokens of the vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from ...modeling.configuration_attn_variants import can_cache
from ..engine.dataloaders import IGNORED_LABEL
from ..engine.loop import Objective
from ..engine.tracking import progress_bar
from ..uptraining.distillation import token_cross_entropy
from .data import Seq2SeqSplit

__all__ = [
    "Decoded",
    "Decoder",
    "GenerationSet",
    "Seq2SeqEvaluator",
    "beam_suffix",
    "decode_and_score",
    "seq2seq_objective",
    "target_logits",
]


def seq2seq_objective(label_smoothing: float = 0.0) -> Objective:
    """Cross-entropy of the target tokens under teacher forcing, summed over them.

    Args:
        label_smoothing: The share of each target's weight that is spread evenly over the vocabulary.
    """

    def loss_sum(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits, labels = target_logits(model, batch)  # [b, n, V], [b, n]
        return functional.cross_entropy(
            logits.flatten(0, 1).float(),
            labels.flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
            label_smoothing=label_smoothing,
        )

    return Objective(loss_sum=loss_sum, count=lambda batch: int((batch["labels"] != IGNORED_LABEL).sum()))


def target_logits(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits [b, n, V] of a batch under teacher forcing, and its labels [b, n]."""
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "decoder_input_ids")}
    return model(**inputs, use_cache=False).logits, batch["labels"]


@dataclass(frozen=True)
class GenerationSet:
    """A split to evaluate or predict: its rows are run longest first, `order` says which row came when."""

    split: Seq2SeqSplit
    loader: DataLoader
    order: list[int]


@dataclass(frozen=True)
class Decoded:
    """What decoding a split gave.

    Attributes:
        texts: One a row, in the rows' order.
        tokens: Tokens generated, each text's end included and padding not, over all processes.
        seconds: Time in `generate`, of the slowest process.
    """

    texts: list[str]
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


class Decoder:
    """Generates the texts of a split, greedily or by beam search.

    Args:
        accelerator, model, tokenizer: The run's.
        max_new_tokens: Longest text.
        quiet: No progress bar.
        beam_options: Further settings of `generate` for beam search ("length_penalty").
        options: Further settings of `generate` ("no_repeat_ngram_size").
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        max_new_tokens: int,
        quiet: bool = False,
        beam_options: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
    ):
        self.accelerator, self.model, self.tokenizer = accelerator, model, tokenizer
        self.max_new_tokens, self.quiet = max_new_tokens, quiet
        self.beam_options, self.options = beam_options or {}, options or {}

    @torch.no_grad()
    def decode(self, data: GenerationSet, num_beams: int = 1) -> Decoded:
        """Generates the text of every row.

        Args:
            data: The split.
            num_beams: Beams; 1: greedy.
        """
        accelerator, tokenizer = self.accelerator, self.tokenizer
        model = accelerator.unwrap_model(self.model).eval()
        options = {**self.options, **(self.beam_options if num_beams > 1 else {})}
        options |= {} if can_cache(model.config) else {"use_cache": False}
        texts: list[str] = []
        tokens, seconds = 0, 0.0
        name = f"Decoding {data.split.name}" + (f" with {num_beams} beams" if num_beams > 1 else "")
        for batch in progress_bar(accelerator, self.quiet, iterable=data.loader, desc=name, leave=False):
            start = time.perf_counter()
            with accelerator.autocast():  # accelerate's own is around the model, whose encoder `generate` calls alone
                ids = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=self.max_new_tokens,
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
        restored = [""] * len(texts)
        for row, text in zip(data.order, texts, strict=True):
            restored[row] = text
        return Decoded(restored, tokens, float(slowest))


def _text_lengths(ids: Tensor, eos: int | Sequence[int] | None) -> Tensor:
    """Tokens of each row of [b, n] up to its first end token, that one included: [b]."""
    ends = torch.isin(ids, torch.as_tensor([] if eos is None else eos, device=ids.device).view(-1).to(ids.dtype))
    before = ends.cumsum(-1) == 0
    return before.sum(-1) + ends.any(-1)


class Seq2SeqEvaluator:
    """Evaluates the dev split; keeps the last metrics and texts, so that the final ones need no second pass.

    Args:
        accelerator, model: The run's.
        data: The dev split.
        decoder: Generates its texts.
        score: (predictions, references) -> metrics.
        beams: Each number of beams to decode with; the first one's metrics have no suffix.
        loss_only: What calling it computes: the loss alone, and not texts.
        quiet: No progress bar.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        data: GenerationSet,
        decoder: Decoder,
        score: Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]],
        beams: Sequence[int] = (1,),
        loss_only: bool = False,
        quiet: bool = False,
    ):
        self.accelerator, self.model, self.data, self.decoder = accelerator, model, data, decoder
        self.score, self.beams, self.loss_only, self.quiet = score, tuple(beams), loss_only, quiet
        self.metrics: dict[str, float] = {}
        self.texts: dict[int, list[str]] = {}
        self.seconds = 0.0

    def __call__(self) -> dict[str, float]:
        """Metrics in training: "loss" and, unless `loss_only`, those of the first number of beams."""
        self.evaluate(() if self.loss_only else self.beams[:1])
        return dict(self.metrics)

    def evaluate(self, beams: Sequence[int], afresh: bool = True) -> None:
        """Computes the loss, and decodes with each number of beams.

        `metrics` gets "loss" and the metrics of each number of beams, from the second on with the suffix
        `_beam<number>`; `texts` the texts by number of beams.

        Args:
            beams: The first ones of `self.beams`, or all.
            afresh: False: the weights are those of the last evaluation, and only what it left out is computed.
        """
        if afresh:
            self.metrics, self.texts, self.seconds = {}, {}, 0.0
        start = time.perf_counter()
        if "loss" not in self.metrics:
            self.metrics["loss"] = self.loss()
        for i, num_beams in enumerate(beams):
            if num_beams not in self.texts:
                values, self.texts[num_beams] = decode_and_score(self.decoder, self.data, self.score, num_beams)
                suffix = beam_suffix(i, num_beams)
                self.metrics |= {f"{key}{suffix}": value for key, value in values.items()}
        self.seconds += time.perf_counter() - start

    @torch.no_grad()
    def loss(self) -> float:
        """Mean cross-entropy of the target tokens in nats, not smoothed."""
        self.model.eval()
        gathered = []
        for batch in progress_bar(
            self.accelerator, self.quiet, iterable=self.data.loader, desc="Dev loss", leave=False
        ):
            sums, tokens = token_cross_entropy(*target_logits(self.model, batch))
            rows = torch.stack([sums.float(), tokens.float()], dim=-1)  # [b, 2]
            gathered.append(self.accelerator.gather_for_metrics(rows).cpu().double())
        total, tokens = torch.cat(gathered).sum(0).tolist()
        return total / max(tokens, 1)


def beam_suffix(position: int, num_beams: int) -> str:
    """What the metrics' names end in: nothing for the first number of beams asked for, then `_beam<number>`."""
    return f"_beam{num_beams}" if position else ""


def decode_and_score(
    decoder: Decoder,
    data: GenerationSet,
    score: Callable[[Sequence[str], Sequence[Sequence[str]]], dict[str, float]],
    num_beams: int,
) -> tuple[dict[str, float], list[str]]:
    """Decodes a split and compares it with its references, where it has some.

    Returns:
        The metrics, "decode_tokens", "decode_seconds" and "decode_tokens_per_second"; the texts.
    """
    found = decoder.decode(data, num_beams)
    values = score(found.texts, data.split.references) if data.split.references is not None else {}
    values |= {
        "decode_tokens": found.tokens,
        "decode_seconds": round(found.seconds, 3),
        "decode_tokens_per_second": round(found.tokens_per_second, 1),
    }
    return values, found.texts
