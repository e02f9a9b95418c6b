"""Whether today's code is right for a repository's weights: by our own classes, and by its old code where trusted."""

import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from ..conversion.checkpoint.tensor_files import open_checkpoint
from ..errors import as_value_error
from ..files import CONFIG_NAME, INDEX_NAME, PICKLE_INDEX_NAME, PICKLE_WEIGHTS_NAME, WEIGHTS_NAME, parse_json
from ..inspection.costs import source_window, variant_config
from ..progress import no_progress_bars
from ..registration import longest_input, variant_model_class
from . import code_outputs
from .code_outputs import model_outputs
from .refresh_plan import VERSION_FILE, RefreshPlan, Repository

__all__ = ["cache_difference", "check_weights", "compare_with_old_code", "trial_inputs"]

GENERATION_CONFIG = "generation_config.json"
TOKENS, NEW_TOKENS = 8, 4
# Of the largest number among the outputs: float32, added up in another order.
TOLERANCE, CACHE_TOLERANCE = 1e-4, 1e-3
# The newest transformers that code was run with which does not say it: all of 0.1.0 and before.
NEWEST_BEFORE = "5.23"
SECONDS = 1800


def check_weights(plan: RefreshPlan) -> tuple[str, dict[str, torch.Tensor]]:
    """Check a repository's weights by today's classes: names, shapes, finite outputs, the same with a cache.

    Nothing that lies in the repository is run, and no pickle is read.

    Returns:
        What was found, a sentence; and the inputs of the pass.

    Raises:
        OSError: if weights are missing or truncated.
        ValueError: if they are pickles alone, or not those of today's class.
    """
    repository = plan.repository
    _refuse_pickles(repository)
    config = _today_config(repository)
    architecture = next(iter(repository.config.get("architectures") or ()), config.auto_classes["AutoModel"])
    model_class = variant_model_class(architecture)
    loader: Any = model_class  # it returns two things, where both are asked for
    if repository.config.get("quantization_config"):
        with open_checkpoint(repository.folder) as reader:
            count = len(reader.entries)
        return f"{count} tensors are whole; they are quantised, and were not compared with today's class", {}
    _check_shapes(repository, model_class, config)
    what = f"{repository.name}: weights of {architecture}"
    with (
        _view(repository, {CONFIG_NAME: _settings(repository)}, code=False) as folder,
        no_progress_bars(),
        as_value_error(what),
    ):
        model, info = loader.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    _check_names(repository, info)
    inputs = trial_inputs(model)
    with as_value_error(f"{repository.name}: a pass by today's {model_class.__name__} failed"):
        outputs = model_outputs(model.eval(), inputs)
    if not outputs or not all(value.isfinite().all() for value in outputs.values()):
        raise ValueError(f"{repository.name}: by today's {model_class.__name__} its outputs are not finite.")
    found = "the weights have the names and shapes of today's class, a pass gives finite numbers"
    with as_value_error(f"{repository.name}: writing tokens by today's {model_class.__name__} failed"):
        difference = cache_difference(model, inputs)
    if difference is None:
        return found, inputs
    if not difference <= CACHE_TOLERANCE:
        raise ValueError(
            f"{repository.name}: by today's {model_class.__name__}, under transformers {transformers.__version__}, "
            f"logits with a cache differ from those without by {difference:.1g} of the largest. Nothing was changed."
        )
    return f"{found}, tokens are written with a cache as without", inputs


def compare_with_old_code(plan: RefreshPlan, inputs: Mapping[str, torch.Tensor]) -> str:
    """Run a repository's own code and today's, each in a process without this package, and compare what they give.

    Args:
        plan: of the refresh; what lies in the repository is trusted.
        inputs: of `check_weights`.

    Returns:
        What was found, a sentence; also where the old code could not run.

    Raises:
        ValueError: if the outputs differ, or today's code fails.
    """
    if not inputs:
        return "the old code was not run: the weights are quantised"
    changes = {each.name: each.content for each in plan.changes}
    with tempfile.TemporaryDirectory() as work:
        new, error = _run_code(plan.repository, changes, inputs, Path(work))
        if new is None:
            raise ValueError(f"{plan.repository.name}: today's code, run without this package, failed: {error}")
        newest, here = _newest_run(plan.repository), Version(transformers.__version__)
        if here.release[:2] > Version(newest).release[:2]:
            return (
                f"today's code runs without this package; the old code was not run: it is of transformers up to "
                f"{newest}, and fails or goes wrong under the {here} that is here"
            )
        old, error = _run_code(plan.repository, {}, inputs, Path(work))
    if old is None:
        return f"today's code runs without this package; the old code could not run here ({error})"
    return _compared(plan.repository.name, old, new)


