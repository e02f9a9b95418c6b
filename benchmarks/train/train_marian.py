"""Train a small Marian model on Multi30k, English to German, with only the code of Transformers.

The result is a real Marian checkpoint for other benchmarks. The tokenizer is that of another translation model for the
same two languages.

Example:
    python -m benchmarks.train.train_marian --data_dir MULTI30K_FOLDER --tokenizer T5_FOLDER \\
        --output_dir marian-multi30k
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sacrebleu
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, MarianConfig, MarianMTModel, get_linear_schedule_with_warmup

from benchmarks.convert.conversion_subjects import read_lines, translate

SHAPE = {"d_model": 256, "encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024}
HEADS = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
POOL = 100  # number of batches whose pairs are sorted by length together
MAX_TOKENS = 64


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line if it is None."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="example:" + __doc__.split("Example:")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data_dir", type=Path, required=True, help="folder of Multi30k with train.en.gz, val.de.gz, ..."
    )
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer for both languages")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bf16", action="store_true", help="faster on processors with fast bfloat16 products")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(args: argparse.Namespace) -> None:
    """Train the model, print the losses and the validation BLEU, and write the checkpoint with a `training.json`."""
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    padding = tokenizer.pad_token_id
    model = make_new_model(tokenizer, args.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=1e-4)
    schedule = get_linear_schedule_with_warmup(optimizer, min(200, args.steps // 8), args.steps)
    train, validation = (read_pairs(args.data_dir, split) for split in ("train", "val"))
    ids = [
        tokenizer(list(side), truncation=True, max_length=MAX_TOKENS).input_ids for side in zip(*train, strict=True)
    ]
    started, losses = time.perf_counter(), []
    for step, batch in enumerate(iterate_batches(list(zip(*ids, strict=True)), args), 1):
        sources, targets = (pad(side, padding) for side in zip(*batch, strict=True))
        shifted = torch.cat([targets.new_full((len(targets), 1), padding), targets[:, :-1]], 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            logits = model(sources, attention_mask=sources.ne(padding), decoder_input_ids=shifted).logits
        loss = cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=padding, label_smoothing=0.1
        )
        if not math.isfinite(loss.item()):
            raise SystemExit(
                f"Training stopped because the loss of step {step} is {loss.item()}. Reduce --learning_rate."
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"{step}: {sum(losses[-100:]) / 100:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
        if step % 1000 == 0 or step == args.steps:
            report = {"step": step, "val_bleu": compute_bleu(model, tokenizer, validation)}
            report |= {"smoothed_loss": sum(losses[-100:]) / 100, "seconds": round(time.perf_counter() - started)}
            report |= {"transformers": transformers.__version__, "torch": torch.__version__}
            print(report, flush=True)
            report["arguments"] = {name: Path(str(value)).name for name, value in vars(args).items()}
            write(model, tokenizer, args.output_dir, report)


def make_new_model(tokenizer: Any, dropout: float) -> MarianMTModel:
    """Return a Marian model with random weights."""
    config = MarianConfig(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        forced_eos_token_id=None,
        decoder_start_token_id=tokenizer.pad_token_id,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        dropout=dropout,
        **SHAPE,
        **HEADS,
    )
    model = MarianMTModel(config)
    model.generation_config.num_beams = 1
    return model


def iterate_batches(pairs: list[Any], args: argparse.Namespace) -> Iterator[list[Any]]:
    """Yield `args.steps` batches of pairs with similar lengths, in a new order in each epoch."""
    generator, left = random.Random(args.seed), args.steps
    while left:
        order = generator.sample(pairs, len(pairs))
        pool = POOL * args.batch_size
        shuffled_batches = []
        for first in range(0, len(order), pool):
            near = sorted(order[first : first + pool], key=lambda pair: (len(pair[1]), len(pair[0])))
            shuffled_batches += [near[i : i + args.batch_size] for i in range(0, len(near), args.batch_size)]
        generator.shuffle(shuffled_batches)
        yield from shuffled_batches[:left]
        left -= min(left, len(shuffled_batches))


def pad(lines: tuple[list[int], ...], token: int) -> torch.Tensor:
    """Return the token ids as a tensor [lines, longest], padded with `token` on the right."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(line) for line in lines], True, token)


def compute_bleu(model: MarianMTModel, tokenizer: Any, pairs: list[tuple[str, str]]) -> float:
    """Return the BLEU of greedy translations with at most `MAX_TOKENS` tokens."""
    sources, targets = zip(*pairs, strict=True)
    translations = translate(model.eval(), tokenizer, sources, max_new_tokens=MAX_TOKENS)
    model.train()
    return sacrebleu.corpus_bleu(translations, [list(targets)]).score


def read_pairs(folder: Path, split: str) -> list[tuple[str, str]]:
    """Return the English and German text of each line."""
    return list(zip(*(read_lines(folder / f"{split}.{language}.gz") for language in ("en", "de")), strict=True))


def write(model: MarianMTModel, tokenizer: Any, folder: Path, report: dict[str, Any]) -> None:
    """Write the checkpoint to a temporary folder, and then move its files to the folder."""
    new = folder.with_name(f"{folder.name}.new")
    model.save_pretrained(new)
    tokenizer.save_pretrained(new)
    (new / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    for file in new.iterdir():
        file.replace(folder / file.name)
    new.rmdir()


if __name__ == "__main__":
    main(parse_args())
