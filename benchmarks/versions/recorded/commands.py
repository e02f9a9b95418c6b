"""Records of the console commands: conversions, trainings, exports, tables and help texts."""

import importlib
import importlib.util
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
from fixtures.ctranslate2_models import save_writer

from .cards import digest_card_sections, generate_card
from .digests import Record, digest, in_empty_folder, record_each, record_folder, run, scrub
from .sources import make_checkpoints, make_data

__all__ = ["conversions", "exports", "helps", "tables", "trainings"]

LINES = "--calibration_file text.txt --max_length 16"
LINE_PAIRS = f"{LINES} --calibration_target_file text.txt"
FIT, FIT_PAIRS = f"{LINES} --fit_steps 4", f"{LINE_PAIRS} --fit_steps 4"
BOTH = "--num_key_value_heads 2 --encoder_num_key_value_heads 1"
LATENTS = "--kv_lora_rank 8 --encoder_kv_lora_rank 6 --cross_kv_lora_rank 10"
METHODS = ("mean", "first", "random")
# Each conversion has an original model (a folder of `make_checkpoints` or an earlier conversion) and flags.
CONVERSIONS: dict[str, str] = {
    f"{kind}-{method}": f"coarse-{kind} {flags} --method {method}"
    for kind, flags in {"bert": "--num_key_value_heads 2", "t5": BOTH, "bart": BOTH}.items()
    for method in METHODS
} | {
    **{f"bert-trained-{method}": f"bert --num_key_value_heads 1 --method {method}" for method in METHODS},
    **{f"whisper-{method}": f"whisper --num_key_value_heads 4 --method {method}" for method in METHODS},
    "bert-aligned": f"coarse-bert --num_key_value_heads 2 --method aligned {LINES}",
    "bert-trained-aligned": f"bert --num_key_value_heads 1 --method aligned {LINES}",
    "t5-aligned": f"coarse-t5 {BOTH} --method aligned {LINE_PAIRS}",
    "bart-aligned": f"coarse-bart {BOTH} --method aligned {LINE_PAIRS}",
    "whisper-aligned": "whisper --num_key_value_heads 4 --method aligned --calibration_audio_dir recordings",
    "bert-default": "bert --num_key_value_heads 2",
    "bert-talking": "bert --talking_heads both --talking_heads_dynamic x2l m2w",
    "bert-talking-random": "bert --talking_heads both --talking_heads_init random --num_softmax_heads 2",
    "bert-window": "bert --attention_pattern sliding_window --attention_window 4 --num_global_tokens 1",
    "bert-blocks": "bert --attention_pattern random_blocks --attention_block_size 4 --num_random_blocks 1",
    "bert-longer": "bert --num_key_value_heads 2 --max_position_embeddings 128 --position_extension interpolated",
    "bert-svd": "bert --kv_lora_rank 12",
    "bert-exact": "bert --kv_lora_rank 32",
    "bert-matching": "bert --num_key_value_heads 1 --keep_matching_layers 1 --calibration_file text.txt --fit_steps 2",
    "bert-calibrated": f"coarse-bert --num_key_value_heads 2 --kv_lora_rank 8 {FIT}",
    "bert-trained-calibrated": f"bert --num_key_value_heads 1 {FIT} --attention_errors",
    "bert-gqa": "bert --num_key_value_heads 2 --method mean",
    "reader-talking": "reader --talking_heads both --talking_heads_dynamic x2l m2w",
    "reader-t5-gqa": "reader-t5 --num_key_value_heads 2 --method mean",
    "t5-mqa": "t5 --num_key_value_heads 1 --method mean",
    "t5-latent": "t5 --num_key_value_heads 2 --kv_lora_rank 8 --cross_kv_lora_rank 8 --method mean",
    "bert-kernel": "bert --attention_kernel hedgehog --method mean",
    "bert-passages": f"bert --num_key_value_heads 1 {FIT} --calibration_passages",
    "bert-quick": f"bert --num_key_value_heads 1 {FIT} --quick",
    "bert-by-layer": f"""coarse-bert --per_layer_values '{{"num_key_value_heads": [4, 2]}}' {FIT}""",
    "bert-hedgehog": f"coarse-bert --attention_kernel hedgehog {FIT}",
    "bert-linformer": f"coarse-bert --attention_kernel linformer --attention_kernel_features 6 {FIT}",
    "bert-hybrid": f"coarse-bert --attention_kernel hybrid --attention_window 4 {FIT}",
    "bert-bfloat16": "bert --num_key_value_heads 2 --method mean --dtype bfloat16",
    "bert-twice": "bert-calibrated --num_key_value_heads 1 --method mean",
    "bert-expanded": "bert-mean --num_key_value_heads 4 --method mean",
    "t5-svd": f"tiny-t5 {LATENTS}",
    "t5-budget": "tiny-t5 --kv_cache_bytes 64 160 --method mean",
    "t5-calibrated": f"coarse-t5 {BOTH} {LATENTS} {FIT_PAIRS}",
    "t5-calibrated-budget": f"tiny-t5 --kv_cache_bytes 64 160 {FIT_PAIRS}",
    "t5-trained-calibrated": f"t5 {BOTH} {FIT_PAIRS}",
    "bart-calibrated": f"coarse-bart {BOTH} {FIT_PAIRS}",
    "whisper-calibrated": "whisper --num_key_value_heads 4 --cross_kv_lora_rank 8 --calibration_audio_dir recordings "
    "--fit_steps 4",
}
TEXT = "--source_file source.txt --target_file target.txt"
DEV = "--validation_source_file source.txt --validation_target_file target.txt --max_eval_samples 8"
ARTICLES = "--train_file articles.txt --validation_file held-out.txt --shuffle_buffer_size 8 --max_length 16"
BERT = (
    "--config_overrides hidden_size=16,num_hidden_layers=2,num_attention_heads=4,intermediate_size=24,"
    "max_position_embeddings=32 --tokenizer_name bert-tokenizer"
)
T5 = "--config_overrides d_model=16,d_kv=4,d_ff=24,num_layers=2,num_heads=4 --tokenizer_name t5-tokenizer"
DISTILL = "--objective distill --teacher bert --train_file source.txt"
SQUAD = "--train_file questions.json --validation_file questions.json --doc_stride 4 --max_query_length 8"
NER = "--train_file tags.txt --validation_file tags.txt --test_file tags.txt"
TABLE = "--train_file table.csv --validation_file table.csv --test_file table.csv --text_columns text"
TRAININGS: dict[str, str] = {
    "glue": "glue bert-gqa --task_name cola --data_dir CoLA --metric_for_best_model loss --eval_steps 1",
    "glue, pairs": "glue bert-svd --task_name mnli --data_dir MNLI --group_by_length --gradient_checkpointing",
    "glue, numbers": "glue bert-talking --task_name stsb --data_dir STS-B --gradient_accumulation_steps 2",
    "superglue": "superglue bert-gqa --task_name boolq --data_dir boolq",
    "superglue, choices": "superglue bert-gqa --task_name copa --data_dir copa",
    "multiple-choice": "multiple-choice bert-gqa --train_file choices.jsonl --validation_file choices.jsonl",
    "classify": f"classify bert-gqa {TABLE} --label_column label --class_weights balanced",
    "classify, labels": f"classify bert-kernel {TABLE} --label_column tags --label_separator |",
    "classify, numbers": f"classify bert-svd {TABLE} --label_column size",
    "ner": f"ner bert-kernel {NER}",
    "squad": f"squad reader-talking {SQUAD} --max_length 24",
    "squad, T5": f"squad reader-t5-gqa {SQUAD} --max_length 24",
    "squad, version 2": f"squad reader-talking {SQUAD.replace('.json', '-2.json')} --version_2_with_negative",
    "seq2seq": f"seq2seq t5-latent {TEXT} {DEV} --group_by_length",
    "seq2seq, no conversion": f"seq2seq t5 {TEXT} {DEV} --optim adafactor --mixed_precision bf16",
    "pretrain": f"pretrain --model_type bert {BERT} {ARTICLES} --attention_kernel hybrid --attention_window 4",
    "pretrain, clm": f"pretrain --objective clm --model_type bert {BERT} {ARTICLES} --num_key_value_heads 2",
    "pretrain, nsp": f"pretrain --model_type bert {BERT} {ARTICLES} --sentence_task nsp --talking_heads both",
    "pretrain-t5": f"pretrain-t5 --model_type t5 {T5} {ARTICLES} --num_key_value_heads 2 --talking_heads both",
    "uptrain": f"uptrain bert-gqa {DISTILL}",
    "uptrain, all": f"uptrain bert-svd {DISTILL} --trainable all --hidden_states_weight 0.5",
    "uptrain, mlm": "uptrain bert-gqa --objective mlm --train_file source.txt",
    "uptrain, embedding": "uptrain bert-gqa --objective embedding --teacher bert --train_file source.txt",
    "uptrain, seq2seq": f"uptrain t5-mqa --objective seq2seq {TEXT} {DEV} --predict_with_generate",
    "uptrain, lora": f"uptrain t5-mqa --objective seq2seq --teacher t5 {TEXT} --trainable lora --lora_rank 2",
    "uptrain, T5": f"uptrain t5-latent --objective distill --teacher t5 {TEXT} {DEV}",
    "uptrain, spans": f"uptrain t5-mean --objective span_corruption --total_train_batch_size 3 {ARTICLES}",
}
STEPS = (
    "--max_train_steps 2 --checkpointing_steps 1 --logging_steps 1 --per_device_train_batch_size 3 "
    "--learning_rate 1e-2 --cpu --disable_tqdm --output_dir out"
)
# The libraries that each export format needs, and the checkpoints that are exported to it.
EXPORTS = {"transformers": (), "ctranslate2": ("ctranslate2",), "onnx": ("onnxruntime", "onnxscript")}
EXPORTED = {
    "transformers": ("bert-svd", "bert-mean", "t5-svd", "t5-calibrated", "whisper-mean"),
    "ctranslate2": ("writer-t5", "writer-bart", "writer-marian"),
    "onnx": ("bert-mean", "t5-svd"),
}
TABLES = (
    "inspect bert --json",
    "inspect t5 --json --num_beams 4 --memory 4GiB",
    *(f"inspect {name} --details" for name in ("bert-svd", "bert-talking", "t5-latent", "t5-budget", "whisper-mean")),
)