@torch.no_grad()
def cache_difference(model: Any, inputs: Mapping[str, torch.Tensor]) -> float | None:
    """Return how far the logits of a greedy decoding with a cache are from those without.

    Args:
        model: one of this package's.
        inputs: of `trial_inputs`.

    Returns:
        The largest difference over the largest logit, until the tokens differ; None of a model that writes no text, or
        has no room for it, and of Whisper, whose `generate` is its own.
    """
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    length = inputs["input_ids"].shape[-1] if "input_ids" in inputs else None
    writes = model.can_generate() and ("decoder_input_ids" in inputs or not model.config.is_encoder_decoder)
    if not writes or length is None or (longest_input(model.config) or length + NEW_TOKENS) < length + NEW_TOKENS:
        return None
    model.generation_config = GenerationConfig.from_model_config(model.config)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    cached, whole = (model.generate(**prompt, **options, use_cache=each).logits for each in (True, False))
    largest = 0.0
    for one, other in zip(cached, whole, strict=True):
        largest = max(largest, float((one - other).abs().max()) / max(1.0, float(other.abs().max())))
        if not torch.equal(one.argmax(-1), other.argmax(-1)):
            break
    return largest


def trial_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return small inputs that a model of any architecture here reads: the same each time.

    Args:
        model: one of this package's.

    Returns:
        Arguments of its forward by name: token ids [2, n], for Whisper's encoder mel features [1, bins, frames].
    """
    config, name = model.config, type(model).__name__
    special = {getattr(config, f"{each}_token_id", None) for each in ("pad", "bos", "eos", "decoder_start")}
    parameters = inspect.signature(model.forward).parameters
    count = min(TOKENS, longest_input(config) or TOKENS)

    def ids(vocabulary: int) -> torch.Tensor:
        usable = [each for each in range(min(vocabulary, 1000)) if each not in special] or [0]
        places = torch.arange(1, count + 1) * torch.tensor([[7], [14]])
        return torch.tensor(usable)[places % len(usable)]

    inputs = {}
    if model.main_input_name == "input_features":
        window: Any = source_window(config)  # which such a model has
        frames = 2 * window
        inputs["input_features"] = torch.linspace(-1, 1, config.num_mel_bins * frames).reshape(1, -1, frames).sin()
    else:
        inputs["input_ids"] = ids(config.vocab_size)
        if isinstance(config.eos_token_id, int) and name.endswith("ForSequenceClassification"):
            inputs["input_ids"][:, -1] = config.eos_token_id  # BART classifies by its state there
    if name.endswith("ForMultipleChoice"):
        inputs["input_ids"] = inputs["input_ids"][None]
    if "decoder_input_ids" in parameters and not re.search("For(SequenceClassification|QuestionAnswering)$", name):
        rows = next(iter(inputs.values())).shape[0]
        inputs["decoder_input_ids"] = ids(getattr(config, "decoder_vocab_size", None) or config.vocab_size)[:rows]
    return inputs


def _today_config(repository: Repository) -> Any:
    config = variant_config(parse_json(_settings(repository)))
    config.return_dict = True
    return config


def _settings(repository: Repository) -> bytes:
    """Return config.json without an attention's implementation, which may name a kernel on the Hub."""
    values = {name: value for name, value in repository.config.items() if "attn_implementation" not in name}
    return json.dumps(values).encode()


def _refuse_pickles(repository: Repository) -> None:
    files = repository.files
    has_pickle = PICKLE_WEIGHTS_NAME in files or PICKLE_INDEX_NAME in files or repository.commit is not None
    if WEIGHTS_NAME not in files and INDEX_NAME not in files and has_pickle:
        raise ValueError(
            f"{repository.name} has no weights in safetensors; pickles can run code when they are read, and are not "
            "read here. If you trust them, load the model by `from_pretrained(..., use_safetensors=False)` and save "
            "it by `save_pretrained`, which writes safetensors, with the code of the package that is installed."
        )


