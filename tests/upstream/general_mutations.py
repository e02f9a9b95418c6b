"""Mutations of shared code: generation, the base class, configurations, caches, masks and attention interfaces."""

import ast
from collections.abc import Iterator
from typing import Any

from upstream.architecture_sources import get_parameter_names, get_transformers_folder

MODEL, GENERATION = "transformers.modeling_utils", "transformers.generation.utils"
CACHES, MASKS = "transformers.cache_utils", "transformers.masking_utils"
CONFIG, SDPA = "transformers.configuration_utils", "transformers.integrations.sdpa_attention"

# The modules of base-class methods and attributes that this package overrides, calls, reads or writes.
MEMBERS = {
    **dict.fromkeys(("_expand_inputs_for_generation", "_reorder_cache", "_is_stateful"), GENERATION),
    **dict.fromkeys(("_initialize_weights", "_init_weights", "post_init", "get_correct_attn_implementation"), MODEL),
    **dict.fromkeys(("_check_and_adjust_attn_implementation", "_can_set_attn_implementation", "base_model"), MODEL),
    **dict.fromkeys(("_is_hf_initialized", "_keys_to_ignore_on_load_missing", "_no_split_modules"), MODEL),
    **dict.fromkeys(("_attn_implementation_internal", "_output_attentions"), CONFIG),
    **dict.fromkeys(("get_interface", "register_for_auto_class"), MODEL),
}
CACHE_MEMBERS = (
    "update", "layers", "is_updated", "self_attention_cache", "cross_attention_cache", "get_seq_length",
    "is_initialized", "lazy_initialization", "is_compileable", "reorder_cache", "get_mask_sizes", "keys", "values",
    "reset", "crop",
)  # fmt: skip
CLASSES = {"DynamicLayer": CACHES, "EncoderDecoderCache": CACHES, "DynamicSlidingWindowLayer": CACHES,
           "AttentionMaskInterface": MASKS, "AttentionInterface": MODEL, "eager_mask": MASKS, "sdpa_mask": MASKS,
           "causal_mask_function": MASKS, "bidirectional_mask_function": MASKS,
           "ALL_ATTENTION_FUNCTIONS": MODEL}  # fmt: skip
MASK_FUNCTIONS = ["sdpa_mask", "eager_mask", "flash_attention_mask", "flex_attention_mask"]
MAKERS = ["create_causal_mask", "create_bidirectional_mask"]
MAKER_ARGUMENTS = ("config", "inputs_embeds", "attention_mask", "cache", "past_key_values", "encoder_hidden_states")
ATTENTIONS = ["eager_attention_forward", "sdpa_attention_forward"]


def _make_mutation(kind: str, title: str, op: dict[str, Any], names: list[str], **more: Any) -> dict[str, Any]:
    return {"kind": kind, "title": title, "op": op, "names": names, "architectures": [], **more}


def iterate_general_mutations() -> Iterator[dict[str, Any]]:
    """Yield the mutations of shared code."""
    for old, module in (MEMBERS | CLASSES).items():
        new = f"renamed_{old}" if not old[:1].isupper() else f"Renamed{old}"
        op = {"op": "rename_identifier", "old": old, "new": new, "modules": [module]}
        kind = "class" if old in CLASSES else "method" if not old.startswith("_is_") else "attribute"
        yield _make_mutation(kind, f"{old} is called {new}", op, [old, new])
    for old in CACHE_MEMBERS:
        new = f"renamed_{old}"
        op = {"op": "rename_cache_member", "old": old, "new": new, "modules": [CACHES]}
        yield _make_mutation("cache", f"caches: {old} is called {new}", op, [old, new])
    for old in ("is_causal", "num_key_value_groups"):
        new = f"renamed_{old}"
        op = {"op": "rename_of_attentions", "old": old, "new": new, "modules": [SDPA]}
        yield _make_mutation("attribute", f"attentions: self.{old} is called {new}", op, [old, new])
    yield from _iterate_function_mutations()
    yield from _iterate_interface_mutations()
    op = {"op": "invert_masks", "modules": [MASKS, SDPA]}
    yield _make_mutation(
        "meaning", "masks say what is not read", op, ["differ from those of Transformers"], is_newer=True
    )


def _get_parameters(module: str, name: str) -> list[str]:
    path = get_transformers_folder().joinpath(*module.split(".")[1:]).with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            result = get_parameter_names(node)
            return result if node.args.args[0].arg == "self" else [node.args.args[0].arg, *result]
    return []


def _rename(kind: str, modules: list[str], functions: list[str], old: str, called: list[str]) -> dict[str, Any]:
    new = f"renamed_{old}"
    op = {"op": "rename_argument", "functions": functions, "called": called, "old": old, "new": new}
    return _make_mutation(kind, f"{called[0]}: {old} is called {new}", op | {"modules": modules}, [old, new])


def _iterate_function_mutations() -> Iterator[dict[str, Any]]:
    name = "_expand_inputs_for_generation"
    for old in _get_parameters(GENERATION, name):
        yield _rename("rename", [GENERATION], [name], old, [name])
    for maker in MAKERS:
        for old in [item for item in _get_parameters(MASKS, maker) if item in MAKER_ARGUMENTS]:
            yield _rename("rename", [MASKS], [maker], old, [maker])
    for old in _get_parameters(MASKS, "sdpa_mask"):
        called = ["mask_interface", *MASK_FUNCTIONS]
        yield _rename("rename", [MASKS], MASK_FUNCTIONS, old, called)
    op = {"op": "require_argument", "functions": MASK_FUNCTIONS, "called": ["mask_interface", *MASK_FUNCTIONS]}
    op |= {"new": "new_thing", "uses": None, "modules": [MASKS], "needle": "sdpa_mask"}
    yield _make_mutation("require", "mask functions take and ignore new_thing", op, ["new_thing"])
    for method in ("update", "get_seq_length", "reorder_cache"):
        for old in _get_parameters(CACHES, method):
            yield _rename("rename", [CACHES], [method], old, [method])
    for name in ("_initialize_weights", "_init_weights", "get_correct_attn_implementation", "set_attn_implementation"):
        for old in _get_parameters(MODEL, name):
            yield _rename("rename", [MODEL], [name], old, [name])


def _iterate_interface_mutations() -> Iterator[dict[str, Any]]:
    called = ["attention_interface", *ATTENTIONS]
    for old in ("attention_mask", "scaling", "dropout", "position_bias"):
        yield _rename("interface", [SDPA], ATTENTIONS, old, called)
    common = {"functions": ATTENTIONS, "called": called, "modules": [SDPA]}
    for old in ("scaling", "dropout"):
        op = {"op": "drop_argument", **common, "old": old}
        # T5 and Whisper pass a scaling that differs from the default.
        without = {"but": ["t5", "umt5", "whisper"]} if old == "scaling" else {}
        yield _make_mutation("interface", f"attention functions without {old}", op, [old], **without)
    for uses in (None, "query"):
        op = {"op": "require_argument", **common, "new": "new_thing", "uses": uses, "needle": "attention_mask"}
        verb = "take" if uses else "take and ignore"
        yield _make_mutation(
            "interface", f"attention functions {verb} new_thing", op, ["new_thing"], changes=bool(uses)
        )
    op = {"op": "swap_arguments", **common, "old": "value", "new": "attention_mask", "needle": "attention_mask"}
    yield _make_mutation("interface", "attention functions: value and attention_mask swapped", op, ["attention_mask"])
