"""The model card of a checkpoint, filled from what lies in its folder: nothing is written that was not run or counted.

config.json gives the variant and its heads; `conversion_report.json`, `all_results.json` and, for the steps before
those, `model_history.json` say how it was made; the README.md of the source gives its licence, languages and tags.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..conversion.checkpoint.source import read_config
from ..files import CARD_NAME, GENERATED_CARD, REPORT_NAME, atomic_write
from ..inspection.costs import cost_table, used_fields, values_by_layer, variant_config
from ..inspection.talking_places import talking_parts
from ..model_history import ModelHistory, read_front_matter, read_history
from ..modeling.variant_names import ATTN_VARIANTS_VERSION
from ..registration import supported_model_types, variant_model_class
from .card_escapes import plain
from .card_steps import (
    Step,
    data_name,
    hub_source,
    last_training,
    quality_sentence,
    reads_pairs,
    step_lines,
    step_sections,
    task_of,
)
from .card_text import PIPELINE_TAGS, code_paragraph, licence_text, limits, papers, size_rows, summary, usage_snippet
from .heads_diagram import heads_diagram
from .local_paths import without_local_paths

__all__ = ["CardOptions", "eval_results", "is_untouched", "model_card", "refreshed_card", "write_card"]

TEMPLATE = Path(__file__).with_name("templates") / "model_card.md"
MARK = GENERATED_CARD + "{version}; digest {digest} -->"
MARK_PATTERN = re.compile(rf"\n{GENERATED_CARD}\S+; digest ([0-9a-f]{{16}}) -->\s*$")
# The paragraph on the code, and the repository that the card is of.
CODE_PATTERN = re.compile(r"^The attention is not part of transformers: .*?(?=\n\n)", re.MULTILINE | re.DOTALL)
REPO_ID_PATTERN = re.compile(r'\.from_pretrained\("([^"\n]+)"')
# What describes a run and is no score.
NO_SCORE = re.compile(
    r"(.*_)?(samples|questions|runtime|windows|total|rows|tokens|seconds)(_.*)?|.*(per_second|thresh).*"
)
# What a split's scores begin with, its name, and the arguments that name its file.
SPLITS = (
    ("eval_", "validation", ("validation_file", "validation_source_file")),
    ("test_", "test", ("test_file", "test_source_file")),
)
OWN_TAGS = (
    "attn-variants",
    "multi-query-attention",
    "grouped-query-attention",
    "multi-head-latent-attention",
    "talking-heads-attention",
)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
HELD_OUT = {"dataset_type": "held-out-text", "dataset_name": "held-out text"}
# Tags of a source that are not true of what is made of it: formats of its files, and what else the Hub can do with it.
FORMAT_TAGS = re.compile(
    r"onnx|openvino|pytorch|tf|tflite|keras|jax|flax|rust|coreml|gguf|safetensors|transformers|mteb|"
    r".*_compatible|text-(embeddings|generation)-inference|(deploy|region|license|arxiv|dataset|doi):.*"
)
TASK_TAGS = {*PIPELINE_TAGS.values(), "sentence-similarity", "summarization", "translation", "text2text-generation"}


@dataclass(frozen=True)
class CardOptions:
    """What a card says that the checkpoint's folder does not.

    Args:
        base_model: Hub id of the model it was made from; None = what the reports say.
        license: its id on the Hub ("apache-2.0"); None = the source's.
        language: codes ("en"); None = the source's.
        datasets: Hub ids of the training data; None = what the results say.
        pipeline_tag: the task on the Hub; None = the architecture's.
        title: above the card; None = the repository's name.
        notes: Markdown below the summary.
        evaluations: further scores, each with the fields of `huggingface_hub.EvalResult`.
    """

    base_model: str | None = None
    license: str | None = None
    language: list[str] | None = None
    datasets: list[str] | None = None
    pipeline_tag: str | None = None
    title: str | None = None
    notes: str | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def model_card(
    folder: Path, repo_id: str, options: CardOptions | None = None, history: ModelHistory | None = None
) -> ModelCard:
    """Fill a checkpoint's card.

    Args:
        folder: the checkpoint.
        repo_id: the repository that it is for, as the usage example names it.
        options: what the folder does not say.
        history: the folder's, where it was read before.

    Raises:
        OSError: if there is no config.json.
        ValueError: if the metadata of the folder's README.md, which may hold a licence, cannot be read, or an option
            is wrong. What else cannot be read is not told.
    """
    options = options or CardOptions()
    config = read_config(folder)
    architecture = (config.get("architectures") or [""])[0]
    variant, fields, table = _variant(config)
    if options.license is None:
        read_front_matter(folder / CARD_NAME)  # a licence must not be lost without a word
    history = history or read_history(folder)
    metadata = history.metadata | {"base_model": _hub_ids(history.metadata.get("base_model"))}
    history = replace(history, metadata=without_local_paths(metadata))
    # What the first step began with: a later one may have begun with the model that this one pushed.
    origin = options.base_model or hub_source(history.steps[:1])
    steps = without_local_paths(history.steps)
    is_sentence_model = (folder / "modules.json").is_file()
    task = options.pipeline_tag or ("sentence-similarity" if is_sentence_model else _pipeline_tag(architecture))
    scores = eval_results(last_training(steps), task) + [_evaluation(row) for row in options.evaluations]
    title, terms = options.title or repo_id.split("/")[-1], history.metadata if options.license is None else {}
    data = ModelCardData(
        library_name="sentence-transformers" if is_sentence_model else "transformers",
        pipeline_tag=task,
        tags=_tags(variant, fields) + _source_tags(history.metadata.get("tags", []), task, is_sentence_model),
        eval_results=scores or None,
        model_name=title if scores else None,
        **_origins(options, history, terms),
        ignore_metadata_errors=False,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=title,
        summary=summary(variant, fields, architecture, origin, steps),
        notes=options.notes,
        diagram=heads_diagram(variant, fields) if variant is not None else None,
        sizes=size_rows(table, variant, fields) if variant is not None else [],
        usage=usage_snippet(repo_id, config, is_sentence_model, task_of(steps), reads_pairs(steps)),
        code=code_paragraph(repo_id) if config.get("auto_map") else None,
        steps=step_lines(steps, origin),
        quality=quality_sentence(steps),
        sections=step_sections(steps, origin, (folder / REPORT_NAME).is_file()),
        metrics=[{name: plain(value) for name, value in vars(row).items() if value is not None} for row in scores],
        limits=limits(variant, fields, table, steps),
        licence=licence_text(data.license, terms),
        papers=papers(variant, fields),
    )
    return ModelCard(_signed(card.content))


def write_card(folder: Path) -> bool:
    """Write the card of a model into its folder, for a repository of the folder's name; say whether it was written.

    A README.md that lies there stays.

    Raises:
        OSError: if it cannot be written.
    """
    path = folder / CARD_NAME
    if path.exists():
        return False
    atomic_write(path, str(model_card(folder, folder.absolute().name)))
    return True


def _pipeline_tag(architecture: str) -> str | None:
    named = PIPELINE_TAGS.get(architecture.removeprefix("AttnVariant"))
    return named or PIPELINE_TAGS.get(architecture_head(architecture))


def architecture_head(architecture: str) -> str:
    """Return upstream's class name without the model's: "ForMaskedLM", "Model", "LMHeadModel"."""
    match = re.search(r"(For[A-Z]\w+|LMHeadModel|EncoderModel|Model)$", architecture)
    return match[1] if match else ""


def _origins(options: CardOptions, history: ModelHistory, terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the card's metadata say of what the model was made from; a licence given replaces its `terms`."""
    source = history.metadata
    return {
        "base_model": options.base_model or hub_source(history.steps) or source.get("base_model"),
        "datasets": options.datasets or _datasets(history.steps),
        "language": options.language or source.get("language"),
        "license": options.license or terms.get("license"),
        "license_name": terms.get("license_name"),
        "license_link": terms.get("license_link"),
    }