def _check_shapes(repository: Repository, model_class: type, config: Any) -> None:
    with as_value_error(f"{repository.name}: its config.json makes no {model_class.__name__}"), torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in model_class(config).state_dict().items()}
    with open_checkpoint(repository.folder) as reader:
        found = {name: entry.shape for name, entry in reader.entries.items()}
    wrong = [name for name, shape in found.items() if name in wanted and shape != wanted[name]]
    if wrong:
        raise ValueError(
            f"{repository.name}: {wrong[0]} has the shape {list(found[wrong[0]])}; today's {model_class.__name__} has "
            f"{list(wanted[wrong[0]])} ({len(wrong)} tensors differ): config.json is not that of the weights. Nothing "
            "was changed."
        )


def _check_names(repository: Repository, info: Mapping[str, Any]) -> None:
    for key, what in (("missing_keys", "lack"), ("unexpected_keys", "hold more than today's class reads:")):
        if names := sorted(info[key]):
            raise ValueError(
                f"{repository.name}: its weights {what} {', '.join(names[:3])}{', ...' * (len(names) > 3)} "
                f"({len(names)} tensors). Nothing was changed."
            )


@contextmanager
def _view(repository: Repository, changes: Mapping[str, bytes | None], code: bool = True) -> Iterator[Path]:
    """Give a folder with links to the weights, and with config.json and code as they are or would be, nothing else."""
    with open_checkpoint(repository.folder) as reader:
        linked = [*reader.files, *(name for name in (INDEX_NAME, GENERATION_CONFIG) if name in repository.files)]
    written = [CONFIG_NAME, *(repository.code_files if code else ())]
    with tempfile.TemporaryDirectory() as folder:
        for name in linked:
            os.symlink((repository.folder / name).resolve(), Path(folder) / name)
        contents: dict[str, bytes | None] = {name: (repository.folder / name).read_bytes() for name in written}
        contents |= changes
        for name, content in contents.items():
            if content is not None:
                (Path(folder) / name).write_bytes(content)
        yield Path(folder)


def _newest_run(repository: Repository) -> str:
    text = ""
    if VERSION_FILE in repository.files:
        text = (repository.folder / VERSION_FILE).read_text(encoding="utf-8", errors="replace")
    match = re.search(r'^OLDEST_RUN, NEWEST_RUN = "[\d.]+", "(\d+\.\d+)"$', text, re.MULTILINE)
    return match[1] if match else NEWEST_BEFORE


def _run_code(
    repository: Repository, changes: Mapping[str, bytes | None], inputs: Mapping[str, torch.Tensor], work: Path
) -> tuple[dict[str, torch.Tensor] | None, str]:
    """Run code in a process of its own; return its outputs, or None and the error's last line."""
    save_file({name: value.contiguous() for name, value in inputs.items()}, work / "inputs.safetensors")
    outputs = work / "outputs.safetensors"
    outputs.unlink(missing_ok=True)
    variables = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    variables |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    with _view(repository, changes) as folder, tempfile.TemporaryDirectory() as modules:
        arguments = [str(folder), str(work / "inputs.safetensors"), str(outputs)]
        try:
            done = subprocess.run(
                [sys.executable, "-P", code_outputs.__file__, *arguments],
                cwd=work,
                env=variables | {"HF_MODULES_CACHE": modules},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return None, f"no end after {SECONDS} s"
    if done.returncode != 0 or not outputs.is_file():
        return None, next(iter(done.stderr.strip().splitlines()[::-1]), f"status {done.returncode}")[:300]
    return load_file(outputs), ""


def _compared(name: str, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> str:
    both = sorted(old.keys() & new.keys())
    if not both:
        raise ValueError(f"{name}: the old code and today's give no output of the same name.")
    largest = 0.0
    for key in both:
        a, b = old[key], new[key]
        same_shape = a.shape == b.shape
        if key == "tokens":
            if not same_shape or not torch.equal(a, b):
                raise ValueError(f"{name}: the old code and today's write different tokens. Nothing was changed.")
            continue
        difference = float((a - b).abs().max()) if same_shape else float("inf")
        if not difference <= TOLERANCE * max(1.0, float(a.abs().max())):
            raise ValueError(
                f"{name}: `{key}` of the old code and today's differ by up to {difference:.2g}. Nothing was changed."
            )
        largest = max(largest, difference)
    tokens = f", the same {old['tokens'].numel()} tokens" if "tokens" in both else ""
    return f"the old code ran too: outputs differ by at most {largest:.1g}{tokens}"
