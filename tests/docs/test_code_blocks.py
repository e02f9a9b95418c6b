"""Check every code block of README.md and docs/: each page runs in order in its own folder, on tiny checkpoints.

If a page names checkpoints, text or data without making them, the test makes tiny ones from the names. Training
commands run completely, with few rows and steps. A block that is neither Python nor shell code must be in `SHOWN`.
A command that does not run must be in `NOT_RUN`, with the reason.
"""

import argparse
import ast
import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import pytest
from fixtures.commands import run_command
from fixtures.markdown_blocks import Block, find_inline_commands, read_blocks, split_commands
from fixtures.named_checkpoints import (
    CheckpointShelf,
    guess_architecture,
    write_glue_folder,
    write_hub_datasets,
    write_text,
)
from fixtures.plugins import restored_tables
from fixtures.speech import write_recordings
from fixtures.squad import write_questions
from hub.local_hub import TOKEN, LocalHub

from hf_attn_variants import cli
from hf_attn_variants.commands import load_command
from hf_attn_variants.conversion.calibration_settings import FIT_DEFAULTS
from hf_attn_variants.glue_tasks import get_task

__all__ = ["restored_tables"]

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {
    str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")))
}
BLOCKS = {name: read_blocks(path, name) for name, path in DOCUMENTS.items()}

# Blocks that are neither Python nor shell code, by document and first words, with a description.
SHOWN = {
    ("docs/tree.md", "hf_attn_variants/"): "the tree of the repository",
    ("docs/architecture.md", "modeling/ops/softmax_attention.py"): "files to read first",
    ("docs/architecture.md", "model(**batch)"): "a drawing",
    ("docs/architecture.md", "convert(model, num_key_value_heads"): "a drawing",
    ("docs/experiments.md", "title: Fewer key"): "a sweep file, whose plan tests/sweep checks",
    ("docs/hub.md", "t5-mini-multi30k-en-de (T5ForCond"): "the table that the preceding command prints",
}
# Generated documents, in which blocks other than commands show output.
GENERATED = {"docs/command_line.md"}
# Documents whose blocks run by default: the ones to read first, and short ones. The others run with `-m thorough`.
QUICK = {
    *("README.md", "docs/installation.md", "docs/quickstart.md", "docs/troubleshooting.md", "docs/fields.md"),
    *("docs/linear.md", "docs/uptraining.md", "docs/sparse.md", "docs/share_memory.md", "docs/quantization.md"),
}
# Commands that do not run, by their first words, with the reason. Their arguments and files are still checked.
NOT_RUN = {
    "accelerate config": "asks questions",
    "attn-variants average": "needs complete runs, but the runs here have only a few rows",
    "make": "creates an environment or takes minutes; the target and ARGS are checked",
    "pip": "installs packages",
    "python -m benchmarks": "takes minutes to hours",
    "attn-variants export sentence-transformers/all-MiniLM-L6-v2 --to onnx --quantization int8 --calibration_file": (
        "needs nncf and OpenVINO"
    ),
    "attn-variants sweep": "takes hours; tests/sweep checks the plan of each file and runs small sweeps",
}
# Local folders that a document may name before one of its commands creates them. None allows any folder.
GIVEN: dict[str, set[str] | None] = {"README.md": set(), "docs/quickstart.md": set()}
# The width of a T5 if a document mentions the width of the real model. The default is 32.
WIDTHS = {("docs/latents.md", "google-t5/t5-small"): 512}
# Values for placeholders that the reader replaces.
PLACEHOLDERS = {"CHECKPOINT": "minilm", "TASK": "CoLA", "OUT": "out", "EPOCHS": "1"}
CHECKPOINT_FLAGS = ("model_name_or_path", "model", "teacher", "tokenizer_name", "checkpoint")


@pytest.fixture(scope="session")
def hub_datasets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datasets")
    write_hub_datasets(folder)
    return folder


@pytest.fixture
def reader(shelf, hub_datasets, small_maps, tmp_path, monkeypatch, restored_tables):
    """A reader who follows a document in an empty folder; pushes go to a local Hub."""
    from huggingface_hub import constants

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setitem(FIT_DEFAULTS, "fit_steps", 2)
    shutil.copytree(hub_datasets, Path(), dirs_exist_ok=True)
    shutil.copy(ROOT / "examples/my_attention.py", "my_attention.py")
    with LocalHub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield Reader(shelf, monkeypatch)


