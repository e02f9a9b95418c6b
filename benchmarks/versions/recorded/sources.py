"""Tiny checkpoints and data in the working directory, for the recorded commands."""

import csv
import json
import shutil
from pathlib import Path

from fixtures.glue.tiny_bert import FIXTURES, make_tiny_bert
from fixtures.golden_sources import make_source, make_tokenizer
from fixtures.speech import save_whisper_checkpoint, write_recordings
from fixtures.squad import make_reader, write_questions
from fixtures.superglue import write_superglue
from fixtures.tiny_t5 import make_lines_of_words, make_tiny_t5
from fixtures.uptraining import make_bert, make_t5, make_text

__all__ = ["make_checkpoints", "make_data"]

ANIMALS, PLACES = ("cat", "dog", "horse", "bird"), ("house", "street", "guitar", "mat")


def make_checkpoints() -> None:
    """Save multi-head models with two layers: three with coarse weights, and those that the commands train."""
    text = "\n".join(make_lines_of_words(120))
    Path("text.txt").write_text(text + "\n", encoding="utf-8")
    for kind in ("bert", "t5", "bart"):
        make_source(kind, text, Path(f"coarse-{kind}"))
    make_tokenizer("bert", text, Path("bert-tokenizer"))
    make_tokenizer("t5", text, Path("t5-tokenizer"))
    make_bert(Path("bert"), make_tiny_bert(Path("tiny-bert")))
    make_t5(Path("t5"))
    make_tiny_t5(Path("cased")).rename("tiny-t5")
    make_reader("bert", Path("reader"))
    make_reader("t5", Path("reader-t5"))
    save_whisper_checkpoint(Path("whisper"), suppress_tokens=[1, 2])
    write_recordings(Path("recordings"), 20, seconds=0.5)


def make_data() -> None:
    """Write the files that the training commands read."""
    make_text(Path())
    for task in ("CoLA", "MNLI", "STS-B"):
        shutil.copytree(FIXTURES / task, task)
    write_questions(Path("questions.json"))
    write_questions(Path("questions-2.json"), version_2=True)
    for task in ("boolq", "copa"):
        write_superglue(Path(task), task)
    rows = [
        (f"{animal} {place}", "ab"[i % 2], f"{animal}|{place}", i)
        for i, animal in enumerate(ANIMALS)
        for place in PLACES
    ]
    with Path("table.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label", "tags", "size"), *rows])
    questions = [
        {"context": "A man sees it.", "question": "What?", "choices": [PLACES[i % 4], ANIMALS[i % 4]], "answer": "B"}
        for i in range(8)
    ]
    Path("choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions), encoding="utf-8")
    words = [
        (name, verb, place) for name in ("Ann", "Bob") for verb in ("likes", "left") for place in ("Rome", "Bonn")
    ]
    tagged = [
        "".join(f"{word} {tag}\n" for word, tag in zip(row, ("B-PER", "O", "B-LOC"), strict=True)) for row in words
    ]
    Path("tags.txt").write_text("\n".join(tagged), encoding="utf-8")
    lines = make_lines_of_words(60)
    articles = ["\n".join(lines[i : i + 4]) for i in range(0, len(lines), 4)]
    Path("articles.txt").write_text("\n\n".join(articles[2:]) + "\n", encoding="utf-8")
    Path("held-out.txt").write_text("\n\n".join(articles[:2]) + "\n", encoding="utf-8")
