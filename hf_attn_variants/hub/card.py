"""Generates model cards from `templates/model_card.md` and the files in a checkpoint folder.

`config.json` describes the variant. `conversion_report.json`, `all_results.json` and, for earlier steps,
`model_history.json` describe how the model was created. The license, languages and tags are taken from the README.md
of the original model. Local paths, passwords and tokens are removed from all values.
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
from ..conversion.plan import get_field_value
from ..conversion.report import Quality
from ..errors import convert_to_value_error
from ..files import CARD_NAME, GENERATED_CARD, REPORT_NAME, atomic_write, load_json
from ..glue_tasks import TASKS
from ..inspection.costs import (
    CostTable,
    compute_cost_table,
    describe_extensions,
    describe_scores,
    get_values_by_layer,
    list_used_fields,
    make_variant_config,
)
from ..inspection.text_tables import describe_talking_projections, format_layers, get_talking_heads_by_prefix
from ..model_folder import ModelHistory, read_front_matter, read_history
from ..modeling.fields.composition import get_requested_extensions
from ..modeling.fields.field_table import FIELD_TEXTS, PLACE_WORDINGS, VARIANT_FIELDS, get_card_text, look_up_field
from ..modeling.mechanisms.head_sharing import (
    GroupedQueryAttention,
    HeadSharing,
    MultiQueryAttention,
    get_consecutive_groups,
    get_head_sharing,
)
from ..modeling.mechanisms.kernels.kernel_table import get_kernel_class
from ..modeling.mechanisms.latents import LatentAttention
from ..modeling.mechanisms.mechanism import PREFIXES
from ..modeling.mechanisms.patterns.pattern_table import get_pattern_class
from ..modeling.mechanisms.talking_heads import (
    BOTH,
    LOGITS,
    WEIGHTS,
    TalkingHeadsSettings,
    get_num_query_heads,
    has_talking_heads,
)
from ..modeling.variant_names import ATTN_VARIANTS_VERSION, NEWEST_TESTED, OLDEST_TESTED
from ..registration import get_variant_config_class, get_variant_model_class, is_native, list_supported_model_types

LOCAL_PATH = re.compile(r"(/|~|\.\.?[/\\]|[A-Za-z]:[/\\]|\\\\|file:)")
# Arguments that contain the name of a file or folder.
PATH_ARGUMENT = re.compile(r".*_(file|files|dir)")
PATH_PART = r"""[^\s/\\"'`<>|;,()\[\]{}]"""
# Paths within a text, which are absolute paths or home folder paths with at least two parts, Windows paths, or server
# paths.
PATH_IN_TEXT = re.compile(
    rf"(?<![\w/.~])(?:file:/{{0,2}})?(?:~[\w.-]*/(?:{PATH_PART}+/)*|\.{{0,2}}/(?:{PATH_PART}+/)+){PATH_PART}*"
    rf"|(?<!\w)[A-Za-z]:[/\\]+(?:{PATH_PART}+[/\\]+)*{PATH_PART}*|(?<![\w\\])\\\\{PATH_PART}+(?:\\+{PATH_PART}+)+"
)
# The part of a path between its root and the name of a user: "home" on Linux, and "Users" on macOS and Windows.
HOME_PARENTS = (("home",), ("Users",))
# Users and passwords in URLs, Hub tokens, and the signatures at the end of signed URLs.
SECRET_PATTERNS = (
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s]*@", re.IGNORECASE), r"\1"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), "hf_..."),
    (
        re.compile(
            r"(?i)([?&][\w.-]*(?:token|key|secret|password|passwd|signature|sig|credential)[\w.-]*=)[^&\s\"'#]+"
        ),
        r"\1...",
    ),
)
# Fields and files with vocabulary words or labels, which can look like paths. They are not changed.
VOCABULARY_FIELDS = re.compile(
    r"id2label|label2id|.*_tokens?|added_tokens_decoder|chat_template|prompts|prefix|weight_map"
)
VOCABULARY_FILES = ("tokenizer.json", "vocab*.json", "added_tokens.json", "*.index.json")


def contains_local_path(text: str) -> bool:
    """Return whether a text contains the path of a local folder."""
    return PATH_IN_TEXT.search(text) is not None


def contains_secret(text: str) -> bool:
    """Return whether a text contains an access token, or a URL with a password."""
    return any(pattern.search(text) for pattern, _ in SECRET_PATTERNS)