class Reader:
    """A reader that runs code blocks in the working directory."""

    def __init__(self, shelf: CheckpointShelf, monkeypatch: pytest.MonkeyPatch):
        self.shelf, self.monkeypatch, self.folder = shelf, monkeypatch, Path.cwd()

    def run(self, block: Block) -> None:
        if block.is_python:
            self.run_python(block)
        elif block.is_shell:
            for words in split_commands(block):
                self.run_command(words, block)
        self.monkeypatch.chdir(self.folder)

    def run_python(self, block: Block) -> None:
        # Errors show the line in the document.
        tree = ast.parse("\n" * block.line + block.text, filename=block.document)
        for name in find_checkpoint_names(tree):
            self.provide_checkpoint(name, block.document)
        for path in find_keyword_texts(tree, "calibration"):
            provide_file(Path(path))
        for folder in map(Path, find_keyword_texts(tree, "data_dir")):
            if not folder.exists():
                write_glue_folder(folder, folder.name)
        exec(compile(tree, block.document, "exec"), {"__name__": "__main__"})

    def run_command(self, words: list[str], block: Block) -> None:
        if get_reason_not_to_run(words):
            self.check(words)
            return
        words = remove_launcher(fill_in_placeholders(words))
        args = self.parse(words)
        self.provide(args, block.document)
        status = self.start([*words, *get_short_run_flags(args)])
        assert status in (0, None), f"{block}: {' '.join(words)} ended with {status}"

    def check(self, words: list[str]) -> argparse.Namespace | None:
        """Check the arguments of a command that is not run."""
        words = fill_in_placeholders(words)
        if words[:2] == ["accelerate", "config"]:
            return None
        if words[0] == "make":
            targets = [word for word in words[1 : words.index("&&") if "&&" in words else None] if "=" not in word]
            assert set(targets) <= make_targets(), f"the Makefile has no {targets}"
            arguments = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
            if arguments and targets == ["quickstart"]:
                return self.parse(["python", "scripts/quickstart.py", *arguments[0].split()])
            return None
        if words[0] == "pip":
            extras = re.search(r"^(?:hf_attn_variants|\.)\[(\w+)\]$", words[-1])
            # The setup.cfg of an sdist is rewritten, with a space at the end of such lines.
            assert extras is None or re.search(rf"^{extras[1]} = ?$", (ROOT / "setup.cfg").read_text(), re.M), extras
            return None
        if words[1:3] == ["-m", "pytest"]:
            paths = [ROOT / word.removesuffix("...") for word in words[3:] if word.startswith("tests")]
            assert all(path.exists() for path in paths), f"missing paths: {paths}"
            return None
        return self.parse(remove_launcher(words))

    def parse(self, words: list[str]) -> argparse.Namespace | None:
        """Parse a command with the parser of its script."""
        module, arguments = self.program(words)
        self.monkeypatch.setattr(sys, "argv", [words[1], *arguments])
        try:
            return module.parse_args()
        except SystemExit as stopped:
            if stopped.code == 0:  # --help
                return None
            raise AssertionError(f"{' '.join(words)}: not what its parser takes") from stopped

    def program(self, words: list[str]) -> tuple[ModuleType, list[str]]:
        """Return the module with `parse_args` and `main` of a command, and the arguments."""
        if words[0] == "attn-variants":
            assert words[1] in cli.COMMANDS, f"attn-variants has no {words[1]}"
            return load_command(words[1]), words[2:]
        if words[:2] == ["python", "-m"]:
            return importlib.import_module(words[2]), words[3:]
        assert words[0] == "python" and (ROOT / words[1]).is_file(), f"no such program: {' '.join(words[:2])}"
        if named := re.search(r'run\("([\w-]+)"\)', (ROOT / words[1]).read_text(encoding="utf-8")):
            return load_command(named[1]), words[2:]
        self.monkeypatch.syspath_prepend(str((ROOT / words[1]).parent))  # as Python does for scripts
        spec = importlib.util.spec_from_file_location(Path(words[1]).stem + "_of_the_docs", ROOT / words[1])
        module = importlib.util.module_from_spec(spec)
        self.monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module, words[2:]

    def start(self, words: list[str]) -> int | None:
        if words[0] == "attn-variants":
            return cli.main(words[1:])
        module, arguments = self.program(words)
        run_command(module, *arguments)
        return None

    def provide(self, args: argparse.Namespace, document: str) -> None:
        """Make the missing checkpoints, files and folders that a command reads."""
        for name, value in vars(args).items():
            if name in CHECKPOINT_FLAGS and isinstance(value, str):
                self.provide_checkpoint(value, document)
            elif name.endswith("_file") and value:
                for path in map(Path, [value] if isinstance(value, str) else value):
                    provide_file(path)
            elif name == "calibration_audio_dir" and value and not Path(value).exists():
                write_recordings(Path(value), 60, seconds=0.1)
            elif name == "data_dir" and value and not Path(value).exists():
                write_glue_folder(Path(value), get_task(args.task_name).folder)

    def provide_checkpoint(self, name: str, document: str) -> None:
        if Path(name).exists() or guess_architecture(name) is None:
            return
        checkpoint = GIVEN.get(document)
        assert checkpoint is None or "/" in name or name in checkpoint, f"{document}: no earlier block makes {name!r}"
        self.shelf.put(name, Path(name), WIDTHS.get((document, name), 32))


