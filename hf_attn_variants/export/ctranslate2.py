"""A checkpoint as a CTranslate2 model, whose engine needs neither torch, transformers nor this package."""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from .ctranslate2_check import Tokens, check_has_form, hearing_lines, model_tokens, unsaid_settings, writing_lines
from .plain import source_model, travels_without_code, upstream_architecture

if TYPE_CHECKING:  # its import needs CTranslate2
    from .ctranslate2_check import Agreement

__all__ = ["CTranslate2Export", "export_ctranslate2"]

FLOAT32 = "float32"
# An element of a weight; of others, which are quantised to eight bits, one.
BYTES = {FLOAT32: 4, "float16": 2, "bfloat16": 2, "int16": 2}


@dataclass(frozen=True)
class CTranslate2Export:
    """What was written.

    Args:
        output_dir: where.
        architecture: upstream's class of the model.
        quantization: of the weights, by CTranslate2's name.
        heads: of each field of key/value heads the query heads and the key/value heads, a list where layers differ.
        agreement: how far CTranslate2 writes what the model does, for random inputs.
        usage: a few lines of Python that use it.
        unsaid: settings of generation that neither the files nor those lines say.
    """

    output_dir: str
    architecture: str
    quantization: str
    heads: dict[str, tuple[int, Any]]
    agreement: "Agreement"
    usage: str
    unsaid: dict[str, Any]

    def summary(self) -> str:
        """Return a few lines for people."""
        lines = [f"Wrote {self.output_dir}: a {self.architecture} for CTranslate2, {self.quantization}"]
        lines += [f"  {name:<27} {count} of {query}" for name, (query, count) in self.heads.items()]
        lines += self._read_back()
        if self.unsaid:
            said = ", ".join(f"{name}={value!r}" for name, value in self.unsaid.items())
            lines.append(f"  {'not said to CTranslate2':<27} {said} (generation_config.json)")
        return "\n".join([*lines, "It is used so:", *(f"  {line}" for line in self.usage.splitlines())])

    def _read_back(self) -> list[str]:
        """Return what CTranslate2 wrote beside the model's own, and of rounded weights what that means."""
        found, label = self.agreement, f"  {'read back':<27}"
        tokens = f"{found.same_tokens} of {found.tokens}"
        if self.quantization == FLOAT32:
            return [f"{label} {tokens} greedy tokens of {found.inputs} inputs are the model's"]
        return [
            f"{label} {found.same} of {found.inputs} greedy outputs are the model's; before the first other "
            f"token come {tokens}",
            f"  {'':<27} {self.quantization} rounds, so some differ, and these inputs are random: check the "
            "quality on your own data",
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
    """Write a checkpoint, ours or upstream's, as a CTranslate2 model with its tokenizer's files.

    Key/value heads stay as few as they are, and maps of a latent are multiplied into keys and values. Before the
    folder appears, CTranslate2 reads it and writes greedily what the model does.

    Args:
        model_name_or_path: a checkpoint folder or a Hub id.
        output_dir: a new or empty folder.
        quantization: of the weights: "float32", "float16", "bfloat16", "int16", "int8", "int8_float32",
            "int8_float16" or "int8_bfloat16".
        allow_pickle, revision, token: as for `convert_checkpoint`.

    Raises:
        ValueError: if CTranslate2 is missing, has no form for the model, or writes other tokens in float32; or for a
            quantisation that it does not know.
        OSError: if a file is missing, the tokenizer's among them, or cannot be written.
    """
    _check_package()
    from .ctranslate2_check import Agreement, drawn_inputs, greedy, read_back, written_tokens
    from .ctranslate2_specs import QUANTIZATIONS, model_specification

    if quantization not in QUANTIZATIONS:
        raise ValueError(f"`quantization` must be one of {', '.join(QUANTIZATIONS)}; got {quantization!r}.")
    check_output_dir(output_dir)
    folder = resolve_source(model_name_or_path, revision, token, allow_pickle)
    output = check_output_dir(output_dir, source=folder)
    config = read_config(folder)
    check_has_form(*source_model(config))
    tokenizer = _tokenizer(folder)
    with open_checkpoint(folder, allow_pickle) as reader:
        plan = _plan(config, reader.entries, folder / CONFIG_NAME)
        generation = generation_config(plan, folder) or GenerationConfig.from_model_config(plan.config)
        tokens = model_tokens(tokenizer, plan.config, generation)
        found, _ = side_files(folder, reader.files)
        check_disk_space(output, BYTES.get(quantization, 1) * sum(each.numel for each in reader.entries.values()))
        tensors = converted_tensors(plan, reader, {})
    model = model_of_tensors(plan.model_class, plan.config, tensors, folder, dtype=torch.float32).eval()
    model.generation_config = generation
    inputs = drawn_inputs(model, tokenizer)
    expected = greedy(model, inputs, tokens)  # before a quantisation changes the model's weights
    spec = model_specification(model, tokens, _upstream_type(config))
    spec.optimize(quantization=quantization)
    with staged_folder(output) as stage:
        copy_side_files(folder, stage, [name for name in found if travels_without_code(folder, name)])
        write_class_names(stage, {**config, "model_type": _upstream_type(config)})
        spec.save(os.fspath(stage))
        _check_tokenizer(stage, tokenizer)
        found_tokens = read_back(stage, inputs, tokens, written_tokens(model, tokens), quantization)
        agreement = Agreement.of(expected, found_tokens)
        _check_agreement(agreement, tokens, quantization)
    return _written(output_dir, model, tokens, quantization, agreement)


def _check_package() -> None:
    if importlib.util.find_spec("ctranslate2") is None:
        raise ValueError("an export to CTranslate2 needs ctranslate2: `pip install ctranslate2`")


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    advice = ", of which CTranslate2's vocabulary is made."
    if not any(path.name.endswith(TOKENIZER_FILES) for path in folder.iterdir()):
        raise FileNotFoundError(f"{folder} has no tokenizer files{advice}")
    return load_tokenizer_of(folder, advice)


def _upstream_type(config: Mapping[str, Any]) -> str:
    _, described = source_model(config)
    named: str = config["model_type"]
    return named if named in described.upstream_model_types else described.upstream_model_types[0]


def _plan(config: Mapping[str, Any], entries: Mapping[str, TensorEntry], config_file: Path) -> ConversionPlan:
    """Return the conversion to float32 and to keys and values that are made from no latent narrower than the input."""
    model_class, described = source_model(config)
    fields = {}
    for name in used_fields(model_class, described):
        ranks = values_by_layer(described, name) if name in described.rank_fields() else []
        if any(rank not in (None, described.hidden_size) for rank in ranks):
            fields[name] = described.hidden_size
    return make_plan(config, entries, MeanPooling(), fields, dtype=torch.float32, config_file=config_file)


def _check_tokenizer(stage: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    found = load_tokenizer_of(stage, ": the source's are of no use elsewhere.")
    if found.get_vocab() != tokenizer.get_vocab():
        raise ValueError("the tokenizer has other tokens once its files are copied: save it anew in the source.")


def _check_agreement(agreement: "Agreement", tokens: Tokens, quantization: str) -> None:
    """Raise ValueError where weights that are not rounded write other tokens than the model."""
    if quantization != FLOAT32 or agreement.first is None:
        return
    number, place, *pair = agreement.first
    one, other = (repr(tokens.vocabulary[each]) if each >= 0 else "nothing" for each in pair)
    raise ValueError(
        f"CTranslate2 writes other tokens than the model: {agreement.same} of {agreement.inputs} inputs have the "
        f"model's, and of number {number + 1} token {place + 1} is {other}, the model's {one}."
    )


def _written(
    output_dir: str | os.PathLike,
    model: AttnVariantModelMixin,
    tokens: Tokens,
    quantization: str,
    agreement: "Agreement",
) -> CTranslate2Export:
    heads = {}
    for name in model.config.kv_heads_fields():
        counts = values_by_layer(model.config, name)
        heads[name] = model.config.query_heads(name), counts if len({*counts}) > 1 else getattr(model.config, name)
    generation, hears = model.generation_config, model.main_input_name == "input_features"
    said = (os.fspath(output_dir), tokens, generation, longest_input(model.config))
    usage = hearing_lines(*said) if hears else writing_lines(*said, model.config.upstream_model_types[0])
    return CTranslate2Export(
        os.fspath(output_dir),
        upstream_architecture(type(model)),
        quantization,
        heads,
        agreement,
        usage,
        unsaid_settings(generation, hears),
    )
