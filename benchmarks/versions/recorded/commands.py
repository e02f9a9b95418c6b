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

from .cards import card_sections, generated_card
from .digests import Record, digest, in_empty_folder, of_folder, record, run, scrub
from .sources import convert, make_checkpoints, make_data

__all__ = ["conversions", "exports", "helps", "tables", "trainings"]

FIT = "--calibration_file text.txt --max_length 16 --fit_steps 4"
PAIRS = f"{FIT} --calibration_target_file text.txt"
BOTH = "--num_key_value_heads 2 --encoder_num_key_value_heads 1"
LATENTS = "--kv_lora_rank 8 --encoder_kv_lora_rank 6 --cross_kv_lora_rank 10"
METHODS = ("mean", "first", "random")
# Each conversion: the source (a folder of `make_checkpoints` or an earlier conversion) and the flags.
CONVERSIONS: dict[str, str] = {
    f"{kind}-{method}": f"coarse-{kind} {flags} --method {method}"
    for kind, flags in {"bert": "--num_key_value_heads 2", "t5": BOTH, "bart": BOTH}.items()
    for method in METHODS
} | {
    **{f"bert-trained-{method}": f"bert --num_key_value_heads 1 --method {method}" for method in METHODS},
    **{f"whisper-{method}": f"whisper --num_key_value_heads 4 --method {method}" for method in METHODS},
    "bert-aligned": f"coarse-bert --num_key_value_heads 2 --method aligned {FIT}",
    "bert-trained-aligned": f"bert --num_key_value_heads 1 --method aligned {FIT}",
    "t5-aligned": f"coarse-t5 {BOTH} --method aligned {PAIRS}",
    "bart-aligned": f"coarse-bart {BOTH} --method aligned {PAIRS}",
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
    "t5-calibrated": f"coarse-t5 {BOTH} {LATENTS} {PAIRS}",
    "t5-calibrated-budget": f"tiny-t5 --kv_cache_bytes 64 160 {PAIRS}",
    "t5-trained-calibrated": f"t5 {BOTH} {PAIRS}",
    "bart-calibrated": f"coarse-bart {BOTH} {PAIRS}",
    "whisper-calibrated": "whisper --num_key_value_heads 4 --cross_kv_lora_rank 8 --calibration_audio_dir recordings "
    "--fit_steps 4",
}
# The folders that are trained, in the form of `CONVERSIONS`.
VARIANTS: dict[str, str] = {
    "bert-gqa": "bert --num_key_value_heads 2 --method mean",
    "bert-latent": "bert --kv_lora_rank 12",
    "bert-talking": CONVERSIONS["bert-talking"],
    "bert-kernel": "bert --attention_kernel hedgehog",
    "reader-talking": "reader --talking_heads both --talking_heads_dynamic x2l m2w",
    "reader-t5-gqa": "reader-t5 --num_key_value_heads 2 --method mean",
    "t5-gqa": "t5 --num_key_value_heads 1 --method mean",
    "t5-latent": "t5 --num_key_value_heads 2 --kv_lora_rank 8 --cross_kv_lora_rank 8 --method mean",
    "spans-t5": "coarse-t5 --num_key_value_heads 1 --method mean",
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
    "glue, pairs": "glue bert-latent --task_name mnli --data_dir MNLI --group_by_length --gradient_checkpointing",
    "glue, numbers": "glue bert-talking --task_name stsb --data_dir STS-B --gradient_accumulation_steps 2",
    "superglue": "superglue bert-gqa --task_name boolq --data_dir boolq",
    "superglue, choices": "superglue bert-gqa --task_name copa --data_dir copa",
    "multiple-choice": "multiple-choice bert-gqa --train_file choices.jsonl --validation_file choices.jsonl",
    "classify": f"classify bert-gqa {TABLE} --label_column label --class_weights balanced",
    "classify, labels": f"classify bert-kernel {TABLE} --label_column tags --label_separator |",
    "classify, numbers": f"classify bert-latent {TABLE} --label_column size",
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
    "uptrain, all": f"uptrain bert-latent {DISTILL} --trainable all --hidden_states_weight 0.5",
    "uptrain, mlm": "uptrain bert-gqa --objective mlm --train_file source.txt",
    "uptrain, embedding": "uptrain bert-gqa --objective embedding --teacher bert --train_file source.txt",
    "uptrain, seq2seq": f"uptrain t5-gqa --objective seq2seq {TEXT} {DEV} --predict_with_generate",
    "uptrain, lora": f"uptrain t5-gqa --objective seq2seq --teacher t5 {TEXT} --trainable lora --lora_rank 2",
    "uptrain, T5": f"uptrain t5-latent --objective distill --teacher t5 {TEXT} {DEV}",
    "uptrain, spans": f"uptrain spans-t5 --objective span_corruption --total_train_batch_size 3 {ARTICLES}",
}
STEPS = (
    "--max_train_steps 2 --checkpointing_steps 1 --logging_steps 1 --per_device_train_batch_size 3 "
    "--learning_rate 1e-2 --cpu --disable_tqdm --output_dir out"
)
TABLES: dict[str, str] = {
    "inspect, bert": "inspect bert --json",
    "inspect, t5": "inspect t5 --json --num_beams 4 --memory 4GiB",
    "inspect, bert-latent": "inspect bert-latent --details",
    "inspect, t5-latent": "inspect t5-latent --details",
    "inspect, whisper": "inspect whisper --details",
}