def _hub_ids(given: Any) -> list[str] | str | None:
    """Return those names that can be repositories: a folder's would mean nothing to others."""
    if isinstance(given, list):
        return [name for name in given if HUB_ID.fullmatch(name)] or None
    return given if isinstance(given, str) and HUB_ID.fullmatch(given) else None


def _signed(text: str) -> str:
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    return f"{text}\n{MARK.format(version=ATTN_VARIANTS_VERSION, digest=_digest(text))}\n"


def is_untouched(text: str) -> bool:
    """Say whether a card is one that `model_card` made and nobody edited since."""
    match = MARK_PATTERN.search(text)
    return match is not None and _digest(text[: match.start()].rstrip() + "\n") == match[1]


def refreshed_card(text: str) -> str | None:
    """Return a card with its paragraph on the code as today's; None for one that was written or edited by hand.

    All else in it is true of the model, and stays.
    """
    if not is_untouched(text):
        return None
    mark: Any = MARK_PATTERN.search(text)  # by which it is untouched
    repo_id = REPO_ID_PATTERN.search(text)
    body = text[: mark.start()]
    if repo_id is None or CODE_PATTERN.search(body) is None:
        return text
    made = CODE_PATTERN.sub(lambda _: code_paragraph(repo_id[1]), body, count=1)
    return text if made == body else _signed(made)


