"""Causal language modelling: examples whose labels are the next tokens, the model's logits, the sums to evaluate with.

Letters: b examples, n tokens an example, V tokens of the vocabulary.
"""

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..engine.dataloaders import IGNORED_LABEL
from ..engine.losses import label_sums

__all__ = ["CausalLMPreparation", "causal_lm_sums", "causal_logits", "text_ends"]


class CausalLMPreparation:
    """Makes an example of a block of tokens: it reads the begin token and the block without its last one.

    So each token of a text is predicted once: the first of a block from the begin token alone, the others from all
    before them in the block.

    Args:
        tokenizer: has a token that begins a text ([CLS], `<s>`), one that ends it ([SEP], `</s>`), and padding.
        length: n, which is also the block's.

    Raises:
        ValueError: if the tokenizer lacks a token.
    """

    takes_other_block = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, length: int):
        self.begin_id, self.separator, self.pad_id = *text_ends(tokenizer), tokenizer.pad_token_id
        if self.pad_id is None:
            raise ValueError("the tokenizer has no padding token: causal language modelling needs one")
        self.length = self.block_length = length

    def __call__(self, block: np.ndarray, key: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return "input_ids", "attention_mask" and "labels" [n]: at each place the token behind it, -100 at padding.

        Nothing is random about it, whatever the key is.
        """
        ids = np.full(self.length, self.pad_id, dtype=np.int64)
        labels = np.full(self.length, IGNORED_LABEL, dtype=np.int64)
        ids[: len(block)] = [self.begin_id, *block[:-1]]
        labels[: len(block)] = block
        attention_mask = (np.arange(self.length) < len(block)).astype(np.int64)
        return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


def text_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the tokens that begin and end a text.

    Raises:
        ValueError: if the tokenizer has none.
    """
    begin = tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id
    end = tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id
    if begin is None or end is None:
        raise ValueError(
            "the tokenizer has no token that begins a text ([CLS] or a bos_token) or none that ends it ([SEP] or an "
            "eos_token): causal language modelling needs both"
        )
    return begin, end


def causal_logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the logits [b, n, V] of the token behind each."""
    return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits


def causal_lm_sums(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the sums of `PretrainingTask.row_sums`, of all tokens."""
    return label_sums(causal_logits(model, batch), batch["labels"])
