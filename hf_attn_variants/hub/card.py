"""The model card of a checkpoint: `templates/model_card.md`, filled from the files in the checkpoint's folder.

`config.json` contains the variant and its heads. `conversion_report.json`, `all_results.json` and, for earlier steps,
`model_history.json` describe how the model was made. The README.md of the original model has license, languages and
tags. Local paths, passwords and tokens are removed from all values.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..conversion.checkpoint.source import read_config
from ..conversion.report import Quality
from ..errors import as_value_error
from ..files import CARD_NAME, GENERATED_CARD, REPORT_NAME, atomic_write, load_json
from ..glue_tasks import TASKS
from ..inspection.costs import CostTable, cost_table, score_parts, used_fields, values_by_layer, variant_config
from ..inspection.tables import talking_parts
from ..model_history import ModelHistory, read_front_matter, read_history
from ..modeling.fields.field_table import FIELDS, row_of
from ..modeling.fields.field_texts import FIELD_TEXTS, PLACES, card_text
from ..modeling.mechanisms.head_sharing import GroupedQuery, HeadSharing, MultiQuery, sharing_of
from ..modeling.mechanisms.kernels.kernel_table import kernel_class
from ..modeling.mechanisms.latents import Latent
from ..modeling.mechanisms.patterns.pattern_table import pattern_class
from ..modeling.mechanisms.talking_heads import TalkingHeads, talks
from ..modeling.variant_names import ATTN_VARIANTS_VERSION, NEWEST_RUN, OLDEST_RUN
from ..registration import supported_model_types, variant_config_class, variant_model_class
from .heads_diagram import heads_diagram

__all__ = [
    "OWN_TAGS",
    "CardOptions",
    "auto_class",
    "begins_with_model",
    "code",
    "data_name",
    "eval_results",
    "holds_secret",
    "hub_source",
    "is_exact",
    "is_untouched",
    "last_training",
    "model_card",
    "names_places",
    "plain",
    "refreshed_card",
    "shared_content",
    "step_facts",
    "text_columns",
    "variant_facts",
    "without_local_paths",
    "write_card",
]

LOCAL_PATH = re.compile(r"(/|~|\.\.?[/\\]|[A-Za-z]:[/\\]|\\\\|file:)")
# Arguments that name a file or folder however it is written.
PATH_ARGUMENT = re.compile(r".*_(file|files|dir)")
PART = r"""[^\s/\\"'`<>|;,()\[\]{}]"""
# In the middle of a text: from the root or the home, of two parts at least; of Windows; of a server.
PATH_IN_TEXT = re.compile(
    rf"(?<![\w/.~])(?:file:/{{0,2}})?(?:~[\w.-]*/(?:{PART}+/)*|\.{{0,2}}/(?:{PART}+/)+){PART}*"
    rf"|(?<!\w)[A-Za-z]:[/\\]+(?:{PART}+[/\\]+)*{PART}*|(?<![\w\\])\\\\{PART}+(?:\\+{PART}+)+"
)
# Anybody's home, on any system: what follows is of a user, and is taken out.
HOME = re.compile(r"(file:/*)?/(home|Users)/[^/]+/?|~[^/]*/?|/root/?|[A-Za-z]:[/\\]+Users[/\\]+[^/\\]+[/\\]*")
# User and password of an address, tokens of the Hub, and what addresses that were signed end in.
SECRETS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s]*@", re.IGNORECASE), r"\1"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_..."),
    (
        re.compile(
            r"([?&][\w.-]*(?:token|key|secret|password|passwd|signature|sig|credential)[\w.-]*=)[^&\s\"'#]+",
            re.IGNORECASE,
        ),
        r"\1...",
    ),
)
# Of a model's JSON files: words of vocabularies and labels may look like anything and stay.
WORDS = re.compile(r"id2label|label2id|.*_tokens?|added_tokens_decoder|chat_template|prompts|prefix|weight_map")
WORD_FILES = ("tokenizer.json", "vocab*.json", "added_tokens.json", "*.index.json")


