"""The sentences and tables of a model card, each from the values that it is about."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..glue_tasks import GlueTask
from ..inspection.costs import CostTable, score_parts, values_by_layer
from ..inspection.talking_places import talking_parts
from ..modeling.fields.field_table import FIELDS, PLACES, row_of
from ..modeling.mechanisms.head_sharing import GroupedQuery, HeadSharing, MultiQuery, sharing_of
from ..modeling.mechanisms.kernels.kernel_table import KERNELS, kernel_class
from ..modeling.mechanisms.latents import Latent, rank_of_map
from ..modeling.mechanisms.patterns.pattern_table import PATTERNS, pattern_class
from ..modeling.mechanisms.talking_heads import BOTH, LOGITS, WEIGHTS, TalkingHeads, talks
from ..modeling.variant_names import NEWEST_RUN, OLDEST_RUN
from ..registration import supported_model_types, variant_config_class
from .card_escapes import code, plain
from .card_steps import Step, chain_sentence, is_only_converted, last_training

__all__ = [
    "PIPELINE_TAGS",
    "code_paragraph",
    "licence_text",
    "limits",
    "papers",
    "size_rows",
    "summary",
    "usage_snippet",
]

# The task on the Hub that a head is for; an encoder-decoder's depends on what it was trained on.
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
SENTENCE = "Two dogs run in the snow."
# By the columns of a task of pairs: a premise and what may follow from it, two questions, a question and its answer.
PAIRS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("sentence1", "sentence2"): (SENTENCE, "Dogs are running outside."),
    ("question1", "question2"): ("How do dogs keep warm in the snow?", "What keeps a dog warm in winter?"),
    ("question", "sentence"): ("Where do the dogs run?", SENTENCE),
}
PAPERS = {
    MultiQuery.label: MultiQuery.paper,
    GroupedQuery.label: GroupedQuery.paper,
    "latent": Latent.paper,
    "exact": Latent.paper_of_input,
    "talking": TalkingHeads.paper,
    **{name: pattern_class(name).paper for name in PATTERNS},
    **{name: kernel_class(name).paper for name in KERNELS},
}

# The prefixes of the fields of a stack, by that of its key/value heads; cross-attention is in the decoder's.
OF_STACKS = {"num_key_value_heads": ("", "cross_"), "encoder_num_key_value_heads": ("encoder_",)}

# What a user should know before relying on a model; see `limits`.
LIMITS = {
    "converted": "No gradient step on the whole model followed the conversion: expect less than from the model it was "
    "made of. Measure it on your data, and train it further where that matters.",
    "trained": "The scores are of one run with one seed, on the data named above, and say nothing of other data.",
    "small cache": "What is saved is cache: it shows with long contexts, large batches and beams, hardly at batch 1 "
    "with short texts.",
    "small encoder": "An encoder has no key/value cache: shared heads and latents save parameters and projections, "
    "hardly any attention time.",
    "exact": "It keeps inputs instead of keys and values: the same outputs from a smaller cache, without projecting a "
    "source, but more work a step. `attn-variants benchmark` says from how many new tokens on multi-head is faster.",
    "no cache": "It decodes without a cache, slowly: memory-side dynamic projections need all past inputs.",
    "talks": "Talking heads are slower than fused multi-head attention; flash and flex attention refuse to run them.",
    "data": "It knows what its training data knew, with the biases of that data.",
}


def summary(
    variant: Any, fields: Sequence[str], architecture: str, base_model: str | None, steps: Sequence[Step]
) -> str:
    """Return what the model is, in a sentence or two; `fields` as for `heads_diagram`."""
    made = "A checkpoint"
    if base_model:
        made = f"[{base_model}](https://huggingface.co/{base_model})"
    elif steps and steps[0].get("source"):
        made = code(steps[0]["source"])
    if variant is None:
        return f"{made}, as {code(architecture)}."
    text = f"{made} with {_attention(variant, fields)}, as {code(architecture)}."
    return text + chain_sentence(steps) + " Made with hf_attn_variants."


def size_rows(table: CostTable, variant: Any, fields: Sequence[str]) -> list[tuple[str, str]]:
    """Return the sizes of a checkpoint of an architecture here, with their units: heads, ranks, parameters, cache."""
    now = table.current
    made = [
        (name.replace("num_", "").replace("key_value", "key/value").replace("_", " "), _by_layer(variant, name))
        for name in variant.head_fields(fields)
    ]
    if variant.value_head_dim is not None:
        made.append((_on_card("value_head_dim"), str(variant.value_head_dim)))
    ranks = [name for name in variant.rank_fields() if name in fields and getattr(variant, name) is not None]
    made += [(_on_card(name), _by_layer(variant, name)) for name in ranks]
    made += [(what, _by_layer(variant, name)) for name, what in _shown(variant, fields, "pattern")]
    made += [(f"in the place of {what}{where}", kernel) for kernel, what, where in _kernels(variant, fields)]
    made.append(("parameters", f"{now.parameters:,}"))
    made.append(("... of the attentions' projections", f"{now.attention_parameters:,}"))
    if now.kv_cache_bytes_per_token is None:
        why = "its dynamic projections need past inputs" if "decoder" in now.flops_per_token else "an encoder"
        made.append(("key/value cache", f"none ({why})"))
    full = table.rows[0]  # as many key/value heads as query heads
    for site, count in (now.kv_cache_bytes_per_token or {}).items():
        token = "a token of the encoder" if site == "cross" else "a generated token"
        name = f"key/value cache, bytes for {token} ({table.dtype}, all layers)"
        before = (full.kv_cache_bytes_per_token or {})[site]
        made.append((name, f"{count:,}" + (f" (multi-head: {before:,})" if before != count else "")))
    return made


def usage_snippet(
    repo_id: str,
    config: Mapping[str, Any],
    is_sentence_model: bool,
    task: GlueTask | None = None,
    pair: bool = False,
) -> str:
    """Return Python that loads the model and runs it once.

    Args:
        repo_id: the repository.
        config: config.json.
        is_sentence_model: whether it is a folder of sentence-transformers.
        task: what a classifier was trained on; a task of pairs is shown with a pair.
        pair: whether a classifier without such a task reads pairs.
    """
    architecture = (config.get("architectures") or [""])[0]
    auto_class = _auto_class(architecture, config)
    remote = ", trust_remote_code=True" if config.get("auto_map") else ""
    if config.get("num_mel_bins") and auto_class != "AutoModelForCausalLM":
        return "\n".join(_audio_lines(repo_id, auto_class, remote))
    load = [
        f"from transformers import {auto_class}, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}"{remote})',
        f'model = {auto_class}.from_pretrained("{repo_id}"{remote}).eval()',
    ]
    if auto_class == "AutoModelForSeq2SeqLM":
        load += [
            'inputs = tokenizer("Two dogs run in the snow.", return_tensors="pt")',
            'inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}',
            "output = model.generate(**inputs, max_new_tokens=40)",
            "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        ]
    elif auto_class == "AutoModelForMultipleChoice":
        load += [
            'question, choices = "Two dogs run in the snow.", ["They are outside.", "They sleep."]',
            'inputs = tokenizer([question] * 2, choices, padding=True, return_tensors="pt")',
            "# one question: [1, choices, tokens]",
            "outputs = model(**{name: tensor.unsqueeze(0) for name, tensor in inputs.items()})",
        ]
    else:
        text = ", ".join(f'"{each}"' for each in _example(auto_class, task, pair))
        load.append(f'inputs = tokenizer({text}, return_tensors="pt")')
        reads_both = auto_class == "AutoModel" and config.get("is_encoder_decoder")
        decoder = ', decoder_input_ids=inputs["input_ids"]' if reads_both else ""
        load.append(f"outputs = model(**inputs{decoder})")
    if not is_sentence_model:
        return "\n".join(load)
    sentence = [
        "from sentence_transformers import SentenceTransformer",
        "",
        f'model = SentenceTransformer("{repo_id}"{remote})',
        'embeddings = model.encode(["Two dogs run in the snow.", "Dogs are running outside."])',
        "",
        "# or with transformers alone",
    ]
    return "\n".join(sentence + load)


def _audio_lines(repo_id: str, auto_class: str, remote: str) -> list[str]:
    """Return the lines of `usage_snippet` for a model that reads audio."""
    speaks = auto_class == "AutoModelForSpeechSeq2Seq"
    lines = [
        f"from transformers import AutoFeatureExtractor, {auto_class}{', AutoTokenizer' * speaks}",
        "",
        f'feature_extractor = AutoFeatureExtractor.from_pretrained("{repo_id}"{remote})',
        f'model = {auto_class}.from_pretrained("{repo_id}"{remote}).eval()',
        "samples = [0.0] * 16000  # your recording, 16,000 numbers a second",
        'inputs = feature_extractor(samples, sampling_rate=16000, return_tensors="pt")',
    ]
    if speaks:
        lines += [
            "output = model.generate(**inputs)",
            f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}"{remote})',
            "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        ]
    elif auto_class == "AutoModelForAudioClassification":
        lines.append("outputs = model(**inputs)")
    else:
        lines.append("outputs = model.encoder(**inputs)")
    return lines


def code_paragraph(repo_id: str) -> str:
    """Return what a user should know of the code that lies in a repository; a blank line ends it."""
    return (
        "The attention is not part of transformers: its code lies in this repository, and `trust_remote_code=True` "
        "runs it. Read the `.py` files, then pin\nthe commit that you read with `revision=`. It needs torch and "
        f"transformers {OLDEST_RUN} or newer, nothing else, and was run with transformers {OLDEST_RUN} to "
        f"{NEWEST_RUN}.\nUnder a later transformers that this code refuses: `attn-variants refresh {repo_id}` of a "
        f"newer hf_attn_variants puts its code here, and leaves the weights as they are."
    )


def limits(variant: Any, fields: Sequence[str], table: CostTable | None, steps: Sequence[Step]) -> list[str]:
    """Return what a user should know before relying on the model; without a variant there is no table.

    `fields` as for `heads_diagram`; the first one is the decoder's, but for an encoder alone.
    """
    decodes = table is not None and "decoder" in table.current.flops_per_token
    caches = table is not None and table.current.kv_cache_bytes_per_token is not None
    ranks = set() if variant is None else {getattr(variant, name) for name in variant.rank_fields()} - {None}
    shares = table is not None and bool(ranks or HeadSharing.asked_for(variant, row_of(fields[0])[0]))
    are_true = {
        "converted": is_only_converted(steps) and not _keeps_all(variant, steps),
        "trained": last_training(steps) and not is_only_converted(steps),
        "small cache": shares and caches,
        "small encoder": shares and not caches and not decodes,
        "exact": caches and variant.hidden_size in ranks,
        "no cache": decodes and not caches,
        "talks": variant is not None and talks(variant),
        "data": True,
    }
    return [LIMITS[name] for name, is_true in are_true.items() if is_true]


def _keeps_all(variant: Any, steps: Sequence[Step]) -> bool:
    """Say whether the last conversion changed no output: inputs are kept in the place of keys and values, no more.

    Patterns and kernels are not among what a step tells of, so none may be there.
    """
    conversion = [step for step in steps if step["kind"] == "conversion"][-1]
    changes = [(before, after) for before, after in conversion.get("heads", {}).values() if before != after]
    names = [f"{prefix}attention_{kind}" for prefix in ("", "encoder_", "cross_") for kind in ("pattern", "kernel")]
    is_plain = not any(getattr(variant, name, None) for name in names)
    return bool(changes) and is_plain and all(change == (None, variant.hidden_size) for change in changes)


def licence_text(license_id: str | list[str] | None, source: Mapping[str, Any]) -> str:
    """Return the licence's sentence.

    Args:
        license_id: its id on the Hub, or several; "other" for one that has none.
        source: the metadata of what the model was made from; none where another licence replaces its terms.
    """
    of_code = " The code files are Apache-2.0."
    if license_id == "other":
        own_terms = source.get("license_link") or source.get("license_name")
        asked = "One that is not on the list of the Hub: ask those who made this checkpoint"
        return f"{plain(own_terms or asked)}.{of_code}"
    if license_id:
        names = license_id if isinstance(license_id, str) else ", ".join(license_id)
        return f"{plain(names)}{', as the model it was made from' if source.get('license') else ''}.{of_code}"
    return f"Not stated by those who made this checkpoint: ask them before you use it.{of_code}"


def papers(variant: Any, fields: Sequence[str]) -> list[tuple[str, str]]:
    """Return the papers of what a variant does, (name, arXiv id)."""
    if variant is None:
        return []
    kv_fields = [name for name in variant.kv_heads_fields() if name in fields]
    pairs = {(count, variant.query_heads(name)) for name in kv_fields for count in values_by_layer(variant, name)}
    counts = {count for count, heads in pairs if count != heads}
    ranks = {rank for name in variant.rank_fields() if name in fields for rank in values_by_layer(variant, name)}
    are_true = {
        MultiQuery.label: 1 in counts,
        GroupedQuery.label: bool(counts),
        "latent": any(rank_of_map(rank, variant.hidden_size) is not None for rank in ranks),
        "exact": variant.hidden_size in ranks,
        "talking": bool(talking_parts(variant, fields)),
    }
    prefixes = ["encoder_" if name.startswith("encoder_") else "" for name in kv_fields]
    are_true |= {getattr(variant, f"{prefix}attention_pattern"): True for prefix in prefixes}
    are_true |= {kernel: True for kernel, *_ in _kernels(variant, fields)}
    return list(dict.fromkeys(PAPERS[name] for name, is_true in are_true.items() if is_true and name is not None))


def _by_layer(variant: Any, name: str) -> str:
    """Return a field's value, or those of the layers in their order."""
    values = (variant.per_layer_values or {}).get(name)
    if values is None:
        return str(getattr(variant, name))
    return ", ".join("none" if value is None else str(value) for value in values) + " (by layer)"


