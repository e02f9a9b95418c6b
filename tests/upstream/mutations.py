"""Run our models in mutants of the installed Transformers: `python tests/upstream/mutations.py --help`.

A mutant is a Transformers with one change of code that our classes use. The code of Transformers that uses it changes
too. Our models must equal the models of the mutant, or raise an error that names the change.
"""

import argparse
import ast
import contextlib
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from upstream.architecture_sources import (
    ARCHITECTURES,
    find_role_classes,
    get_classes,
    get_method,
    get_parameter_names,
    list_calls,
    parse_modeling_file,
)
from upstream.general_mutations import iterate_general_mutations

OUTCOMES = ("equal", "refused", "refused without its name", "raw", "silent", "invalid")
BAD = ("refused without its name", "raw", "silent")
# The format of new names, which no name of Transformers has.
NEW = "renamed_{}"
# Attributes that this package reads or writes, by the role of their class. With `True`, they are renamed in every
# object except `config`.
ATTRIBUTES = {
    "attention": {
        "q": False, "k": False, "v": False, "o": False, "query": False, "key": False, "value": False, "dense": False,
        "q_proj": False, "k_proj": False, "v_proj": False, "out_proj": False, "q_lin": False, "k_lin": False,
        "v_lin": False, "out_lin": False, "layer_idx": False, "scaling": False, "dropout": False,
        "has_relative_attention_bias": False, "relative_attention_bias": False, "key_value_proj_dim": False,
        "is_decoder": False, "attention_dropout": False, "output_dropout": False, "LayerNorm": False, "n_heads": False,
        "compute_bias": False, "Wqkv": False, "out_drop": False, "sliding_window": False,
    },
    "embeddings": {
        "position_embeddings": False, "padding_idx": False, "token_type_embeddings": False, "word_embeddings": True,
    },
    "stack": {"embed_tokens": True, "is_decoder": False, "block": True, "layers": True},
}  # fmt: skip
PATHS = (
    "SelfAttention", "EncDecAttention", "self_attn", "encoder_attn", "crossattention", "albert_layer_groups",
    "albert_layers",
)  # fmt: skip
HANDED_OVER = ("use_cache", "output_attentions")
# A model can run without these arguments. Our models must then equal Transformers with its defaults.
DROPPABLE = ("position_bias", "token_type_ids", "position_ids", "inputs_embeds")


def iterate_architecture_mutations(architecture: str) -> Iterator[dict[str, Any]]:
    """Yield the mutations of one architecture's modeling file."""
    tree = parse_modeling_file(architecture)
    result = get_classes(tree)
    kinds = ("attention", "embeddings", "stack", *(() if architecture in ("t5", "umt5") else ("base",)))
    for kind in kinds:
        groups = _group_classes(tree, find_role_classes(tree, kind))
        for names in groups:
            forwards = [item for name in names if (item := get_method(result[name], "forward"))]
            yield from _iterate_method_mutations(architecture, kind, names, forwards, tree)
    attentions = find_role_classes(tree, "attention")
    for change in ("more", "fewer", "between", "swapped"):
        op = {"op": "change_tuple", "names": attentions, "method_name": "forward", "how": change}
        yield _make_mutation(
            architecture, "tuple", f"{'+'.join(attentions)}.forward returns {change}", op, ["forward"]
        )
    for kind, attributes in ATTRIBUTES.items():
        yield from _iterate_attribute_mutations(architecture, tree, find_role_classes(tree, kind), attributes)
    yield from _iterate_attribute_mutations(architecture, tree, list(result), dict.fromkeys(PATHS, True))
    for name in {item for kind in ("attention", "embeddings", "stack") for item in find_role_classes(tree, kind)}:
        op = {"op": "rename_names", "old": name, "new": f"Renamed{name}"}
        yield _make_mutation(architecture, "class", f"{name} is called Renamed{name}", op, [name])
        yield _make_mutation(architecture, "class", f"{name} has moved", {"op": "move_class", "name": name}, [name])
    op = {"op": "attend_to_halves", "names": attentions}
    yield _make_mutation(
        architecture, "meaning", "attention reads half of its inputs", op, [*attentions], changes=True
    )
    yield _make_mutation(architecture, "nothing", "nothing", {"op": "nothing"}, [])


