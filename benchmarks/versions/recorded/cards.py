"""Records of generated model cards, one per history of a checkpoint."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from .digests import Record, digest, in_empty_folder, record_each, run, scrub
from .sources import make_checkpoints, make_data

__all__ = ["HISTORIES", "cards", "digest_card_sections", "generate_card"]

TRAIN = "--max_train_steps 2 --per_device_train_batch_size 3 --max_length 32 --cpu --disable_tqdm --output_dir"
FIT = "--calibration_file text.txt --max_length 16 --fit_steps 4"
PAIRS = " ".join(f"--{split}{side}_file {side}.txt" for split in ("", "validation_") for side in ("source", "target"))
BERT = "convert bert --num_key_value_heads 2 --method mean --output_dir converted"
UPTRAIN = f"uptrain converted --objective distill --teacher bert --train_file source.txt {TRAIN} uptrained"
GLUE = f"--task_name cola --data_dir CoLA {TRAIN}"
T5 = "convert t5 --num_key_value_heads 2 --kv_lora_rank 8 --cross_kv_lora_rank 8 --method mean --output_dir t5-gqa"
SQUAD = "--train_file questions.json --validation_file questions.json --max_query_length 8"
WINDOW = "--encoder_attention_pattern sliding_window --encoder_attention_window 8"
TABLE = "--train_file table.csv --validation_file table.csv --label_column label --text_columns text"
# Each history contains the commands that make the checkpoint, and then `push` with the checkpoint and its flags.
HISTORIES: dict[str, str] = {
    "converted": f"{BERT}; push converted",
    "converted-calibrated": f"convert coarse-bert --num_key_value_heads 2 {FIT} --output_dir fitted; push fitted",
    "converted-twice": f"{BERT}; convert converted --talking_heads both --output_dir again; push again",
    "uptrained": f"{BERT}; {UPTRAIN}; push uptrained --base_model google-bert/bert-base-uncased --license apache-2.0",
    "uptrained-glue": f"{BERT}; {UPTRAIN}; glue uptrained {GLUE} cola; push cola --language en",
    "glue": f"glue bert {GLUE} plain-cola; push plain-cola",
    "squad": f"convert reader --talking_heads both --output_dir talking; squad talking {SQUAD} {TRAIN} answers; "
    "push answers --datasets rajpurkar/squad",
    "seq2seq": f"{T5}; seq2seq t5-gqa {PAIRS} {TRAIN} reversed; push reversed --title Reversed",
    "evaluated": f"{T5}; seq2seq t5-gqa {PAIRS} --num_train_epochs 0 --cpu --output_dir scored; push scored",
    "t5-budget": "convert tiny-t5 --kv_cache_bytes 64 160 --method mean --output_dir budget; push budget",
    "t5-windows-kernels": f"convert tiny-t5 {WINDOW} --cross_attention_kernel hedgehog --method mean "
    "--output_dir windows; push windows",
    "whisper": "convert whisper --num_key_value_heads 4 --method mean --output_dir speech; push speech",
    "ner": f"{BERT}; ner converted --train_file tags.txt --validation_file tags.txt {TRAIN} tagger; "
    "push tagger --notes notes.md --evaluations evaluations.json",
    "classify": f"classify bert {TABLE} {TRAIN} sorter; push sorter",
    "secrets": f"{BERT}; {UPTRAIN}; push uptrained --license mit",
    "source-terms": f"{BERT}; push converted",
    "sentence-model": f"{BERT}; push converted",
    "plain": "push bert",
}
EVALUATION = {
    **{"task_type": "token-classification", "dataset_type": "conll2003", "dataset_name": "CoNLL 2003"},
    **{"dataset_split": "test", "metric_type": "f1", "metric_value": 0.5},
}
SECRETS = {
    "train_file": ["/home/somebody/private/train.txt"],
    "dataset_name": "https://user:password@example.com/data?token=" + "hf_" + "abcdefghijklmnop" * 2,
    "teacher": "~/models/teacher",
    "tokenizer_name": "C:\\Users\\Somebody\\tokenizer",
}
TERMS = "license: apache-2.0\nlanguage:\n- en\n- de\nbase_model: google-bert/bert-base-uncased\ntags:\n- legal\n- onnx"


def _add_secrets(folder: Path) -> None:
    results = json.loads((folder / "all_results.json").read_text(encoding="utf-8"))
    results["arguments"] |= SECRETS
    (folder / "all_results.json").write_text(json.dumps(results), encoding="utf-8")


# Changes to checkpoint folders that no command makes.
EDITS: dict[str, Callable[[Path], object]] = {
    "secrets": _add_secrets,
    "source-terms": lambda folder: (folder / "README.md").write_text(f"---\n{TERMS}\n---\n# Source\n"),
    "sentence-model": lambda folder: (folder / "modules.json").write_text("[]"),
}


def cards(texts: Path | None) -> Record:
    """Return the records of the model cards of all histories.

    Args:
        texts: the folder to which the scrubbed cards are written, or None to not write them.
    """
    if texts is not None:
        texts.mkdir(parents=True, exist_ok=True)
        texts = texts.resolve()
    with in_empty_folder():
        make_checkpoints()
        make_data()
        Path("notes.md").write_text("A note.\n", encoding="utf-8")
        Path("evaluations.json").write_text(json.dumps([EVALUATION]), encoding="utf-8")
        return record_each(HISTORIES, lambda name: _record_card(name, texts))


def generate_card(folder: Path, *flags: str) -> str:
    """Return the scrubbed card that `push` generates for a checkpoint."""
    card = Path("card.md")
    run("push", folder, "--repo_id", "somebody/model", "--dry_run", "--save_card", card, *flags)
    return scrub(card.read_text(encoding="utf-8"))


def digest_card_sections(card: str) -> Record:
    """Return the digests of the sections of a card, with the titles as keys."""
    head, *sections = card.split("\n## ")
    return {"head": digest(head)} | {section.split("\n")[0]: digest(section) for section in sections}


def _record_card(name: str, texts: Path | None) -> Record:
    *commands, push = (shlex.split(line) for line in HISTORIES[name].split("; "))
    for command in commands:
        if not Path(command[-1]).exists():
            run(*command)
    folder = Path(push[1])
    if name in EDITS:
        folder = folder.rename(name)
        EDITS[name](folder)
    card = generate_card(folder, *push[2:])
    if texts is not None:
        (texts / f"{name}.md").write_text(card, encoding="utf-8")
    return digest_card_sections(card)