def names_places(text: str) -> bool:
    """Return whether a text names folders of some machine."""
    return PATH_IN_TEXT.search(text) is not None


def holds_secret(text: str) -> bool:
    """Return whether a text holds a token, or an address with a password."""
    return any(pattern.search(text) for pattern, _ in SECRETS)


def without_local_paths(value: Any, name: str = "", is_report: bool = True) -> Any:
    """Return JSON values with each path shortened to its last part, and without passwords and tokens.

    Args:
        value: the values.
        name: of the field that holds them.
        is_report: whether they are of this package: each text that begins like a path is one, and so is any text in a
            field called "..._file" or "..._dir". In configurations of others a text must be both, words stay, and a
            field may be called "...path" too.
    """
    if not is_report and WORDS.fullmatch(name):
        return value
    if isinstance(value, dict):
        return {key: without_local_paths(each, str(key), is_report) for key, each in value.items()}
    if isinstance(value, list):
        return [without_local_paths(each, name, is_report) for each in value]
    if not isinstance(value, str):
        return value
    is_named, is_path = PATH_ARGUMENT.fullmatch(name) is not None, LOCAL_PATH.match(value) is not None
    if (is_named or is_path) if is_report else (is_named or name.endswith("path")) and is_path:
        return _last_part(_without_secrets(value))
    return PATH_IN_TEXT.sub(lambda found: _last_part(found[0]), _without_secrets(value))


def shared_content(path: Path, is_report: bool) -> bytes | None:
    """Return the content of a JSON file for the Hub; None = the file goes there unchanged.

    Args:
        path: the file.
        is_report: as for `without_local_paths`.

    Raises:
        OSError, ValueError: if it cannot be read.
    """
    if not path.name.endswith(".json") or any(fnmatchcase(path.name, pattern) for pattern in WORD_FILES):
        return None
    value = load_json(path)
    if is_report and not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(value).__name__}.")
    shared = without_local_paths(value, is_report=is_report)
    return None if shared == value else f"{json.dumps(shared, indent=2, ensure_ascii=False)}\n".encode()


def _without_secrets(text: str) -> str:
    for pattern, instead in SECRETS:
        text = pattern.sub(instead, text)
    return text


def _last_part(path: str) -> str:
    if HOME.fullmatch(path):
        return "~"  # whose it is is a name too
    # A Windows path splits at both kinds of slash; on other systems a backslash is a letter like any other.
    windows = re.match(r"[A-Za-z]:|\\\\", path)
    return (PureWindowsPath(path) if windows else PurePath(path)).name


Step = Mapping[str, Any]
# The arguments that describe a training, and those that describe an evaluation.
TRAINING_ARGUMENTS = """task_name dataset_name objective teacher num_train_epochs max_train_steps pretraining_steps
alpha class_weights per_device_train_batch_size gradient_accumulation_steps learning_rate optim lr_scheduler_type
num_warmup_steps warmup_ratio weight_decay max_grad_norm label_smoothing_factor dropout_rate max_length
max_target_length mixed_precision trainable seed""".split()
EVALUATION_ARGUMENTS = ("task_name", "dataset_name", "max_length", "max_target_length", "num_beams", "seed")


def step_facts(steps: Sequence[Step], base_model: str | None) -> list[dict[str, Any]]:
    """Return the steps with what the template needs besides.

    Args:
        steps: of `ModelHistory`, without local paths.
        base_model: Hub id of the model that the first step started from.

    Returns:
        For each step its fields, "verb" and "title". For a conversion also "origin", and "heads" holds those that it
        changed. For a training also "data", "no_gain" and "rows".
    """
    found = []
    for index, step in enumerate(steps):
        verb, title = _verb_and_title(step)
        facts: dict[str, Any] = {**step, "verb": verb, "title": title}
        if step["kind"] == "conversion":
            heads = step.get("heads", {})
            facts["heads"] = {name: pair for name, pair in heads.items() if pair[0] != pair[1]} or heads
            facts["origin"] = base_model if index == 0 and base_model else step.get("source", "a checkpoint")
            facts["quality"] = Quality.of(step.get("quality", {}))
        else:
            before, after = step.get("initial_eval_loss"), step.get("eval_loss")
            facts["no_gain"] = bool(step.get("steps")) and before is not None and after is not None and after >= before
            facts["data"] = (data_name(step, ("train_file", "source_file")) or {}).get("dataset_name")
            facts["rows"] = _argument_rows(step["arguments"], verb == "evaluated")
        found.append(facts)
    return found