def conversions() -> Record:
    """Return the records of the folders that `convert` writes, and of the summaries that it prints."""
    records: Record = {}
    with in_empty_folder():
        make_checkpoints()
        for name, line in CONVERSIONS.items():
            record(records, name, lambda: _conversion(name, line))  # noqa: B023
    return records


def trainings() -> Record:
    """Return the records of two steps of each training, and of the second step after a resume from the first."""
    records: Record = {}
    with in_empty_folder():
        make_checkpoints()
        make_data()
        for name, line in VARIANTS.items():
            convert(shlex.split(line)[0], name, *shlex.split(line)[1:])
        for name, line in TRAININGS.items():
            record(records, name, lambda: _training(line))  # noqa: B023
            shutil.rmtree("out", ignore_errors=True)
            print(f"  {name}", flush=True)
    return records


def exports() -> Record:
    """Return the records of checkpoints without this package, of CTranslate2 models and of ONNX graphs' outputs."""
    records: Record = {}
    with in_empty_folder():
        make_checkpoints()
        for name in ("bert-svd", "bert-mean", "t5-svd", "t5-calibrated", "whisper-mean"):
            line = shlex.split(CONVERSIONS[name])
            convert(line[0], name, *line[1:])
            record(records, f"transformers, {name}", lambda: _exported(name, "transformers"))  # noqa: B023
        for name in ("t5", "bart", "marian"):
            save_writer(Path(f"writer-{name}"), name, "gqa")
            if _has("ctranslate2"):
                record(records, f"ctranslate2, {name}", lambda: _exported(f"writer-{name}", "ctranslate2"))  # noqa: B023
        for name in ("bert-mean", "t5-svd"):
            if _has("onnxruntime", "onnxscript"):
                record(records, f"onnx, {name}", lambda: _onnx(name))  # noqa: B023
    return records


def tables() -> Record:
    """Return the records of the tables that `inspect` prints."""
    records: Record = {}
    with in_empty_folder():
        make_checkpoints()
        for name in ("bert-latent", "t5-latent"):
            line = shlex.split(VARIANTS[name])
            convert(line[0], name, *line[1:])
        for name, line in TABLES.items():
            record(records, name, lambda: {"printed": digest(scrub(run(*shlex.split(line))))})  # noqa: B023
    return records


def helps() -> Record:
    """Return the records of all commands' help."""
    records: Record = {}
    for name in importlib.import_module("hf_attn_variants.cli").COMMANDS:
        record(records, name, lambda: {"help": digest(run(name, "--help"))})  # noqa: B023
    return records


def _conversion(name: str, line: str) -> Record:
    printed = run("convert", *shlex.split(line), "--output_dir", name, "--disable_tqdm")
    return of_folder(Path(name)) | {"printed": digest(scrub(printed))}


def _training(line: str) -> Record:
    line = f"{line} {STEPS}" + ("" if "--max_length" in line else " --max_length 32")
    run(*shlex.split(line))
    out = Path("out")
    records = of_folder(out) | {f"card, {title}": text for title, text in card_sections(generated_card(out)).items()}
    shutil.rmtree(out / "checkpoint-2", ignore_errors=True)
    for path in out.glob("*.*"):
        if path.is_file():
            path.unlink()
    run(*shlex.split(line), "--resume_from_checkpoint", "latest")
    return records | {f"resumed, {name}": value for name, value in of_folder(out).items()}


def _exported(name: str, form: str) -> Record:
    folder = Path(f"{name}-{form}")
    run("export", name, "--to", form, "--output_dir", folder, "--disable_tqdm")
    return of_folder(folder)


def _onnx(name: str) -> Record:
    """Return digests of the outputs of each graph, for inputs of small random numbers."""
    import onnxruntime

    folder, records = Path(f"{name}-onnx"), Record()
    run("export", name, "--to", "onnx", "--output_dir", folder, "--disable_tqdm")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    for path in sorted(folder.glob("*.onnx")):
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        made = session.run(None, {each.name: _random_input(each) for each in session.get_inputs()})
        names = [each.name for each in session.get_outputs()]
        records[f"{path.name}, inputs"] = digest([[each.name, each.shape] for each in session.get_inputs()])
        records |= {
            f"{path.name}, {output}": digest(torch.from_numpy(numpy.array(value)))
            for output, value in zip(names, made, strict=True)
        }
    return records


def _random_input(node: Any) -> numpy.ndarray:
    generator = numpy.random.default_rng(len(node.name))
    shape = [each if isinstance(each, int) else 2 if number == 0 else 5 for number, each in enumerate(node.shape)]
    if "float" in node.type:
        return generator.normal(size=shape).astype(numpy.float32)
    if "mask" in node.name:
        return numpy.ones(shape, dtype=bool if "bool" in node.type else numpy.int64)
    return generator.integers(0, 2 if "type" in node.name else 20, size=shape)


def _has(*libraries: str) -> bool:
    missing = [each for each in libraries if importlib.util.find_spec(each) is None]
    if missing:
        print(f"  Exports that need {', '.join(missing)} are left out.", flush=True)
    return not missing