def remove_local_paths(value: Any, name: str = "", is_report: bool = True) -> Any:
    """Shorten each path in JSON values to its last part, and remove passwords and access tokens.

    Args:
        value: The JSON values.
        name: The name of the field that contains the values.
        is_report: Whether the values are from one of this package's reports. In a report, a text is shortened if it
            begins like a path, or if it is in a field whose name ends with "_file", "_files" or "_dir". In other
            JSON files, both conditions must be met, the name can also end with "path", and vocabulary fields are
            not changed.
    """
    if not is_report and VOCABULARY_FIELDS.fullmatch(name):
        return value
    if isinstance(value, dict):
        return {key: remove_local_paths(item, str(key), is_report) for key, item in value.items()}
    if isinstance(value, list):
        return [remove_local_paths(item, name, is_report) for item in value]
    if not isinstance(value, str):
        return value
    is_path_field, is_path = PATH_ARGUMENT.fullmatch(name) is not None, LOCAL_PATH.match(value) is not None
    if (is_path_field or is_path) if is_report else (is_path_field or name.endswith("path")) and is_path:
        return _get_basename(_remove_secrets(value))
    return PATH_IN_TEXT.sub(lambda match: _get_basename(match[0]), _remove_secrets(value))


def redact_json_file(path: Path, is_report: bool) -> bytes | None:
    """Return the content of a JSON file without local paths and secrets, or None if it can be shared unchanged.

    Args:
        path: The file.
        is_report: Whether the file is one of this package's reports (see `remove_local_paths`).

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file does not contain valid JSON.
    """
    if not path.name.endswith(".json") or any(fnmatchcase(path.name, pattern) for pattern in VOCABULARY_FILES):
        return None
    value = load_json(path)
    if is_report and not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object, got {type(value).__name__}.")
    shared = remove_local_paths(value, is_report=is_report)
    return None if shared == value else f"{json.dumps(shared, indent=2, ensure_ascii=False)}\n".encode()


def _remove_secrets(text: str) -> str:
    for pattern, replacement in SECRET_PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def _get_basename(path: str) -> str:
    path = re.sub("^file:/*", "/", path)
    # A Windows path can contain both types of slashes. On other systems, a name can contain a backslash.
    pure_path = PureWindowsPath(path) if re.match(r"[A-Za-z]:|\\\\", path) else PurePath(path)
    is_home = pure_path.is_absolute() and pure_path.parts[1:-1] in HOME_PARENTS
    # The name of a home folder is the name of a user, which is private.
    return "~" if is_home or re.fullmatch("~[^/]*/?", path) else pure_path.name


Step = Mapping[str, Any]
# The arguments that model cards show for training steps and for evaluations.
TRAINING_ARGUMENTS = """task_name dataset_name objective teacher multi_head_model num_train_epochs max_train_steps
pretraining_steps alpha class_weights per_device_train_batch_size gradient_accumulation_steps learning_rate optim
lr_scheduler_type num_warmup_steps warmup_ratio weight_decay max_grad_norm label_smoothing_factor dropout_rate
max_length max_target_length mixed_precision trainable seed""".split()
EVALUATION_ARGUMENTS = ("task_name", "dataset_name", "max_length", "max_target_length", "num_beams", "seed")


def build_step_template_values(steps: Sequence[Step], base_model: str | None) -> list[dict[str, Any]]:
    """Extend each step with the values that the template requires.

    Args:
        steps: The steps in a `ModelHistory`, without local paths.
        base_model: The Hub id of the model from which the first step started.

    Returns:
        The fields of each step with additional fields "verb" and "title". Conversions also have "origin" and
        "quality", and their "heads" only contain changed values. Training steps also have "data", "no_gain" and
        "rows".
    """
    template_values = []
    for index, step in enumerate(steps):
        verb, title = _get_verb_and_title(step)
        step_values: dict[str, Any] = {**step, "verb": verb, "title": title}
        if step["kind"] == "conversion":
            heads = step.get("heads", {})
            step_values["heads"] = {name: pair for name, pair in heads.items() if pair[0] != pair[1]} or heads
            step_values["origin"] = base_model if index == 0 and base_model else step.get("source", "a checkpoint")
            step_values["quality"] = Quality.from_dict(step.get("quality", {}))
        else:
            losses: list[Any] = [step.get("initial_eval_loss"), step.get("eval_loss")]
            step_values["no_gain"] = bool(step.get("steps")) and None not in losses and losses[1] >= losses[0]
            step_values["data"] = (describe_dataset(step, ("train_file", "source_file")) or {}).get("dataset_name")
            step_values["rows"] = _list_arguments(step["arguments"], verb == "evaluated")
        template_values.append(step_values)
    return template_values


def starts_from_model(step: Step) -> bool:
    """Return whether a step started from an existing model instead of from scratch."""
    return step["kind"] == "conversion" or step["arguments"].get("model_name_or_path") is not None


def find_latest_hub_id(steps: Sequence[Step]) -> str | None:
    """Return the Hub id of the model from which the latest step with a Hub id started, or None if no step has one."""
    for step in reversed(steps):
        name = step["arguments"].get("model_name_or_path") if step["kind"] == "training" else None
        if step["kind"] == "conversion" and step.get("source_revision"):
            name = step.get("source")
        if isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not Path(name).exists():
            return name
    return None