def last_training(steps: Sequence[Step]) -> Step | None:
    """Return the training whose scores the model has; None if a conversion followed it."""
    return steps[-1] if steps and steps[-1]["kind"] == "training" else None


def begins_with_model(step: Step) -> bool:
    """Return whether a step started from a model, and not from scratch."""
    return step["kind"] == "conversion" or step["arguments"].get("model_name_or_path") is not None


def hub_source(steps: Sequence[Step]) -> str | None:
    """Return the Hub id that the latest step names; a folder's name would mean nothing to others."""
    for step in reversed(steps):
        name = step["arguments"].get("model_name_or_path") if step["kind"] == "training" else None
        if step["kind"] == "conversion" and step.get("source_revision"):
            name = step.get("source")
        if isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not Path(name).exists():
            return name
    return None


def text_columns(steps: Sequence[Step]) -> Sequence[str]:
    """Return the columns of text that the model was last trained on; () if no step names them."""
    for step in reversed(steps):
        if step["kind"] == "training" and ("problem_type" in step or _glue_task(step) in TASKS):
            task = TASKS.get(_glue_task(step) or "")
            return [names[0] for names in task.text_columns] if task is not None else step.get("text_columns", ())
    return ()


def data_name(training: Step, file_arguments: Sequence[str]) -> dict[str, str] | None:
    """Return the name of a training's data, as the fields of `huggingface_hub.EvalResult`.

    Args:
        training: the step.
        file_arguments: the arguments that name the split's files.
    """
    arguments, task = training["arguments"], _task_name(training)
    if "dataset" in training:
        return training["dataset"]
    if task in TASKS:
        return {"dataset_type": "nyu-mll/glue", "dataset_name": f"GLUE {task.upper()}", "dataset_config": task}
    given = [arguments.get(name) for name in file_arguments]
    paths = [each for value in given for each in (value if isinstance(value, list) else [value]) if each]
    named = arguments.get("dataset_name") or next((PurePath(each).name for each in paths), None)
    if named is None and (task == "squad" or "version_2_with_negative" in arguments):
        if arguments.get("version_2_with_negative"):
            return {"dataset_type": "rajpurkar/squad_v2", "dataset_name": "SQuAD 2.0"}
        return {"dataset_type": "rajpurkar/squad", "dataset_name": "SQuAD 1.1"}
    return {"dataset_type": re.sub(r"[^\w./-]+", "-", named), "dataset_name": named} if named else None


def _argument_rows(arguments: Mapping[str, Any], is_evaluation: bool) -> list[tuple[str, Any]]:
    names = EVALUATION_ARGUMENTS if is_evaluation else TRAINING_ARGUMENTS
    without = "num_train_epochs" if not is_evaluation and arguments.get("max_train_steps") is not None else None
    return [(name, arguments[name]) for name in names if arguments.get(name) not in (None, "") and name != without]


def _verb_and_title(step: Step) -> tuple[str, str]:
    if step["kind"] == "conversion":
        return "converted", "Conversion"
    arguments = step["arguments"]
    if step.get("steps") == 0:
        return "evaluated", "Evaluation"
    # Pretraining has an objective among its arguments, too.
    if "objective" in step or ("objective" in arguments and "whole_word_mask" not in arguments):
        return "distilled" if arguments.get("teacher") else "uptrained", "Uptraining"
    is_pretraining = "mlm_probability" in arguments or "noise_density" in arguments
    return "pretrained" if is_pretraining else "fine-tuned", "Training"