def provide_file(path: Path) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        write_questions(path, version_2="v2" in path.name)
    elif path.parent.name == "reviews" or path.name == "new.csv":
        path.write_text("text,label\n" + "the old house,good\na cat,bad\n" * 8)
    elif path.parent.name == "conll":
        path.write_text("Ann B-PER\nvisits O\nRome B-LOC\n\n" * 8)
    else:
        write_text(path)


def get_reason_not_to_run(words: list[str]) -> str | None:
    command = " ".join(words)
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


def fill_in_placeholders(words: list[str]) -> list[str]:
    pattern = re.compile(r"\b(" + "|".join(PLACEHOLDERS) + r")\b")
    return [pattern.sub(lambda match: PLACEHOLDERS[match[1]], word) for word in words]


def remove_launcher(words: list[str]) -> list[str]:
    """Return the command that `accelerate launch` or `torchrun` would start, after parsing its arguments."""
    if words[:2] == ["accelerate", "launch"]:
        from accelerate.commands.launch import launch_command_parser

        args = launch_command_parser().parse_args(words[2:])
        assert args.config_file is None or (ROOT / args.config_file).is_file(), f"no such file: {args.config_file}"
    elif words[0] == "torchrun":
        from torch.distributed.run import parse_args

        args = parse_args(words[1:])
    else:
        return words
    return ["python", args.training_script, *args.training_script_args]


def get_short_run_flags(args: argparse.Namespace) -> list[str]:
    """Return arguments that reduce a command to few rows and steps."""
    more: dict[str, Any] = {}
    if hasattr(args, "max_train_steps"):
        more = {"--cpu": None, "--disable_tqdm": None, "--per_device_train_batch_size": 2, "--max_eval_samples": 4}
        if args.num_train_epochs != 0 and getattr(args, "alpha", None) is None:
            more["--max_train_steps"] = 2
            if isinstance(args.num_warmup_steps, int) and args.num_warmup_steps > 2:
                more["--num_warmup_steps"] = 1
        if str(args.checkpointing_steps).isdigit():
            more["--checkpointing_steps"] = 1
        if getattr(args, "objective", None) == "span_corruption":
            more |= {"--total_train_batch_size": 2, "--pretraining_steps": 40}
        elif hasattr(args, "max_target_length"):
            more["--max_target_length"] = 8
        if "hidden_size=1024" in (getattr(args, "config_overrides", None) or ""):  # sizes for a GPU
            sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 8, "intermediate_size": 64}
            more["--config_overrides"] = ",".join(f"{name}={value}" for name, value in sizes.items())
        if getattr(args, "model_type", None) and not args.config_overrides:
            more["--config_overrides"] = f"num_{'' if args.model_type == 't5' else 'hidden_'}layers=1"
    if hasattr(args, "rounds"):
        more |= {"--rounds": 1, "--length": 16}
    if hasattr(args, "target_text"):
        more |= {"--max_length": 8, "--layers": 1}  # fewer tokens and layers to draw
    if hasattr(args, "held_out_size"):
        more |= {"--held_out_size": 16, "--cross_kv_lora_rank": 16}  # one variant of a T5
    return [str(part) for pair in more.items() for part in pair if part is not None]


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split())