def _group_classes(tree: ast.Module, names: list[str]) -> list[list[str]]:
    """Return groups of classes that are called at the same places, and so change together."""
    groups: list[list[str]] = []
    for name in names:
        call_ids = {id(call) for call in list_calls(tree, frozenset({name}))}
        for group in groups:
            if call_ids & {id(call) for call in list_calls(tree, frozenset(group))}:
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def _iterate_method_mutations(
    architecture: str, kind: str, names: list[str], forwards: list[ast.FunctionDef], tree: ast.Module
) -> Any:
    if not forwards or not list_calls(tree, frozenset(names)):
        return
    title, common = "+".join(names) + ".forward", {"names": names, "method_name": "forward"}
    orders = [get_parameter_names(item) for item in forwards]
    # Arguments that other modules pass by name do not change.
    known = list(dict.fromkeys(name for order in orders for name in order if name not in HANDED_OVER))
    called_by_name = {key.arg for call in list_calls(tree, frozenset(names)) for key in call.keywords}
    for old in known:
        new = NEW.format(old)
        op = {"op": "rename_parameter", **common, "old": old, "new": new}
        op["after"] = _make_adapter(architecture, names, old, new)
        yield _make_mutation(architecture, "rename", f"{title}: {old} is called {new}", op, [old, new])
        needed = kind == "base" or (kind == "embeddings" and old == "inputs_embeds")
        if old in DROPPABLE and old in called_by_name and not needed:
            op = {"op": "drop_parameter", **common, "old": old}
            yield _make_mutation(architecture, "drop", f"{title} without {old}", op, [old], changes=True)
    same = all(order == orders[0] for order in orders)
    for first, second in zip(orders[0][1:], orders[0][2:], strict=False) if kind != "base" else ():
        if {first, second} & set(HANDED_OVER):
            continue
        if not all(first in order and second in order for order in orders):
            continue
        for by_place in (False, True) if same and kind in ("attention", "embeddings") else (False,):
            op = {"op": "reorder", **common, "old": first, "new": second, "by_place": by_place}
            note = " and callers go by place" if by_place else ""
            yield _make_mutation(
                architecture, "reorder", f"{title}: {first} and {second} swapped{note}", op, [first, second]
            )
    for uses in (False, True) if kind != "base" else (False,):
        op = {"op": "require", **common, "new": "new_thing", "uses": uses}
        op["after"] = _make_adapter(architecture, names, "new_thing")
        verb = "takes" if uses else "takes and ignores"
        yield _make_mutation(architecture, "require", f"{title} {verb} new_thing", op, ["new_thing"], changes=uses)


# `generate` calls the encoder of an "encoder-decoder" separately.
HEADS = {
    architecture: "encoder"
    if architecture in ("bert", "albert", "roberta", "distilbert", "electra", "modernbert", "nomic_bert")
    else "encoder-decoder"
    for architecture in ARCHITECTURES
}


def _make_adapter(architecture: str, names: list[str], old: str, new: str = "") -> str:
    """Return code that lets `generate` call an encoder whose inputs were renamed."""
    is_called = any(name.endswith(("Stack", "Encoder")) for name in names) and HEADS[architecture] == "encoder-decoder"
    if not is_called or old not in ("input_ids", "attention_mask", "input_features", "new_thing"):
        return ""
    return f"""
def _renamed(made):
    def prepare(self, inputs_tensor, model_kwargs, model_input_name, **rest):
        name = model_input_name or self.main_input_name
        names = {{'{old}': '{new or old}'}}
        kept = {{'new_thing': 1.25}} if {not new} else {{}}
        kept |= {{names.get(key, key): value for key, value in model_kwargs.items()}}
        found = made(self, inputs_tensor, kept, names.get(name, name), **rest)
        return model_kwargs | {{'encoder_outputs': found['encoder_outputs']}}
    return prepare
import transformers.generation.utils as _generation
_name = '_prepare_text_encoder_decoder_kwargs_for_generation'
if not hasattr(_generation.GenerationMixin, _name):
    _name = '_prepare_encoder_decoder_kwargs_for_generation'
for _each in list(globals().values()):
    if isinstance(_each, type) and issubclass(_each, _generation.GenerationMixin) and '_is_stateful' in dir(_each):
        if _each.__module__ == __name__:
            setattr(_each, _name, _renamed(getattr(_generation.GenerationMixin, _name)))
"""


def _iterate_attribute_mutations(
    architecture: str, tree: ast.Module, names: list[str], attributes: dict[str, bool]
) -> Any:
    written = {
        target.attr
        for name in names
        for item in ast.walk(get_classes(tree)[name])
        if isinstance(item, ast.Assign)
        for target in item.targets
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
    } | {item.name for name in names for item in get_classes(tree)[name].body if isinstance(item, ast.FunctionDef)}
    for old, anywhere in attributes.items():
        if old in written:
            new = NEW.format(old)
            if old == "compute_bias":
                op = {"op": "rename_names", "old": old, "new": new}
            else:
                op = {"op": "rename_attribute", "names": names, "old": old, "new": new, "anywhere": anywhere}
            title = "+".join(names) if len(names) < 4 else architecture
            yield _make_mutation(architecture, "attribute", f"{title}: self.{old} is called {new}", op, [old, new])