def get_trained_text_columns(steps: Sequence[Step]) -> Sequence[str]:
    """Return the text columns of the last training step that has any, or an empty sequence."""
    for step in reversed(steps):
        if step["kind"] == "training" and ("problem_type" in step or _get_glue_task(step) in TASKS):
            task = TASKS.get(_get_glue_task(step) or "")
            return [names[0] for names in task.text_columns] if task is not None else step.get("text_columns", ())
    return ()


def describe_dataset(training: Step, file_arguments: Sequence[str]) -> dict[str, str] | None:
    """Return the dataset of a training step as fields of `huggingface_hub.EvalResult`, or None if it is unknown.

    Args:
        training: The training step.
        file_arguments: Names of the arguments that contain the data files of the split.
    """
    arguments, task = training["arguments"], _get_task_name(training)
    if "dataset" in training:
        return training["dataset"]
    if task in TASKS:
        return {"dataset_type": "nyu-mll/glue", "dataset_name": f"GLUE {task.upper()}", "dataset_config": task}
    values = [arguments.get(name) for name in file_arguments]
    paths = [path for value in values for path in (value if isinstance(value, list) else [value]) if path]
    name = arguments.get("dataset_name") or next((PurePath(path).name for path in paths), None)
    if name is None and (task == "squad" or "version_2_with_negative" in arguments):
        if arguments.get("version_2_with_negative"):
            return {"dataset_type": "rajpurkar/squad_v2", "dataset_name": "SQuAD 2.0"}
        return {"dataset_type": "rajpurkar/squad", "dataset_name": "SQuAD 1.1"}
    return {"dataset_type": re.sub(r"[^\w./-]+", "-", name), "dataset_name": name} if name else None


def _list_arguments(arguments: Mapping[str, Any], is_evaluation: bool) -> list[tuple[str, Any]]:
    """Return the names and values of the arguments that a card shows for a step."""
    names = EVALUATION_ARGUMENTS if is_evaluation else TRAINING_ARGUMENTS
    hidden = "num_train_epochs" if not is_evaluation and arguments.get("max_train_steps") is not None else None
    return [(name, arguments[name]) for name in names if arguments.get(name) not in (None, "") and name != hidden]


def _get_verb_and_title(step: Step) -> tuple[str, str]:
    """Return the verb that describes a step, such as "fine-tuned", and the title of its section."""
    if step["kind"] == "conversion":
        return "converted", "Conversion"
    arguments = step["arguments"]
    if step.get("steps") == 0:
        return "evaluated", "Evaluation"
    # Pretraining arguments also contain an objective.
    if "objective" in step or ("objective" in arguments and "whole_word_mask" not in arguments):
        return "distilled" if arguments.get("teacher") else "uptrained", "Uptraining"
    is_pretraining = "mlm_probability" in arguments or "noise_density" in arguments
    return "pretrained" if is_pretraining else "fine-tuned", "Training"


def _get_glue_task(training: Step) -> str | None:
    return None if "dataset" in training else _get_task_name(training)


def _get_task_name(training: Step) -> str | None:
    # The spelling in the arguments ("STS-B") can be different from that in the results.
    return training.get("task_name") or training["arguments"].get("task_name")


# {key/value head field: prefixes of the fields for the same encoder or decoder}.
PREFIXES_BY_FIELD = {"num_key_value_heads": ("", "cross_"), "encoder_num_key_value_heads": ("encoder_",)}
OWN_TAGS = (
    *("attn-variants", "multi-query-attention", "grouped-query-attention"),
    *("multi-head-latent-attention", "talking-heads-attention"),
)
HTML_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
MARKDOWN_CHARACTERS = re.compile(r"[\\`*\[\]|$~]|(?<![^\W_])_|_(?![^\W_])|^[#+=-]")


def escape_markdown(value: Any) -> str:
    """Format a value as one line of text, and escape the special characters of Markdown and HTML."""
    return MARKDOWN_CHARACTERS.sub(r"\\\g<0>", " ".join(str(value).split()).translate(HTML_ENTITIES))


