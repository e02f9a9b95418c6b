"""Export of a checkpoint to CTranslate2, an engine that needs neither torch, Transformers nor this package."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..conversion.checkpoint.models import TOKENIZER_FILES, load_tokenizer_of, model_of_tensors
from ..conversion.checkpoint.source import copy_side_files, read_config, resolve_source, side_files
from ..conversion.checkpoint.tensor_files import TensorEntry, open_checkpoint
from ..conversion.methods import MeanPooling
from ..conversion.plan import ConversionPlan, make_plan
from ..conversion.writing import converted_tensors, generation_config, write_class_names
from ..files import CONFIG_NAME, check_disk_space, check_output_dir, staged_folder
from ..inspection.costs import used_fields, values_by_layer
from ..modeling.attention.variant_mixins import AttnVariantModelMixin
from ..registration import longest_input
from .ctranslate2_check import (
    Agreement,
    Tokens,
    check_ctranslate2_support,
    generate_greedily,
    generate_with_ctranslate2,
    make_random_inputs,
    max_generated_tokens,
    model_tokens,
    translator_usage,
    unsupported_settings,
    whisper_usage,
)
from .plain import is_independent_of_code, source_model, upstream_architecture

__all__ = ["CTranslate2Export", "export_ctranslate2"]

FLOAT32 = "float32"
# The bytes per weight of a quantization. The others, of eight bits, need one byte.
BYTES_PER_WEIGHT = {FLOAT32: 4, "float16": 2, "bfloat16": 2, "int16": 2}


@dataclass(frozen=True)
class CTranslate2Export:
    """The result of `export_ctranslate2`.

    Args:
        output_dir: The output folder.
        architecture: The name of the Transformers class of the model.
        quantization: The quantization of the weights, named as in CTranslate2.
        heads: {key/value head field: (query heads, key/value heads)}. The latter is a list if layers differ.
        agreement: The comparison of the outputs of CTranslate2 and of the model for random inputs.
        usage: Python code that uses the exported model.
        unsaid: The generation settings that are neither in the exported files nor in `usage`.
    """

    output_dir: str
    architecture: str
    quantization: str
    heads: dict[str, tuple[int, Any]]
    agreement: Agreement
    usage: str
    unsaid: dict[str, Any]

    def summary(self) -> str:
        """Return a printable summary."""
        lines = [f"Wrote {self.output_dir}: a {self.architecture} for CTranslate2, {self.quantization}"]
        lines += [f"  {name:<27} {count} of {query}" for name, (query, count) in self.heads.items()]
        lines += self._comparison_lines()
        if self.unsaid:
            settings = ", ".join(f"{name}={value!r}" for name, value in self.unsaid.items())
            lines.append(f"  {'settings not exported':<27} {settings} (generation_config.json)")
        return "\n".join([*lines, "Use it as follows:", *(f"  {line}" for line in self.usage.splitlines())])

    def _comparison_lines(self) -> list[str]:
        """Return lines that compare the greedy outputs of CTranslate2 with those of the model."""
        agreement, label = self.agreement, f"  {'comparison':<27}"
        tokens = f"{agreement.same_tokens} of {agreement.tokens}"
        if self.quantization == FLOAT32:
            return [f"{label} {tokens} greedy tokens for {agreement.inputs} inputs equal those of the model"]
        return [
            f"{label} {agreement.same} of {agreement.inputs} greedy outputs equal those of the model ({tokens} tokens "
            "up to the first difference)",
            f"  {'':<27} {self.quantization} rounds the weights, and these inputs are random: check the quality on "
            "your own data",
        ]


def export_ctranslate2(
    model_name_or_path: str | os.PathLike,
    output_dir: str | os.PathLike,
    *,
    quantization: str = FLOAT32,
    allow_pickle: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
) -> CTranslate2Export:
    """Export a checkpoint of this package or of Transformers to CTranslate2, with its tokenizer files.

    Grouped key/value heads stay grouped, and latent projections are multiplied into the key and value projections.
    The greedy outputs of CTranslate2 are compared with those of the model before the output folder appears.

    Args:
        model_name_or_path: A checkpoint folder or a Hub id.
        output_dir: A new or empty folder.
        quantization: The type of the weights: "float32", "int8" or another one of `QUANTIZATIONS`.
        allow_pickle, revision, token: See `convert_checkpoint`.

    Raises:
        ValueError: If CTranslate2 is missing or does not support the model, or its float32 outputs are different.
        OSError: If a file (of the tokenizer, for example) is missing or cannot be written.

    Example:
        >>> print(export_ctranslate2("t5-gqa4", "t5-ct2", quantization="int8").summary())
    """
    _check_package()
    from .ctranslate2_specs import QUANTIZATIONS, model_specification

    if quantization not in QUANTIZATIONS:
        raise ValueError(f"`quantization` must be one of {', '.join(QUANTIZATIONS)}, got {quantization!r}.")
    check_output_dir(output_dir)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    config = read_config(folder)
    check_ctranslate2_support(*source_model(config))
    tokenizer = _load_tokenizer(folder)
    with open_checkpoint(folder, allow_pickle) as reader:
        plan = _plan_without_latents(config, reader.entries, folder / CONFIG_NAME)
        generation = generation_config(plan, folder) or GenerationConfig.from_model_config(plan.config)
        tokens = model_tokens(tokenizer, plan.config, generation)
        copied, _ = side_files(folder, reader.files)
        _check_disk_space(output, reader.entries, quantization)
        tensors = converted_tensors(plan, reader, {})
    model = model_of_tensors(plan.model_class, plan.config, tensors, folder, dtype=torch.float32).eval()
    model.generation_config = generation
    inputs = make_random_inputs(model, tokenizer)
    expected = generate_greedily(model, inputs, tokens)  # before the quantization changes the weights of the model
    spec = model_specification(model, tokens, _transformers_model_type(config))
    spec.optimize(quantization=quantization)
    with staged_folder(output) as stage:
        copy_side_files(folder, stage, [name for name in copied if is_independent_of_code(folder, name)])
        write_class_names(stage, {**config, "model_type": _transformers_model_type(config)})
        spec.save(os.fspath(stage))
        _check_tokenizer(stage, tokenizer)
        limit = max_generated_tokens(model, tokens)
        agreement = Agreement.compare(expected, generate_with_ctranslate2(stage, inputs, tokens, limit, quantization))
        _check_agreement(agreement, tokens, quantization)
    return _describe_export(output_dir, model, tokens, quantization, agreement)


def _check_package() -> None:
    """Raise `ValueError` if CTranslate2 is not installed."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise ValueError("An export to CTranslate2 requires the package ctranslate2. Run `pip install ctranslate2`.")