def _make_mutation(
    architecture: str, kind: str, title: str, op: dict[str, Any], names: list[str], **more: Any
) -> dict[str, Any]:
    op = op | {"architecture": architecture}
    return {"kind": kind, "title": title, "op": op, "architectures": [architecture], "names": names, **more}


def list_mutations(architectures: Iterable[str] = ARCHITECTURES) -> list[dict[str, Any]]:
    """Return every mutation; mutations of shared code occur once per architecture that uses it."""
    architectures = list(architectures)
    return [item for architecture in architectures for item in iterate_architecture_mutations(architecture)] + [
        item | {"architectures": [name for name in architectures if name not in item.get("but", ())]}
        for item in iterate_general_mutations()
    ]


def sample(mutations: list[dict[str, Any]], seed: int, cases: int) -> list[dict[str, Any]]:
    """Return some mutations, one architecture per mutation, with as many architectures and kinds as possible."""
    single = [item | {"architectures": [architecture]} for item in mutations for architecture in item["architectures"]]
    random.Random(seed).shuffle(single)
    count: Counter[str] = Counter()
    chosen = []
    while single and len(chosen) < cases:
        place = min(range(len(single)), key=lambda i: count[single[i]["kind"]] + count[single[i]["architectures"][0]])
        chosen.append(single.pop(place))
        count.update([chosen[-1]["kind"], chosen[-1]["architectures"][0]])
    return chosen


def run(mutations: list[dict[str, Any]], show: Any = False, log: Any = None) -> list[dict[str, Any]]:
    """Run mutations, and return one row per architecture of each mutation.

    A row contains the kind, the title, the architecture, the outcome and a note. It is also written to `log`.
    """
    worker = Path(__file__).with_name("mutant_worker.py")
    command = [sys.executable, "-W", "ignore", str(worker)]
    rows: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        for mutation in mutations:
            process.stdin.write(json.dumps(mutation) + "\n")
            process.stdin.flush()
            for _ in mutation["architectures"]:
                line = process.stdout.readline()
                if not line:
                    raise RuntimeError(f"the worker process ended during the mutation {mutation['title']}")
                rows.append({"kind": mutation["kind"], "title": mutation["title"], **json.loads(line)})
                if log:
                    print(json.dumps(rows[-1]), file=log, flush=True)
                if show and (show == "all" or rows[-1]["outcome"] not in ("equal", "refused")):
                    print(format_row(rows[-1]), flush=True)
        process.stdin.close()
    return rows


def format_row(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return f"{row['outcome']:8} {row['architecture']:10} {row['kind']:9} {row['title']} | {row['note']}"


def format_table(rows: list[dict[str, Any]], key: str) -> str:
    """Return counts of outcomes by architecture or by kind."""
    values = dict.fromkeys(row[key] for row in rows)
    counts = {value: Counter(row["outcome"] for row in rows if row[key] == value) for value in values}
    counts["all"] = Counter(row["outcome"] for row in rows)
    lines = [f"{key:14}" + "".join(f"{name[:9]:>10}" for name in OUTCOMES)]
    lines += [f"{value:14}" + "".join(f"{count[name]:10}" for name in OUTCOMES) for value, count in counts.items()]
    return "\n".join(lines)


def main() -> None:
    """Run mutations from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", nargs="*", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--kind", nargs="*", help="run only these kinds, such as rename, drop or reorder")
    parser.add_argument("--title", help="run only mutations whose title contains this text")
    parser.add_argument(
        "--of",
        choices=("architecture", "all"),
        nargs="*",
        help="run only mutations of architectures' modeling files, or of the code that all architectures share",
    )
    parser.add_argument("--sample", type=int, help="number of randomly selected cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write all rows to this file, one per line")
    parser.add_argument("--all", action="store_true", help="print every row, not only the bad ones")
    parser.add_argument("--list", action="store_true", help="print the mutations without running them")
    args = parser.parse_args()
    mutations = [item for item in list_mutations(args.architecture) if not args.kind or item["kind"] in args.kind]
    mutations = [item for item in mutations if not args.title or args.title in item["title"]]
    if args.of:
        mutations = [
            item for item in mutations if ("architecture" if "architecture" in item["op"] else "all") in args.of
        ]
    if args.sample:
        mutations = sample(mutations, args.seed, args.sample)
    if args.list:
        print("\n".join(f"{item['kind']:9} {'+'.join(item['architectures'])} {item['title']}" for item in mutations))
        return
    begun = time.monotonic()
    with open(args.json, "w", encoding="utf-8") if args.json else contextlib.nullcontext() as log:
        rows = run(mutations, "all" if args.all else True, log)
    print(format_table(rows, "architecture"), format_table(rows, "kind"), sep="\n\n")
    print(f"{len(rows)} cases in {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