def _glue_task(training: Step) -> str | None:
    return None if "dataset" in training else _task_name(training)


def _task_name(training: Step) -> str | None:
    # What was asked for may be written in another way ("STS-B") than the results write it.
    return training.get("task_name") or training["arguments"].get("task_name")


# The prefixes of the fields of a stack, by that of its key/value heads; cross-attention is in the decoder's.
OF_STACKS = {"num_key_value_heads": ("", "cross_"), "encoder_num_key_value_heads": ("encoder_",)}
OWN_TAGS = (
    "attn-variants",
    "multi-query-attention",
    "grouped-query-attention",
    "multi-head-latent-attention",
    "talking-heads-attention",
)
ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
MARKS = re.compile(r"[\\`*\[\]|$~]|(?<![^\W_])_|_(?![^\W_])|^[#+=-]")


def plain(value: Any) -> str:
    """Return a value as one line of text in which nothing is Markdown or HTML."""
    return MARKS.sub(r"\\\g<0>", " ".join(str(value).split()).translate(ENTITIES))


def code(value: Any) -> str:
    """Return a value as one line of Markdown code, between as many backticks as it takes."""
    text = " ".join(str(value).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def variant_facts(variant: Any, fields: Sequence[str], table: CostTable) -> dict[str, Any]:
    """Return what the template says about a variant, with its "tags" on the Hub and its "papers".

    Args:
        variant: its configuration.
        fields: those of key/value heads and ranks that the model has attentions for, the decoder's first.
        table: its costs.
    """
    kv_fields = [name for name in variant.kv_heads_fields() if name in fields]
    names = [name for name in variant.rank_fields() if name in fields and getattr(variant, name) is not None]
    latents, talking = [_latent(variant, name) for name in names], talking_parts(variant, fields)
    patterns, kernels = (_on_card(variant, fields, fact) for fact in ("pattern", "kernel"))
    shared = {
        count for name in kv_fields for count in values_by_layer(variant, name) if count != variant.query_heads(name)
    }
    ranks = {rank for each in latents for rank in each["ranks"]}
    have_tags = (True, 1 in shared, bool(shared - {1}), bool(latents), bool(talking))
    papers = [MultiQuery.paper] * (1 in shared) + [GroupedQuery.paper] * bool(shared)
    papers += [Latent.paper] * bool(ranks - {variant.hidden_size})
    papers += [Latent.paper_of_input] * (variant.hidden_size in ranks) + [TalkingHeads.paper] * bool(talking)
    of_stacks = [getattr(variant, f"{name.removesuffix(HeadSharing.field)}attention_pattern") for name in kv_fields]
    papers += [pattern_class(name).paper for name in of_stacks if name is not None]
    papers += [kernel_class(each["name"]).paper for each in kernels]
    now, full = table.current, table.rows[0].kv_cache_bytes_per_token or {}
    given_ranks = {getattr(variant, name) for name in variant.rank_fields()} - {None}
    return {
        "stacks": [_stack(variant, name) for name in kv_fields],
        "value_head_dim": variant.value_head_dim,
        "latents": latents,
        "scores": score_parts(variant, kv_fields),
        "talking": talking,
        "patterns": patterns,
        "kernels": kernels,
        "head_counts": {name: _value(variant, name) for name in variant.head_fields(fields)},
        "parameters": now.parameters,
        "attention_parameters": now.attention_parameters,
        "caches": [(site, count, full[site]) for site, count in (now.kv_cache_bytes_per_token or {}).items()],
        "dtype": table.dtype,
        "decodes": "decoder" in now.flops_per_token,
        "has_cache": now.kv_cache_bytes_per_token is not None,
        "shares": bool(given_ranks or HeadSharing.asked_for(variant, row_of(fields[0])[0])),
        "keeps_inputs": variant.hidden_size in given_ranks,
        "talks": talks(variant),
        "diagram": heads_diagram(variant, fields),
        "papers": list(dict.fromkeys(papers)),
        "tags": [tag for tag, is_true in zip(OWN_TAGS, have_tags, strict=True) if is_true],
    }


def is_exact(variant: Any, steps: Sequence[Step]) -> bool:
    """Return whether the last conversion changed no output: it cached inputs instead of keys and values, no more.

    A variant with a pattern or a kernel never counts, because the steps do not name these.
    """
    conversion = [step for step in steps if step["kind"] == "conversion"][-1:]
    changes = [pair for step in conversion for pair in step.get("heads", {}).values() if pair[0] != pair[1]]
    names = [f"{prefix}attention_{kind}" for prefix in PLACES for kind in ("pattern", "kernel")]
    is_plain = not any(getattr(variant, name, None) for name in names)
    return bool(changes) and is_plain and all(pair == [None, variant.hidden_size] for pair in changes)


def auto_class(architecture: str, config: Mapping[str, Any]) -> str:
    """Return the auto class of Transformers that loads a model."""
    name = f"AttnVariant{architecture.removeprefix('AttnVariant')}"
    if config["model_type"] in supported_model_types():
        auto_classes = variant_config_class(config["model_type"]).auto_classes
        # A BART that generates has a masked-language-model class too, and every pretrained model one for pretraining.
        seldom = ("AutoModelForMaskedLM", "AutoModelForTextEncoding", "AutoModelForPreTraining")
        found = [each for each, model in auto_classes.items() if model == name]
        if found:
            return min(found, key=lambda each: seldom.index(each) if each in seldom else -1)
    heads = "MaskedLM|CausalLM|SequenceClassification|TokenClassification|QuestionAnswering"
    match = re.search(rf"For({heads})$", architecture)
    return f"AutoModelFor{match[1]}" if match else "AutoModel"


def _on_card(variant: Any, fields: Sequence[str], fact: str) -> list[dict[str, Any]]:
    """Return `_named` of the fields with a fact that are set in the stacks of `fields`."""
    prefixes = [prefix for heads, each in OF_STACKS.items() if heads in fields for prefix in each]
    rows = [row for row in FIELDS if fact in row.facts and FIELD_TEXTS[row.name].card is not None]
    names = [prefix + row.name for prefix in prefixes for row in rows if prefix in row.prefixes]
    return [_named(variant, name) for name in names if getattr(variant, name, None) is not None]


def _stack(variant: Any, name: str) -> dict[str, Any]:
    heads, counts = variant.query_heads(name), set(values_by_layer(variant, name)) or {getattr(variant, name)}
    kind, where = sharing_of(counts, heads).words, "encoder" if name.startswith("encoder_") else "decoder"
    return {"kind": kind, "least": min(counts), "most": max(counts), "heads": heads, "where": where}


def _latent(variant: Any, name: str) -> dict[str, Any]:
    prefix, row = row_of(name)
    layers = values_by_layer(variant, name)
    ranks = sorted({rank for rank in layers if rank is not None})
    place = {"here": PLACES[prefix].here, "token": PLACES[prefix].token, "is_one_for_all": prefix in row.one_for_all}
    return _named(variant, name) | place | {"ranks": ranks, "is_input": ranks == [variant.hidden_size]}


def _named(variant: Any, name: str) -> dict[str, Any]:
    """Return a field's value, the words for it, and in which layers it has one; of a kernel `value` is its name."""
    layers = values_by_layer(variant, name)
    having = [layer for layer, value in enumerate(layers) if value is not None]
    facts = {"value": _value(variant, name), "words": card_text(name), "layers": len(layers), "having": having}
    return facts | {"name": getattr(variant, name)}


def _value(variant: Any, name: str) -> Any:
    """Return a field's value, or the list of those of the layers."""
    values = (variant.per_layer_values or {}).get(name)
    return getattr(variant, name) if values is None else values


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