def format_inline_code(value: Any) -> str:
    """Format a value as inline Markdown code, with as many backticks as necessary."""
    text = " ".join(str(value).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def build_variant_template_values(variant: Any, fields: Sequence[str], table: CostTable) -> dict[str, Any]:
    """Collect the values that the template needs to describe a variant, including its tags and papers.

    Args:
        variant: The variant configuration.
        fields: The key/value head and rank fields that apply to the model's attention modules, starting with those of
            the decoder.
        table: The costs of the variant.
    """
    kv_fields = [name for name in variant.get_kv_heads_fields() if name in fields]
    rank_fields = [name for name in variant.get_rank_fields() if name in fields and getattr(variant, name) is not None]
    latents = [_describe_latent(variant, name) for name in rank_fields]
    talking = describe_talking_projections(variant, fields)
    patterns, kernels = (_describe_set_fields(variant, fields, fact) for fact in ("pattern", "kernel"))
    layers = {name: get_values_by_layer(variant, name) for name in kv_fields}
    shared = {count for name, counts in layers.items() for count in counts if count != variant.get_query_heads(name)}
    ranks = {rank for latent in latents for rank in latent["ranks"]}
    have_tags = (True, 1 in shared, bool(shared - {1}), bool(latents), bool(talking))
    papers = [MultiQueryAttention.paper] * (1 in shared) + [GroupedQueryAttention.paper] * bool(shared)
    papers += [LatentAttention.paper] * bool(ranks - {variant.hidden_size})
    papers += [LatentAttention.paper_for_cached_inputs] * (variant.hidden_size in ranks)
    papers += [TalkingHeadsSettings.paper] * bool(talking)
    prefixes = [name.removesuffix(HeadSharing.field) for name in kv_fields]
    pattern_names = [getattr(variant, f"{prefix}attention_pattern") for prefix in prefixes]
    papers += [get_pattern_class(name).paper for name in pattern_names if name is not None]
    papers += [get_kernel_class(kernel["name"]).paper for kernel in kernels]
    papers += [item.paper for prefix in PREFIXES for item in get_requested_extensions(variant, prefix)]
    current, full_cache = table.current, table.rows[0].kv_cache_bytes_per_token or {}
    cache = current.kv_cache_bytes_per_token
    all_ranks = {getattr(variant, name) for name in variant.get_rank_fields()} - {None}
    return {
        "stacks": [_describe_heads(variant, name) for name in kv_fields],
        "value_head_dim": variant.value_head_dim,
        "latents": latents,
        "scores": describe_scores(variant, kv_fields) + describe_extensions(variant, kv_fields),
        "talking": talking,
        "patterns": patterns,
        "kernels": kernels,
        "head_counts": {name: get_field_value(variant, name) for name in variant.get_head_count_fields(fields)},
        "parameters": current.parameters,
        "attention_parameters": current.attention_parameters,
        "caches": [(part, count, full_cache[part]) for part, count in (cache or {}).items()],
        "dtype": table.dtype,
        "decodes": "decoder" in current.flops_per_token,
        "has_cache": cache is not None,
        "shares": bool(all_ranks or HeadSharing.find_requesting_field(variant, look_up_field(fields[0])[0])),
        "keeps_inputs": variant.hidden_size in all_ranks,
        "talks": has_talking_heads(variant),
        "diagram": format_heads_diagram(variant, fields),
        "papers": list(dict.fromkeys(papers)),
        "tags": [tag for tag, is_true in zip(OWN_TAGS, have_tags, strict=True) if is_true],
    }


def leaves_outputs_unchanged(variant: Any, steps: Sequence[Step]) -> bool:
    """Return whether the last conversion left the outputs unchanged.

    This is the case if it only added cached encoder outputs or cached inputs. The result is False for variants with a
    pattern or a kernel, because the steps do not contain these fields.
    """
    conversion = [step for step in steps if step["kind"] == "conversion"][-1:]
    changes = [pair for step in conversion for pair in step.get("heads", {}).values() if pair[0] != pair[1]]
    names = [f"{prefix}attention_{kind}" for prefix in PLACE_WORDINGS for kind in ("pattern", "kernel")]
    is_plain = not any(getattr(variant, name, None) for name in names)
    return bool(changes) and is_plain and all(pair == [None, variant.hidden_size] for pair in changes)


def get_auto_class_name(architecture: str, config: Mapping[str, Any]) -> str:
    """Return the name of the Transformers Auto class that loads a model."""
    name = f"AttnVariant{architecture.removeprefix('AttnVariant')}"
    if config["model_type"] in list_supported_model_types():
        auto_classes = get_variant_config_class(config["model_type"]).auto_classes
        # A class can belong to several Auto classes. These are only used if the class does not belong to any other.
        unusual = ("AutoModelForMaskedLM", "AutoModelForTextEncoding", "AutoModelForPreTraining")
        candidates = [auto_name for auto_name, model in auto_classes.items() if model in (name, architecture)]
        if candidates:
            return min(candidates, key=lambda auto_name: unusual.index(auto_name) if auto_name in unusual else -1)
    heads = "MaskedLM|CausalLM|SequenceClassification|TokenClassification|QuestionAnswering"
    match = re.search(rf"For({heads})$", architecture)
    return f"AutoModelFor{match[1]}" if match else "AutoModel"


def _describe_set_fields(variant: Any, fields: Sequence[str], tag: str) -> list[dict[str, Any]]:
    """Describe the fields of one type that are set in the encoders and decoders to which `fields` belong.

    `tag` is the type of the fields, "pattern" or "kernel".
    """
    prefixes = [prefix for name in PREFIXES_BY_FIELD if name in fields for prefix in PREFIXES_BY_FIELD[name]]
    rows = [row for row in VARIANT_FIELDS if tag in row.tags and FIELD_TEXTS[row.name].card is not None]
    names = [prefix + row.name for prefix in prefixes for row in rows if prefix in row.prefixes]
    return [_describe_field(variant, name) for name in names if getattr(variant, name, None) is not None]


def _describe_heads(variant: Any, name: str) -> dict[str, Any]:
    """Return the type of head sharing and the head counts that a key/value head field sets."""
    heads, counts = variant.get_query_heads(name), set(get_values_by_layer(variant, name)) or {getattr(variant, name)}
    kind, stack_name = get_head_sharing(counts, heads).words, "encoder" if name.startswith("encoder_") else "decoder"
    return {"kind": kind, "least": min(counts), "most": max(counts), "heads": heads, "where": stack_name}


def _describe_latent(variant: Any, name: str) -> dict[str, Any]:
    """Return the result of `_describe_field` for a rank field, with the place and the ranks of its latents."""
    prefix, row = look_up_field(name)
    layers = get_values_by_layer(variant, name)
    ranks, place = sorted({rank for rank in layers if rank is not None}), PLACE_WORDINGS[prefix]
    values = {"here": place.place, "token": place.token, "is_one_for_all": prefix in row.model_wide_prefixes}
    return _describe_field(variant, name) | values | {"ranks": ranks, "is_input": ranks == [variant.hidden_size]}


def _describe_field(variant: Any, name: str) -> dict[str, Any]:
    """Return the value and description of a field, the number of layers, and the layers with a value."""
    layers = get_values_by_layer(variant, name)
    layers_with_value = [layer for layer, value in enumerate(layers) if value is not None]
    values = {"value": get_field_value(variant, name), "words": get_card_text(name), "layers": len(layers)}
    return values | {"having": layers_with_value, "name": getattr(variant, name)}


TEMPLATE = Path(__file__).with_name("templates") / "model_card.md"
TEMPLATE_VALUES: dict[str, Any] = {"oldest_run": OLDEST_TESTED, "newest_run": NEWEST_TESTED}
TEMPLATE_VALUES |= {"plain": escape_markdown, "code": format_inline_code}
DIGEST_MARK = GENERATED_CARD + "{version}; digest {digest} -->"
DIGEST_MARK_PATTERN = re.compile(rf"\n{GENERATED_CARD}\S+; digest ([0-9a-f]{{16}}) -->\s*$")
# The paragraph about the code in the template and in cards, and the repository loaded by the example on a card.
CODE_PATTERN = re.compile(
    r"^The attention is not part of [tT]ransformers[:.] .*?(?=\n\n|\n\{% endif)", re.MULTILINE | re.DOTALL
)
REPO_ID_PATTERN = re.compile(r'\.from_pretrained\(\s*"([^"\n]+)"')
# The lines of the example that pin commits if the code is in another repository.
PINNED_LINE = re.compile(r'\n    (?:code_)?revision="[^"]*",')
# Names of results that are not scores, but describe the run.
NON_SCORE_PATTERN = re.compile(
    r"(.*_)?(samples|questions|runtime|windows|total|rows|tokens|seconds)(_.*)?|.*(per_second|thresh).*"
)
# The prefix of the scores, the name, and the file arguments of each split.
SCORE_SPLITS = (
    ("eval_", "validation", ("validation_file", "validation_source_file")),
    ("test_", "test", ("test_file", "test_source_file")),
)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
HELD_OUT_DATASET = {"dataset_type": "held-out-text", "dataset_name": "held-out text"}
# Tags from the original model that do not apply to a variant: file formats and Hub services.
FORMAT_TAGS = re.compile(
    r"onnx|openvino|pytorch|tf|tflite|keras|jax|flax|rust|coreml|gguf|safetensors|transformers|mteb|"
    r".*_compatible|text-(embeddings|generation)-inference|(deploy|region|license|arxiv|dataset|doi):.*"
)
# The Hub task for each type of model. The task of an encoder-decoder depends on the training.
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
    """Values for a model card that are not contained in the files of the checkpoint.

    Args:
        base_model: Hub id of the base model. Defaults to the base model in the reports.
        license: Id of the license on the Hub, such as "apache-2.0". Defaults to the license of the original model.
        language: Language codes, such as "en". Defaults to the languages of the original model.
        datasets: Hub ids of the training data. Defaults to the data in the training results.
        pipeline_tag: Task on the Hub. Defaults to the task of the architecture.
        title: Title of the card. Defaults to the name of the repository.
        notes: Markdown text for the section "Notes".
        evaluations: Additional scores, each with the fields of `huggingface_hub.EvalResult`.

    Example:
        >>> options = CardOptions(license="apache-2.0", language=["en"])
    """

    base_model: str | None = None
    license: str | None = None
    language: list[str] | None = None
    datasets: list[str] | None = None
    pipeline_tag: str | None = None
    title: str | None = None
    notes: str | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def generate_model_card(
    folder: Path,
    repo_id: str,
    options: CardOptions | None = None,
    history: ModelHistory | None = None,
    code_repo: str | None = None,
) -> ModelCard:
    """Generate the model card for a checkpoint, including its metadata.

    Args:
        folder: The checkpoint folder.
        repo_id: The repository that the example on the card loads.
        options: Values that are not contained in the files of the folder.
        history: The model's history, if it has already been read.
        code_repo: The code repository as "owner/name", or None if the code is in the repository of the model.

    Raises:
        OSError: if there is no config.json.
        ValueError: if the metadata in README.md cannot be read, or if an option or a value in a report is invalid.

    Example:
        >>> print(generate_model_card(Path("bert-gqa4"), "user/bert-gqa4"))
    """
    options = options or CardOptions()
    config = read_config(folder)
    if options.license is None:
        read_front_matter(folder / CARD_NAME)  # raises an error so that a license is not silently lost
    history = history or read_history(folder)
    architecture = (config.get("architectures") or [""])[0]
    variant, facts = _load_variant(config)
    is_sentence_model, loader = (folder / "modules.json").is_file(), get_auto_class_name(architecture, config)
    task = options.pipeline_tag or ("sentence-similarity" if is_sentence_model else _get_pipeline_tag(architecture))
    with convert_to_value_error(f"The reports in {folder} must contain values that a model card can show", ValueError):
        steps = remove_local_paths(history.steps)
        # Only the first step is used because later steps may have started from an earlier push of this model.
        origin = options.base_model or find_latest_hub_id(history.steps[:1])
        # The scores of a training apply to the model only if it is the last step.
        last_training = next((step for step in steps[-1:] if step["kind"] == "training"), None)
        scores = build_eval_results(last_training, task) + _make_eval_results(options.evaluations)
        options = replace(options, title=options.title or repo_id.split("/")[-1])
        tags = facts["tags"] if facts else OWN_TAGS[:1]
        data = _build_metadata(options, history, task, is_sentence_model, tags, scores)
        card = ModelCard.from_template(
            data,
            template_path=str(TEMPLATE),
            title=options.title,
            repo_id=repo_id,
            code_repo=code_repo,
            notes=options.notes,
            architecture=architecture,
            variant=facts,
            leaves_outputs_unchanged=leaves_outputs_unchanged(variant, steps),
            origin=origin,
            steps=build_step_template_values(steps, origin),
            has_report=(folder / REPORT_NAME).is_file(),
            scores=scores,
            license=data.license,
            terms=history.metadata if options.license is None else {},
            auto_class=loader,
            columns=get_trained_text_columns(steps),
            config=config,
            is_native=is_native(config["model_type"]),
            is_sentence_model=is_sentence_model,
            **TEMPLATE_VALUES,
        )
    return ModelCard(add_digest_mark(card.content))


def _make_eval_results(evaluations: list[dict[str, Any]]) -> list[EvalResult]:
    rule = "`evaluations` must be a list of dictionaries with the fields of `huggingface_hub.EvalResult`"
    with convert_to_value_error(rule, ValueError):
        return [EvalResult(**row) for row in evaluations]


def _build_metadata(
    options: CardOptions,
    history: ModelHistory,
    task: str | None,
    is_sentence_model: bool,
    own_tags: Sequence[str],
    scores: list[EvalResult],
) -> ModelCardData:
    """Build the YAML metadata of a card from the options, the history and the scores."""
    source = remove_local_paths(history.metadata | {"base_model": _select_hub_ids(history.metadata.get("base_model"))})
    terms = source if options.license is None else {}
    return ModelCardData(
        library_name="sentence-transformers" if is_sentence_model else "transformers",
        pipeline_tag=task,
        tags=[*own_tags, *_select_tags(source.get("tags"), task, is_sentence_model)],
        eval_results=scores or None,
        model_name=options.title if scores else None,
        base_model=options.base_model or find_latest_hub_id(history.steps) or source.get("base_model"),
        datasets=options.datasets or _list_datasets(history.steps),
        language=options.language or source.get("language"),
        license=options.license or terms.get("license"),
        license_name=terms.get("license_name"),
        license_link=terms.get("license_link"),
        ignore_metadata_errors=False,
    )


def write_model_card(folder: Path) -> bool:
    """Write a model card to a checkpoint folder, unless the folder already contains a README.md.

    The example on the card loads a repository with the same name as the folder.

    Returns:
        True if the card was written, False if the folder already contains a README.md.

    Raises:
        OSError: if the card cannot be written.
    """
    path = folder / CARD_NAME
    if path.exists():
        return False
    atomic_write(path, str(generate_model_card(folder, folder.absolute().name)))
    return True


def _get_pipeline_tag(architecture: str) -> str | None:
    """Return the Hub task of a model class, or None if it is unknown."""
    match = re.search(r"(For[A-Z]\w+|LMHeadModel|EncoderModel|Model)$", architecture)
    tag = PIPELINE_TAGS.get(architecture.removeprefix("AttnVariant"))
    return tag or PIPELINE_TAGS.get(match[1] if match else "")


def _select_hub_ids(names: Any) -> list[str] | str | None:
    """Return the names that can be Hub ids, without names of local folders."""
    if isinstance(names, list):
        return [name for name in names if HUB_ID.fullmatch(name)] or None
    return names if isinstance(names, str) and HUB_ID.fullmatch(names) else None


def add_digest_mark(text: str) -> str:
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    return f"{text}\n{DIGEST_MARK.format(version=ATTN_VARIANTS_VERSION, digest=_compute_digest(text))}\n"


def is_unedited_card(text: str) -> bool:
    """Return whether a card was generated by `generate_model_card` and has not been edited since then."""
    match = DIGEST_MARK_PATTERN.search(text)
    return match is not None and _compute_digest(text[: match.start()].rstrip() + "\n") == match[1]


def refresh_card(text: str) -> str | None:
    """Update the paragraph about the code in a generated card, or return None if the card was edited by hand."""
    if not is_unedited_card(text):
        return None
    mark: Any = DIGEST_MARK_PATTERN.search(text)  # it exists, because `is_unedited_card` found it
    repo_id, body = REPO_ID_PATTERN.search(text), text[: mark.start()]
    if repo_id is None or CODE_PATTERN.search(body) is None:
        return text
    if "`code_revision=`" in body:  # a refreshed model has its own code
        body = PINNED_LINE.sub("", body)
    paragraph: Any = CODE_PATTERN.search(TEMPLATE.read_text(encoding="utf-8"))
    values = {"repo_id": repo_id[1], **TEMPLATE_VALUES}
    refreshed = CODE_PATTERN.sub(lambda _: jinja2.Template(paragraph[0]).render(values), body, count=1)
    return text if refreshed == text[: mark.start()] else add_digest_mark(refreshed)


def build_eval_results(training: Step | None, task: str | None) -> list[EvalResult]:
    """Collect the scores for the metadata of a card. Losses are only included if there are no other scores.

    Args:
        training: The training step, or None if the model has no scores.
        task: The pipeline tag of the model.
    """
    results = []
    for prefix, split, files in SCORE_SPLITS:
        items = (training or {}).items()
        scores = {name.removeprefix(prefix): value for name, value in items if name.startswith(prefix)}
        names = [name for name in scores if not NON_SCORE_PATTERN.fullmatch(name)]
        names = [name for name in names if not name.startswith("loss")] or names
        data: Any = (describe_dataset(training, files) if training and names else None) or HELD_OUT_DATASET
        for name in names:
            row = {"metric_type": name, "metric_name": name, "metric_value": round(scores[name], 4)}
            results.append(EvalResult(task_type=task or "other", dataset_split=split, **row, **data))
    return results


def _load_variant(config: Mapping[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """Return a model's variant configuration and its facts, or (None, None) if the architecture is not supported."""
    if config["model_type"] not in list_supported_model_types():
        return None, None
    variant, table = make_variant_config(config), compute_cost_table(config)
    fields = list_used_fields(get_variant_model_class(table.architecture), variant)
    return variant, build_variant_template_values(variant, fields, table)


def _compute_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _list_datasets(steps: Sequence[Step]) -> list[str] | None:
    """Return the Hub ids of the datasets on which the model was trained, or None if there are no such ids."""
    names = []
    for step in (step for step in steps if step["kind"] == "training"):
        data = describe_dataset(step, ()) or {}
        is_benchmark = "dataset" in step or data.get("dataset_type") == "nyu-mll/glue"
        names.append(data["dataset_type"] if is_benchmark else step["arguments"].get("dataset_name"))
    hub_ids = [name for name in names if isinstance(name, str) and HUB_ID.fullmatch(name) and not Path(name).exists()]
    return list(dict.fromkeys(hub_ids)) or None


def _select_tags(tags: Any, task: str | None, is_sentence_model: bool) -> list[str]:
    """Select the original model's tags that also apply to this model, without file formats and other tasks."""
    removed = TASK_TAGS - {task} | (set() if is_sentence_model else {"sentence-transformers"}) | set(OWN_TAGS)
    unique_tags = dict.fromkeys(tags if isinstance(tags, list) else ())
    return [tag for tag in unique_tags if tag not in removed and not FORMAT_TAGS.fullmatch(tag.lower())]


MAX_WIDTH = 90
HEADS_TITLES = {"num_key_value_heads": "decoder, self- and cross-attention", "encoder_num_key_value_heads": "encoder"}


def format_heads_diagram(config: Any, fields: Sequence[str] | None = None) -> str:
    """Draw a text diagram of a variant's groups of heads, latents and talking-heads projections.

    Args:
        config: A variant configuration.
        fields: The key/value head and rank fields that apply to the model's attention modules, or None for all fields.
            Each head field gets its own diagram, so there are two for T5.

    Example:
        For 4 query heads and 2 key/value heads::

            query heads     | q0 q1 | q2 q3 |
            key/value heads |  kv0  |  kv1  |
    """
    fields = (*config.get_kv_heads_fields(), *config.get_rank_fields()) if fields is None else fields
    kv_fields = [name for name in config.get_kv_heads_fields() if name in fields]
    blocks = []
    for name in kv_fields:
        counts = get_values_by_layer(config, name) or [getattr(config, name)]
        for count in dict.fromkeys(counts):
            title = [HEADS_TITLES[name]] if len(kv_fields) > 1 else []
            title += [format_layers(counts, count)] if len(set(counts)) > 1 else []
            head = [f"{', '.join(title)}:"] if title else []
            blocks.append("\n".join([*head, *_format_head_groups(config.get_query_heads(name), count)]))
    rank_fields = [name for name in config.get_rank_fields() if name in fields]
    latents = [_format_latent_sentence(config, name, len(kv_fields) > 1) for name in rank_fields]
    if any(latents):
        blocks.append("\n".join(filter(None, latents)))
    if chains := _format_projection_chains(config, kv_fields):
        blocks.append(chains)
    return "\n\n".join(blocks)


def _format_latent_sentence(config: Any, field: str, is_t5: bool) -> str:
    """Return a sentence that describes a latent, or an empty string if there is no latent."""
    ranks, parts = get_values_by_layer(config, field), []
    for rank in dict.fromkeys(rank for rank in ranks if rank is not None):
        numbers = "the input itself" if rank == config.hidden_size else f"a latent of dimension {rank}"
        parts.append(numbers + (f" ({format_layers(ranks, rank)})" if len(set(ranks)) > 1 else ""))
    prefix, _ = look_up_field(field)
    owner = ("the decoder's " if is_t5 and not prefix else "") + PLACE_WORDINGS[prefix].owner
    text = f"Keys and values of {owner} are computed from {', '.join(parts)} for each {PLACE_WORDINGS[prefix].token}."
    return text if parts else ""


def _format_head_groups(heads: int, kv_heads: int) -> list[str]:
    groups = [[f"q{head}" for head in group] for group in get_consecutive_groups(heads, kv_heads)]
    queries, keys = [" ".join(group) for group in groups], [f"kv{i}" for i in range(kv_heads)]
    if _compute_diagram_width(queries, keys) > MAX_WIDTH:
        queries = [group[0] if len(group) == 1 else f"{group[0]}..{group[-1]}" for group in groups]
    if _compute_diagram_width(queries, keys) > MAX_WIDTH:
        queries, keys = [*queries[:4], "...", queries[-1]], [*keys[:4], "...", keys[-1]]
    widths = [max(len(query), len(key)) for query, key in zip(queries, keys, strict=True)]
    rows = (("query heads", queries), ("key/value heads", keys))
    return [
        f"{name:<16}| " + " | ".join(cell.center(width) for cell, width in zip(cells, widths, strict=True)) + " |"
        for name, cells in rows
    ]


def _compute_diagram_width(queries: list[str], keys: list[str]) -> int:
    return sum(max(len(query), len(key)) + 3 for query, key in zip(queries, keys, strict=True))


def _format_projection_chains(config: Any, kv_fields: Sequence[str]) -> str:
    """Draw the talking-heads projections on one line, or on one line per place if they differ between places."""
    settings_by_place = {
        prefix: [_format_projection_chain(get_num_query_heads(config, prefix), talking) for talking in layers]
        for prefix, layers in get_talking_heads_by_prefix(config, kv_fields).items()
    }
    if len({chain for chains in settings_by_place.values() for chain in chains}) == 1:
        return next(chain for chains in settings_by_place.values() for chain in chains)
    lines = []
    for prefix, chains in settings_by_place.items():
        for chain in dict.fromkeys(filter(None, chains)):
            suffix = f", {format_layers(chains, chain)}" if len({*chains}) > 1 else ""
            lines.append(f"{PLACE_WORDINGS[prefix].place}{suffix}: {chain}")
    return "\n".join(lines)


def _format_projection_chain(heads: int, settings: TalkingHeadsSettings) -> str:
    """Return a text diagram of the talking-heads projections of an attention module, or "" if it has none."""
    if settings.kind is None:
        return ""
    first = f"--P_l [{heads} x {settings.softmax}]" if settings.kind in (LOGITS, BOTH) else ""
    second = f"--P_w [{settings.softmax} x {settings.output}]" if settings.kind in (WEIGHTS, BOTH) else ""
    softmax = f"softmax of {settings.softmax} heads"
    return f"logits of {heads} heads {first}--> {softmax} {second}--> weights of {settings.output} heads"