def conversions() -> Record:
    """Return the records of the folders that `convert` writes, and of the summaries that it prints."""
    with in_empty_folder():
        make_checkpoints()
        return record_each(CONVERSIONS, lambda name: {"printed": _convert(name)} | record_folder(Path(name)))


def trainings() -> Record:
    """Return the records of two steps of each training, and of the second step after resuming from the first."""
    with in_empty_folder():
        make_checkpoints()
        make_data()
        return record_each(TRAININGS, lambda name: _record_training(TRAININGS[name]))


def exports() -> Record:
    """Return the records of exported Transformers checkpoints, CTranslate2 models and outputs of ONNX graphs."""
    with in_empty_folder():
        make_checkpoints()
        for writer in ("t5", "bart", "marian"):
            save_writer(Path(f"writer-{writer}"), writer, "gqa")
        for libraries in EXPORTS.values():
            if missing := [library for library in libraries if importlib.util.find_spec(library) is None]:
                print(f"  Exports that need {', '.join(missing)} are skipped.", flush=True)
        forms = [form for form, libraries in EXPORTS.items() if all(map(importlib.util.find_spec, libraries))]
        items = [f"{form}, {source}" for form in forms for source in EXPORTED[form]]
        return record_each(items, lambda item: _record_export(*item.split(", ")))