def _example(auto_class: str, task: GlueTask | None, pair: bool) -> tuple[str, ...]:
    if auto_class == "AutoModelForQuestionAnswering":
        return "Where do the dogs run?", SENTENCE
    if auto_class != "AutoModelForSequenceClassification":
        return (SENTENCE,)
    columns = tuple(names[0] for names in task.text_columns) if task is not None else ()
    if len(columns) == 2 or (task is None and pair):
        return PAIRS.get(columns, PAIRS["sentence1", "sentence2"])
    return (SENTENCE,)


def _attention(variant: Any, fields: Sequence[str]) -> str:
    of_stacks = {}
    kv_fields = [name for name in variant.kv_heads_fields() if name in fields]
    for name in kv_fields:
        heads = variant.query_heads(name)
        counts = set(values_by_layer(variant, name)) or {getattr(variant, name)}
        least, most = min(counts), max(counts)
        kind = sharing_of(counts, heads).words
        number = f"{most} key/value head{'s' * (most > 1)}"
        if least < most:
            number = f"{least} to {most} key/value heads, by layer,"
        shared = "" if least == heads else f" ({number} for {heads} query heads)"
        of_stacks[name] = f"{kind} attention{shared}"
    where = {"num_key_value_heads": " in the decoder", "encoder_num_key_value_heads": " in the encoder"}
    alike = {*of_stacks.values()}
    parts = [*alike] if len(alike) == 1 else [text + where[name] for name, text in of_stacks.items()]
    if variant.value_head_dim is not None:
        parts.append(f"{variant.value_head_dim} {_on_card('value_head_dim')}")
    parts += [_latent(variant, name) for name in variant.rank_fields() if name in fields and getattr(variant, name)]
    parts += score_parts(variant, kv_fields)
    at = {LOGITS: "before the softmax", WEIGHTS: "after the softmax", BOTH: "before and after the softmax"}
    parts += [f"talking heads {at[kind]}{where}" for kind, where in talking_parts(variant, fields)]
    parts += [f"{_by_layer(variant, name)} {what}" for name, what in _shown(variant, fields, "pattern")]
    parts += [
        f"the kernel {kernel} in the place of {what}{where}" for kernel, what, where in _kernels(variant, fields)
    ]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def _kernels(variant: Any, fields: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return the kernels of the stacks that a model has, each with what it stands for, and in which layers."""
    rows = _shown(variant, fields, "kernel")
    return [(getattr(variant, name), what, _layers_with(variant, name)) for name, what in rows]


def _layers_with(variant: Any, name: str) -> str:
    """Say in which layers a field has a value; nothing where all have one."""
    values = values_by_layer(variant, name)
    found = [str(layer) for layer, value in enumerate(values) if value is not None]
    if len(found) == len(values):
        return ""
    return f" in layer{'s' if len(found) > 1 else ''} {', '.join(found)} of {len(values)}"


def _shown(variant: Any, fields: Sequence[str], fact: str) -> list[tuple[str, str]]:
    """Return the fields of which a fact is true that are set in the stacks that a model has, each with what it is."""
    prefixes = [prefix for heads, each in OF_STACKS.items() if heads in fields for prefix in each]
    rows = [row for row in FIELDS if fact in row.facts and row.card is not None]
    names = [prefix + row.name for prefix in prefixes for row in rows if prefix in row.prefixes]
    return [(name, _on_card(name)) for name in names if getattr(variant, name, None) is not None]


def _on_card(name: str) -> str:
    prefix, row = row_of(name)
    return row.on_card(prefix)


def _latent(variant: Any, name: str) -> str:
    """Return what the latent of one kind of attention is."""
    layers = values_by_layer(variant, name)
    ranks = {rank for rank in layers if rank is not None}
    having = sum(rank is not None for rank in layers)
    where = f", in {having} of {len(layers)} layers" if having < len(layers) else ""
    prefix, row = row_of(name)
    place = PLACES[prefix]
    of = "for the cross-attention of all layers" if prefix in row.one_for_all else f"in {place.here}"
    of = f"{place.token} {of}{where}"
    if ranks == {variant.hidden_size}:
        return f"the input itself kept instead of keys and values, {variant.hidden_size} numbers a {of}"
    numbers = " to ".join(map(str, sorted({min(ranks), max(ranks)})))
    return f"keys and values from a latent of {numbers} numbers a {of}"


def _auto_class(architecture: str, config: Mapping[str, Any]) -> str:
    name = f"AttnVariant{architecture.removeprefix('AttnVariant')}"
    if config["model_type"] in supported_model_types():
        auto_classes = variant_config_class(config["model_type"]).auto_classes
        found = [auto_class for auto_class, model in auto_classes.items() if model == name]
        if found:  # a BART that writes fills masks too, and every model that was pretrained is one to pretrain
            seldom = ("AutoModelForMaskedLM", "AutoModelForTextEncoding", "AutoModelForPreTraining")
            return min(found, key=lambda each: seldom.index(each) if each in seldom else -1)
    match = re.search(
        r"For(MaskedLM|CausalLM|SequenceClassification|TokenClassification|QuestionAnswering)$", architecture
    )
    return f"AutoModelFor{match[1]}" if match else "AutoModel"
