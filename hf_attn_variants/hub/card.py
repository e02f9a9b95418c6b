"""The model card of a checkpoint: `templates/model_card.md`, filled from the files in the checkpoint's folder.

`config.json` contains the variant and its heads. `conversion_report.json`, `all_results.json` and, for earlier steps,
`model_history.json` describe how the model was made. The README.md of the original model has license, languages and
tags.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..conversion.checkpoint.source import read_config
from ..errors import as_value_error
from ..files import CARD_NAME, GENERATED_CARD, REPORT_NAME, atomic_write
from ..inspection.costs import cost_table, used_fields, variant_config
from ..model_history import ModelHistory, read_front_matter, read_history
from ..modeling.variant_names import ATTN_VARIANTS_VERSION, NEWEST_RUN, OLDEST_RUN
from ..registration import supported_model_types, variant_model_class
from .card_facts import OWN_TAGS, auto_class, code, is_exact, plain, variant_facts
from .card_steps import Step, data_name, hub_source, last_training, step_facts, text_columns
from .local_paths import without_local_paths

__all__ = ["CardOptions", "eval_results", "is_untouched", "model_card", "refreshed_card", "write_card"]

TEMPLATE = Path(__file__).with_name("templates") / "model_card.md"
MARK = GENERATED_CARD + "{version}; digest {digest} -->"
MARK_PATTERN = re.compile(rf"\n{GENERATED_CARD}\S+; digest ([0-9a-f]{{16}}) -->\s*$")
# The paragraph about the code, as the template and as cards have it, and the repository that a card is of.
CODE_PATTERN = re.compile(
    r"^The attention is not part of [tT]ransformers[:.] .*?(?=\n\n|\n\{% endif)", re.MULTILINE | re.DOTALL
)
REPO_ID_PATTERN = re.compile(r'\.from_pretrained\("([^"\n]+)"')
# Names of results that describe a run and are not scores.
NO_SCORE = re.compile(
    r"(.*_)?(samples|questions|runtime|windows|total|rows|tokens|seconds)(_.*)?|.*(per_second|thresh).*"
)
# The prefix of the scores of a split, its name, and the arguments with its file.
SPLITS = (
    ("eval_", "validation", ("validation_file", "validation_source_file")),
    ("test_", "test", ("test_file", "test_source_file")),
)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
HELD_OUT = {"dataset_type": "held-out-text", "dataset_name": "held-out text"}
# Tags of an original model that do not apply to a variant: file formats, and services of the Hub.
FORMAT_TAGS = re.compile(
    r"onnx|openvino|pytorch|tf|tflite|keras|jax|flax|rust|coreml|gguf|safetensors|transformers|mteb|"
    r".*_compatible|text-(embeddings|generation)-inference|(deploy|region|license|arxiv|dataset|doi):.*"
)
# The task on the Hub of each head; that of an encoder-decoder depends on its training.
PIPELINE_TAGS = {
    "ForMaskedLM": "fill-mask",
    "ForMultipleChoice": "multiple-choice",
    "ForQuestionAnswering": "question-answering",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "LMHeadModel": "text-generation",
    "Model": "feature-extraction",
    "EncoderModel": "feature-extraction",
    "ForAudioClassification": "audio-classification",
    "WhisperForConditionalGeneration": "automatic-speech-recognition",
}
TASK_TAGS = {*PIPELINE_TAGS.values(), "sentence-similarity", "summarization", "translation", "text2text-generation"}


@dataclass(frozen=True)
class CardOptions:
    """Values of a model card that are not in the files of the checkpoint.

    Args:
        base_model: Hub id of the base model; None = the one in the reports.
        license: id of the license on the Hub ("apache-2.0"); None = the license of the original model.
        language: language codes ("en"); None = the languages of the original model.
        datasets: Hub ids of the training data; None = those in the results.
        pipeline_tag: task on the Hub; None = the task of the architecture.
        title: title of the card; None = the name of the repository.
        notes: Markdown for the section "Notes".
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
    """Return the model card of a checkpoint.

    Args:
        folder: the checkpoint.
        repo_id: the repository that the example on the card loads.
        options: what no file of the folder says.
        history: that of the folder, if it was read before.

    Raises:
        OSError: if there is no config.json.
        ValueError: if the metadata of the folder's README.md, which may hold a license, cannot be read, an option is
            wrong, or a report holds a value of another type.
    """
    options = options or CardOptions()
    config = read_config(folder)
    if options.license is None:
        read_front_matter(folder / CARD_NAME)  # a license must not be lost without a word
    history = history or read_history(folder)
    architecture = (config.get("architectures") or [""])[0]
    variant, facts = _variant(config)
    is_sentence_model, loader = (folder / "modules.json").is_file(), auto_class(architecture, config)
    task = options.pipeline_tag or ("sentence-similarity" if is_sentence_model else _pipeline_tag(architecture))
    with as_value_error("evaluations must be a list, each with the fields of huggingface_hub.EvalResult", ValueError):
        evaluations = [EvalResult(**row) for row in options.evaluations]
    with as_value_error(f"a report in {folder} holds a value that a model card cannot show", ValueError):
        steps = without_local_paths(history.steps)
        # The model that the first step started from: a later one may have started from an earlier push of this model.
        origin = options.base_model or hub_source(history.steps[:1])
        scores = eval_results(last_training(steps), task) + evaluations
        options = replace(options, title=options.title or repo_id.split("/")[-1])
        data = _metadata(options, history, task, is_sentence_model, facts["tags"] if facts else OWN_TAGS[:1], scores)
        card = ModelCard.from_template(
            data,
            template_path=str(TEMPLATE),
            title=options.title,
            repo_id=repo_id,
            notes=options.notes,
            architecture=architecture,
            variant=facts,
            is_exact=is_exact(variant, steps),
            origin=origin,
            steps=step_facts(steps, origin),
            has_report=(folder / REPORT_NAME).is_file(),
            scores=scores,
            license=data.license,
            terms=history.metadata if options.license is None else {},
            auto_class=loader,
            columns=text_columns(steps),
            config=config,
            is_sentence_model=is_sentence_model,
            oldest_run=OLDEST_RUN,
            newest_run=NEWEST_RUN,
            plain=plain,
            code=code,
        )
    return ModelCard(_signed(card.content))