def tables() -> Record:
    """Return the records of the tables that `inspect` prints."""
    with in_empty_folder():
        make_checkpoints()
        return record_each(TABLES, lambda line: {"printed": digest(scrub(_run(line)))})


def helps() -> Record:
    """Return the records of the help texts of all commands."""
    commands = importlib.import_module("hf_attn_variants.cli").COMMANDS
    return record_each(commands, lambda name: {"help": digest(run(name, "--help"))})


def _convert(name: str) -> str:
    """Run a conversion of `CONVERSIONS`, after that of its original model, and return the digest of the output."""
    source, *flags = shlex.split(CONVERSIONS[name])
    if source in CONVERSIONS and not Path(source).exists():
        _convert(source)
    return digest(scrub(run("convert", source, *flags, "--output_dir", name, "--disable_tqdm")))


def _run(line: str, *more: str) -> str:
    """Run a command. If its checkpoint is one of `CONVERSIONS`, run that conversion first."""
    command, source, *flags = shlex.split(line)
    if source in CONVERSIONS and not Path(source).exists():
        _convert(source)
    return run(command, source, *flags, *more)


def _record_training(line: str) -> Record:
    out = Path("out")
    shutil.rmtree(out, ignore_errors=True)
    line = f"{line} {STEPS}" + ("" if "--max_length" in line else " --max_length 32")
    _run(line)
    records = record_folder(out) | {
        f"card, {title}": text for title, text in digest_card_sections(generate_card(out)).items()
    }
    shutil.rmtree(out / "checkpoint-2")
    for path in out.iterdir():
        if path.is_file():
            path.unlink()
    _run(line, "--resume_from_checkpoint", "latest")
    return records | {f"resumed, {name}": value for name, value in record_folder(out).items()}


def _record_export(form: str, source: str) -> Record:
    folder = Path(f"{source}-{form}")
    _run(f"export {source} --to {form} --output_dir {folder} --disable_tqdm")
    return record_folder(folder) if form != "onnx" else _record_graph_outputs(folder)


def _record_graph_outputs(folder: Path) -> Record:
    """Return the digests of the inputs of each ONNX graph, and of its outputs for random inputs."""
    import onnxruntime

    records: Record = {}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    for path in sorted(folder.rglob("*.onnx")):
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        outputs = session.run(
            None, {graph_input.name: _make_random_input(graph_input) for graph_input in session.get_inputs()}
        )
        records[f"{path.name}, inputs"] = digest(
            [[graph_input.name, graph_input.shape] for graph_input in session.get_inputs()]
        )
        for output, value in zip(session.get_outputs(), outputs, strict=True):
            records[f"{path.name}, {output.name}"] = digest(torch.from_numpy(numpy.array(value)))
    return records


def _make_random_input(node: Any) -> numpy.ndarray:
    generator = numpy.random.default_rng(len(node.name))
    shape = [size if isinstance(size, int) else 2 if number == 0 else 5 for number, size in enumerate(node.shape)]
    if "float" in node.type:
        return generator.normal(size=shape).astype(numpy.float32)
    if "mask" in node.name:
        return numpy.ones(shape, dtype=bool if "bool" in node.type else numpy.int64)
    return generator.integers(0, 2 if "type" in node.name else 20, size=shape)