def _check_disk_space(output: Path, entries: Mapping[str, TensorEntry], quantization: str) -> None:
    """Raise an error if the disk is too full for the weights of the export."""
    num_weights = sum(entry.numel for entry in entries.values())
    check_disk_space(output, BYTES_PER_WEIGHT.get(quantization, 1) * num_weights)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint.

    Raises:
        OSError: If the checkpoint has no tokenizer.
    """
    advice = ", from which the vocabulary of CTranslate2 is made."
    if not any(path.name.endswith(TOKENIZER_FILES) for path in folder.iterdir()):
        raise FileNotFoundError(f"{folder} has no tokenizer files{advice}")
    return load_tokenizer_of(folder, advice)


def _transformers_model_type(config: Mapping[str, Any]) -> str:
    """Return the Transformers model type for a `config.json` of a variant or of a Transformers checkpoint."""
    _, model_config = source_model(config)
    model_type: str = config["model_type"]
    types = model_config.transformers_model_types
    return model_type if model_type in types else types[0]


def _plan_without_latents(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry], config_file: Path
) -> ConversionPlan:
    """Return the plan of the conversion to float32 without latents that are narrower than the input."""
    model_class, model_config = source_model(config)
    fields = {}
    for name in used_fields(model_class, model_config):
        ranks = values_by_layer(model_config, name) if name in model_config.rank_fields() else []
        if any(rank not in (None, model_config.hidden_size) for rank in ranks):
            fields[name] = model_config.hidden_size
    return make_plan(config, entries, MeanPooling(), fields, dtype=torch.float32, config_file=config_file)


def _check_tokenizer(stage: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the copied tokenizer files make the same tokenizer.

    Raises:
        ValueError: If they do not.
    """
    copy = load_tokenizer_of(stage, ": the copied tokenizer files are not sufficient.")
    if copy.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            "The copied tokenizer has other tokens than the original one. Save the original with "
            "`save_pretrained` first."
        )


def _check_agreement(agreement: Agreement, tokens: Tokens, quantization: str) -> None:
    """Raise `ValueError` if CTranslate2 generates other tokens than the model with float32 weights."""
    if quantization != FLOAT32 or agreement.first is None:
        return
    number, position, *pair = agreement.first
    expected, actual = (repr(tokens.vocabulary[token]) if token >= 0 else "nothing" for token in pair)
    raise ValueError(
        f"CTranslate2 generates other tokens than the model for {agreement.inputs - agreement.same} of "
        f"{agreement.inputs} inputs. Token {position + 1} of input {number + 1} must be {expected}, got {actual}."
    )


def _describe_export(
    output_dir: str | os.PathLike,
    model: AttnVariantModelMixin,
    tokens: Tokens,
    quantization: str,
    agreement: Agreement,
) -> CTranslate2Export:
    """Return the description of the export."""
    heads = {}
    for name in model.config.kv_heads_fields():
        counts = values_by_layer(model.config, name)
        heads[name] = model.config.query_heads(name), counts if len({*counts}) > 1 else getattr(model.config, name)
    generation, reads_audio = model.generation_config, model.main_input_name == "input_features"
    arguments = (os.fspath(output_dir), tokens, generation, longest_input(model.config))
    if reads_audio:
        usage = whisper_usage(*arguments)
    else:
        usage = translator_usage(*arguments, model.config.transformers_model_types[0])
    return CTranslate2Export(
        os.fspath(output_dir),
        upstream_architecture(type(model)),
        quantization,
        heads,
        agreement,
        usage,
        unsupported_settings(generation, reads_audio),
    )