def _metadata(
    options: CardOptions,
    history: ModelHistory,
    task: str | None,
    is_sentence_model: bool,
    own_tags: Sequence[str],
    scores: list[EvalResult],
) -> ModelCardData:
    source = without_local_paths(history.metadata | {"base_model": _hub_ids(history.metadata.get("base_model"))})
    terms = source if options.license is None else {}
    return ModelCardData(
        library_name="sentence-transformers" if is_sentence_model else "transformers",
        pipeline_tag=task,
        tags=[*own_tags, *_source_tags(source.get("tags"), task, is_sentence_model)],
        eval_results=scores or None,
        model_name=options.title if scores else None,
        base_model=options.base_model or hub_source(history.steps) or source.get("base_model"),
        datasets=options.datasets or _datasets(history.steps),
        language=options.language or source.get("language"),
        license=options.license or terms.get("license"),
        license_name=terms.get("license_name"),
        license_link=terms.get("license_link"),
        ignore_metadata_errors=False,
    )


def write_card(folder: Path) -> bool:
    """Write the card of a model into its folder, for a repository of the folder's name, unless it has a README.md.

    Returns:
        Whether it was written.

    Raises:
        OSError: if it cannot be written.
    """
    path = folder / CARD_NAME
    if path.exists():
        return False
    atomic_write(path, str(model_card(folder, folder.absolute().name)))
    return True


def _pipeline_tag(architecture: str) -> str | None:
    match = re.search(r"(For[A-Z]\w+|LMHeadModel|EncoderModel|Model)$", architecture)
    named = PIPELINE_TAGS.get(architecture.removeprefix("AttnVariant"))
    return named or PIPELINE_TAGS.get(match[1] if match else "")


def _hub_ids(given: Any) -> list[str] | str | None:
    """Return those names that can be repositories: a folder's would mean nothing to others."""
    if isinstance(given, list):
        return [name for name in given if HUB_ID.fullmatch(name)] or None
    return given if isinstance(given, str) and HUB_ID.fullmatch(given) else None


def _signed(text: str) -> str:
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    return f"{text}\n{MARK.format(version=ATTN_VARIANTS_VERSION, digest=_digest(text))}\n"


def is_untouched(text: str) -> bool:
    """Return whether `model_card` made a card and nobody has edited it since."""
    match = MARK_PATTERN.search(text)
    return match is not None and _digest(text[: match.start()].rstrip() + "\n") == match[1]


def refreshed_card(text: str) -> str | None:
    """Return a card with the current paragraph about the code; None for a card that was written or edited by hand."""
    if not is_untouched(text):
        return None
    mark: Any = MARK_PATTERN.search(text)  # by which it is untouched
    repo_id, body = REPO_ID_PATTERN.search(text), text[: mark.start()]
    if repo_id is None or CODE_PATTERN.search(body) is None:
        return text
    paragraph: Any = CODE_PATTERN.search(TEMPLATE.read_text(encoding="utf-8"))
    values = {"repo_id": repo_id[1], "oldest_run": OLDEST_RUN, "newest_run": NEWEST_RUN}
    made = CODE_PATTERN.sub(lambda _: jinja2.Template(paragraph[0]).render(values), body, count=1)
    return text if made == body else _signed(made)


def eval_results(training: Step | None, task: str | None) -> list[EvalResult]:
    """Return the scores of a training for the card's model-index: the losses only if there are no others.

    Args:
        training: the step; None for a model without scores.
        task: the pipeline tag.
    """
    found = []
    for prefix, split, files in SPLITS:
        scores = {
            name.removeprefix(prefix): value for name, value in (training or {}).items() if name.startswith(prefix)
        }
        names = [name for name in scores if not NO_SCORE.fullmatch(name)]
        names = [name for name in names if not name.startswith("loss")] or names
        data: Any = (data_name(training, files) if training and names else None) or HELD_OUT
        for name in names:
            row = {"metric_type": name, "metric_name": name, "metric_value": round(scores[name], 4)}
            found.append(EvalResult(task_type=task or "other", dataset_split=split, **row, **data))
    return found


def _variant(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Return the variant configuration of a model and the facts about it; None for other architectures."""
    if config["model_type"] not in supported_model_types():
        return None, None
    variant, table = variant_config(config), cost_table(config)
    return variant, variant_facts(variant, used_fields(variant_model_class(table.architecture), variant), table)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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


def _source_tags(given: Any, task: str | None, is_sentence_model: bool) -> list[str]:
    """Return the original model's tags that hold for this one too: no file formats, and no other task."""
    gone = TASK_TAGS - {task} | (set() if is_sentence_model else {"sentence-transformers"}) | set(OWN_TAGS)
    found = dict.fromkeys(given if isinstance(given, list) else ())
    return [tag for tag in found if tag not in gone and not FORMAT_TAGS.fullmatch(tag.lower())]