def eval_results(training: Step | None, task: str | None) -> list[EvalResult]:
    """Return the scores of a training for the card's model-index.

    Args:
        training: the step, None for a model that has no scores; each number `eval_<metric>` or `test_<metric>` is a
            score, the loss only where there is no other.
        task: the pipeline tag.
    """
    results = training or {}
    found = []
    for prefix, split, files in SPLITS:
        names = [name.removeprefix(prefix) for name in results if name.startswith(prefix)]
        names = [name for name in names if _is_number(results[prefix + name]) and not NO_SCORE.fullmatch(name)]
        names = [name for name in names if not name.startswith("loss")] or names
        data: dict[str, Any] = (data_name(results, files) if names else None) or HELD_OUT
        found += [
            EvalResult(
                task_type=task or "other",
                dataset_split=split,
                metric_type=name,
                metric_name=name,
                metric_value=round(results[prefix + name], 4),
                **data,
            )
            for name in names
        ]
    return found


def _variant(config: Mapping[str, Any]) -> tuple[Any, tuple[str, ...], Any]:
    """Return what a card of an architecture here is about, upstream's multi-head models included.

    Returns:
        The variant configuration, its fields of key/value heads and ranks that the model has attentions for, and its
        `CostTable`; None, () and None for other architectures.
    """
    if config["model_type"] not in supported_model_types():
        return None, (), None
    variant, table = variant_config(config), cost_table(config)
    return variant, used_fields(variant_model_class(table.architecture), variant), table


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _evaluation(row: Mapping[str, Any]) -> EvalResult:
    known = {each.name for each in dataclass_fields(EvalResult)}
    if not isinstance(row, Mapping) or not set(row) <= known:
        wrong = sorted(set(row) - known) if isinstance(row, Mapping) else [repr(row)]
        raise ValueError(f"an evaluation has the fields of huggingface_hub.EvalResult; unknown: {', '.join(wrong)}.")
    try:
        return EvalResult(**row)
    except TypeError as error:
        raise ValueError(f"an evaluation is not complete: {error}") from None


def _datasets(steps: Sequence[Step]) -> list[str] | None:
    found = []
    for step in steps:
        if step["kind"] == "training":
            named = data_name(step, ())
            benchmark = named is not None and ("dataset" in step or named["dataset_type"] == "nyu-mll/glue")
            name = named["dataset_type"] if named and benchmark else step["arguments"].get("dataset_name")
            if isinstance(name, str) and HUB_ID.fullmatch(name) and not Path(name).exists():
                found.append(name)
    return list(dict.fromkeys(found)) or None


def _source_tags(tags: Sequence[str], task: str | None, is_sentence_model: bool) -> list[str]:
    """Return what a source's tags say of what is made of it too: neither file formats nor another task."""
    gone = TASK_TAGS - {task} | (set() if is_sentence_model else {"sentence-transformers"}) | set(OWN_TAGS)
    return [tag for tag in dict.fromkeys(tags) if tag not in gone and not FORMAT_TAGS.fullmatch(tag.lower())]


def _tags(variant: Any, fields: Sequence[str]) -> list[str]:
    if variant is None:
        return [OWN_TAGS[0]]
    kv_fields = [name for name in variant.kv_heads_fields() if name in fields]
    counts = [(count, variant.query_heads(name)) for name in kv_fields for count in values_by_layer(variant, name)]
    are_true = (
        True,
        any(count == 1 < heads for count, heads in counts),
        any(1 < count < heads for count, heads in counts),
        any(getattr(variant, name) is not None for name in variant.rank_fields() if name in fields),
        bool(talking_parts(variant, fields)),
    )
    return [tag for tag, is_true in zip(OWN_TAGS, are_true, strict=True) if is_true]