def find_checkpoint_names(tree: ast.AST) -> list[str]:
    """Return the names of checkpoints in the calls of a program, except those that it writes to."""
    names, written = [], find_keyword_texts(tree, "output_dir")
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called.startswith(("save", "print")):
            continue
        arguments = [*call.args, *(word.value for word in call.keywords if word.arg != "output_dir")]
        texts = [node.value for node in arguments if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        names += [text for text in texts if re.fullmatch(r"[\w./-]+", text) and guess_architecture(text)]
    return [name for name in names if name not in written]


def find_keyword_texts(tree: ast.AST, keyword: str) -> set[str]:
    """Return the strings that a program passes in calls as a keyword argument."""
    words = [word for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords]
    arguments = [word.value for word in words if word.arg == keyword]
    return {node.value for node in arguments if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.thorough)
        for name, blocks in BLOCKS.items()
        if blocks
    ],
)
def test_code_blocks_run(document, reader, capsys):
    for block in BLOCKS[document]:
        try:
            reader.run(block)
        except Exception as error:
            raise AssertionError(f"{block}: {type(error).__name__}: {error}\n{block.text}") from error
        capsys.readouterr()


def test_all_code_blocks_are_found():
    for name, path in DOCUMENTS.items():
        fences = re.findall(r"^[ \t>]*(?:```|~~~)", path.read_text(encoding="utf-8"), re.M)
        assert len(fences) == 2 * len(BLOCKS[name]), f"{name}: a fence does not belong to a known block"


def test_invalid_command_is_detected(reader):
    block = Block(
        "docs/none.md", 1, "", "attn-variants convert --model_name_or_path bert --heads 4 --output_dir out\n"
    )
    with pytest.raises(AssertionError, match="not what its parser takes"):
        reader.run(block)
    with pytest.raises(AssertionError, match="no such program"):
        reader.run(Block("docs/none.md", 1, "", "python scripts/none.py\n"))
    with pytest.raises(AssertionError, match="no earlier block makes 'bert-gqa4'"):
        reader.run(Block("README.md", 1, "", "attn-variants inspect bert-gqa4\n"))
    with pytest.raises(ZeroDivisionError):
        reader.run(Block("docs/none.md", 1, "python", "1 / 0\n"))
    assert not Block("docs/none.md", 1, "", "some output\n").is_shell


def test_every_block_runs_or_is_listed_as_not_run():
    used = set()
    for block in (block for blocks in BLOCKS.values() for block in blocks):
        if block.is_python or block.is_shell:
            assert block.info in ("", "python", "bash", "sh", "console"), f"{block}: unknown {block.info!r} code"
            continue
        if block.document in GENERATED:
            continue
        result = {key for key in SHOWN if key[0] == block.document and block.text.startswith(key[1])}
        assert result, f"{block} is neither Python nor commands, and not in SHOWN:\n{block.text}"
        used |= result
    assert used == SHOWN.keys(), f"SHOWN names blocks that do not exist: {SHOWN.keys() - used}"


def test_blocks_listed_as_not_run_exist():
    commands = [" ".join(words) for path in DOCUMENTS.values() for words in find_inline_commands(path)]
    commands += [" ".join(w) for blocks in BLOCKS.values() for b in blocks if b.is_shell for w in split_commands(b)]
    for start in NOT_RUN:
        assert any(command.startswith(start) for command in commands), (
            f"NOT_RUN names {start!r}, which no document has"
        )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_inline_commands_are_accepted_by_their_parsers(document, reader):
    for words in find_inline_commands(DOCUMENTS[document]):
        if words[0] == "attn-variants" and words[1].startswith("--"):
            with pytest.raises(SystemExit) as stopped:
                cli.main(words[1:])
            assert stopped.value.code == 0, words
        elif words[-1] == "..." or (len(words) == 2 and words[0] in ("python", "attn-variants")):
            reader.program(words)  # the text only names the program, which must exist
        elif words != ["accelerate", "launch"]:
            reader.check(words)
