"""The code of model repositories: what it includes, and repositories with different code in one process."""

import ast
import copy
import json
import pickle
import textwrap

import pytest
import torch
from architectures import BERT, T5
from fixtures.elsewhere import run_elsewhere
from fixtures.extensions import ALL_FIELDS
from safetensors.torch import save_file

import hf_attn_variants
from benchmarks.versions.code_size import count_remote_code
from hf_attn_variants.modeling import code_builder
from hf_attn_variants.modeling.code_builder import ENTRY_POINTS, MODELING_FOLDER, build_code
from hf_attn_variants.modeling.fields.composition import ATTENTION_EXTENSIONS, MECHANISMS, get_used_mechanisms

# Repositories with different mechanisms: the configuration fields of a BERT, and the mechanisms with included code.
REPOSITORIES = {
    "grouped": ({"num_key_value_heads": 2}, set()),
    "windowed": ({"attention_pattern": "sliding_window", "attention_window": 4}, {"patterns"}),
    "latent": ({"kv_lora_rank": 8}, {"latents"}),
    "layers": ({"per_layer_values": {"num_key_value_heads": [1, 12]}}, {"unequal_layers"}),
    "talking": ({"talking_heads": "both", "talking_heads_init": "random"}, {"talking_heads"}),
    "linear": ({"attention_kernel": "hybrid", "attention_window": 4}, {"linear_attention"}),
    "additive": (
        {"score_function": "additive", "position_embedding_type": "sinusoidal"},
        {"additive_score", "sinusoidal_positions"},
    ),
    "gated": (ALL_FIELDS, {*ALL_FIELDS}),
    "knocking": ({"knocking_heads": "all"}, {"knocking_heads"}),
}
# A program that loads repositories in the order of its arguments, and imports the package before them, after them or
# never.
LOADING = textwrap.dedent(
    """
    import json, sys, torch
    from safetensors.torch import load_file
    from transformers import AutoModel

    when, *folders = sys.argv[1:]
    if when == "before":
        import hf_attn_variants
    models = {folder: AutoModel.from_pretrained(folder, trust_remote_code=True).eval() for folder in folders}
    if when == "after":
        import hf_attn_variants
    for folder, model in models.items():
        # If the package was imported first, its own classes are loaded.
        package = "hf_attn_variants." if when == "before" else "transformers_modules."
        assert type(model).__module__.startswith(package), type(model)
        saved = load_file(f"{folder}/../tensors-{folder.rpartition('/')[2]}.safetensors")
        batch = {name.removeprefix("input."): value for name, value in saved.items() if name.startswith("input.")}
        with torch.no_grad():
            for implementation in ("sdpa", "eager"):
                model.set_attn_implementation(implementation)
                result = model(**batch).last_hidden_state
                torch.testing.assert_close(result, saved["expected"], atol=1e-5, rtol=0)
    """
)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repositories")
    for name, (fields, _) in REPOSITORIES.items():
        model = BERT.make_model("BertModel", "mha", **fields).eval()
        model.save_pretrained(folder / name)
        batch = BERT.make_batch("BertModel")
        with torch.no_grad():
            expected = model(**batch).last_hidden_state
        tensors = {f"input.{key}": value.contiguous() for key, value in batch.items()}
        save_file({"expected": expected} | tensors, folder / f"tensors-{name}.safetensors")
    return folder


def test_entry_points_and_fields_exist():
    """Check that entry points are defined once, because a stub replaces each definition of a name."""
    trees = [ast.parse(path.read_text()) for path in MODELING_FOLDER.rglob("*.py")]
    defined = [node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert [name for name in ENTRY_POINTS if defined.count(name) != 1] == []
    mechanisms = {mechanism for needed_by in ENTRY_POINTS.values() for mechanism in needed_by}
    # The code builder finds the classes of extensions in their files.
    extensions = {extension.__name__: extension.field for extension in ATTENTION_EXTENSIONS}
    assert code_builder._find_extensions() == extensions
    assert mechanisms - {"extensions"} | {*extensions.values()} == {*MECHANISMS.values()}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_used_mechanisms_follow_the_fields(name):
    fields, mechanisms = REPOSITORIES[name]
    assert get_used_mechanisms(BERT.make_config(**fields)) == mechanisms


def test_value_in_one_layer_selects_the_mechanism():
    assert get_used_mechanisms(BERT.make_config(per_layer_values={"kv_lora_rank": [None, 8]})) == {
        "latents",
        "unequal_layers",
    }
    assert get_used_mechanisms(T5.make_config(cross_talking_heads="none", encoder_talking_heads="logits")) == {
        "talking_heads"
    }
    assert get_used_mechanisms(BERT.make_config(position_embedding_type="absolute")) == frozenset()


def test_grouped_bert_includes_no_other_mechanism(repositories):
    code = {path.name: path.read_text() for path in (repositories / "grouped").glob("*.py")}
    assert len(code) <= 8 and sum(len(text.splitlines()) for text in code.values()) < 5000
    text = "\n".join(code.values())
    for name in ("triton", "windowed_attention", "talking_heads_attention", "class Favor", "class AttnVariantT5"):
        assert name not in text
    assert "triton" in (repositories / "talking/attn_variants_ops.py").read_text()
    assert "triton" in (repositories / "latent/attn_variants_ops.py").read_text()


def test_architecture_page_states_the_code_size():
    """Check the table up to hundreds, so that small changes of the code need no update."""
    page = (MODELING_FOLDER.parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    counts = count_remote_code()
    columns = ("grouped_heads", "latents", "talking_heads", "patterns", "linear_attention")
    for name, model_type in (("BERT", "bert"), ("T5", "t5"), ("Whisper", "whisper")):
        [row] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        shown = [int(cell.replace(",", "")) for cell in row.split("|")[2:-1]]
        measured = [counts[f"attn_variant_{model_type}"][column][1] for column in columns]
        assert shown == pytest.approx(measured, abs=100), measured


def test_code_builds_are_reproducible(repositories):
    roots = (("configuration_attn_variants", "AttnVariantBertConfig"), ("modeling_attn_variant_bert", "*"))
    build_code.cache_clear()
    files = build_code(roots, frozenset())
    assert files == {path.name: path.read_text() for path in (repositories / "grouped").glob("*.py")}
    digests = {name: build_code(roots, frozenset({name}))["attn_variants_base.py"] for name in MECHANISMS.values()}
    assert len({*digests.values(), files["attn_variants_base.py"]}) == len(digests) + 1


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "after", "never"])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_repositories_in_one_process_use_their_own_code(when, is_reversed, repositories, tmp_path):
    folders = [repositories / name for name in REPOSITORIES]
    folders = folders[::-1] if is_reversed else folders
    run_elsewhere("-c", LOADING, when, *folders, cwd=tmp_path)


CHANGED = textwrap.dedent(
    """
    import json, sys
    from transformers import AutoConfig, AutoModel

    folder, fields = sys.argv[1], json.loads(sys.argv[2])
    for load in (
        lambda: AutoConfig.from_pretrained(folder, trust_remote_code=True, **fields),
        lambda: AutoModel.from_pretrained(folder, trust_remote_code=True, **fields),
    ):
        try:
            load()
        except ValueError as error:
            print(error)
    """
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["windowed", "talking", "linear", "additive"])
def test_missing_mechanism_error_names_the_mechanism(name, repositories, tmp_path):
    fields, mechanisms = REPOSITORIES[name]
    arguments = (repositories / "grouped", json.dumps(fields))
    lines = run_elsewhere("-c", CHANGED, *arguments, cwd=tmp_path).splitlines()
    assert len(lines) == 2 and all(f"does not include {', '.join(sorted(mechanisms))}" in line for line in lines)


USED = textwrap.dedent(
    """
    import copy, pickle, sys, torch
    from pathlib import Path
    from safetensors.torch import load_file
    from transformers import AutoModel

    folder, again = Path(sys.argv[1]), Path(sys.argv[2])
    saved = load_file(folder.parent / f"tensors-{folder.name}.safetensors")
    batch = {name.removeprefix("input."): value for name, value in saved.items() if name.startswith("input.")}
    model = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()

    def check(model, **options):
        with torch.no_grad():
            result = model(**batch, **options)
        torch.testing.assert_close(result.last_hidden_state, saved["expected"], atol=1e-5, rtol=0)
        return result

    with torch.no_grad():
        model(input_ids=batch["input_ids"])  # first call the model without padding
    check(model)
    check(copy.deepcopy(model))
    check(pickle.loads(pickle.dumps(model)))
    model.set_attn_implementation("eager")
    assert len(check(model, output_attentions=True).attentions) == model.config.num_hidden_layers
    model.set_attn_implementation("sdpa")
    check(model, output_attentions=True)
    for name in ("other.txt", "attn_variants_ops.py"):  # unrelated, and of another mechanism
        again.mkdir(exist_ok=True)
        (again / name).write_text("x = 1")
    model.save_pretrained(again)
    for path in folder.glob("*.py"):
        assert path.read_text() == (again / path.name).read_text(), path.name
    check(AutoModel.from_pretrained(again, trust_remote_code=True).eval())
    """
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", REPOSITORIES)
def test_remote_model_supports_copy_pickle_switch_and_save(name, repositories, tmp_path):
    run_elsewhere("-c", USED, repositories / name, tmp_path / "again", cwd=tmp_path)


EXTENDED = textwrap.dedent(
    """
    import multiprocessing, onnxruntime, operator, sys, torch
    from concurrent.futures import ProcessPoolExecutor
    from pathlib import Path
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file
    from transformers import AutoModel

    folder = Path(sys.argv[1])
    saved = load_file(folder.parent / f"tensors-{folder.name}.safetensors")
    batch = {name.removeprefix("input."): value for name, value in saved.items() if name.startswith("input.")}

    def load():
        return AutoModel.from_pretrained(folder, trust_remote_code=True).eval()

    def check(result, atol=1e-5):
        torch.testing.assert_close(result.last_hidden_state, saved["expected"], atol=atol, rtol=0)

    with torch.no_grad():
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            check(pool.submit(operator.methodcaller("__call__", **batch), load().requires_grad_(False)).result())
        check(torch.compile(load(), backend="aot_eager")(**batch))
        check(torch.export.export(load(), (), batch).module()(**batch))
        options = {"kwargs": batch, "dynamo": True, "verbose": False}
        graph = torch.onnx.export(load(), (), **options).model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
        inputs = {item.name: batch[item.name].numpy() for item in session.get_inputs()}
        result = torch.from_numpy(session.run(None, inputs)[0])
        # ONNX Runtime returns other values for padding whose window contains no text.
        is_text = batch["attention_mask"].bool()
        torch.testing.assert_close(result[is_text], saved["expected"][is_text], atol=1e-4, rtol=0)
        merged = get_peft_model(load(), LoraConfig(target_modules=["query", "value"]))
        check(merged(**batch))
        check(merged.merge_and_unload()(**batch))

        from hf_attn_variants import quantize
        from hf_attn_variants.quantization import packed_linear

        packed_linear.MIN_WEIGHTS = 1
        quantized = quantize(load())
        check(quantized(**batch), atol=0.3)
    """
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", REPOSITORIES)
def test_remote_model_supports_spawn_compile_exports_lora_and_quantize(name, repositories, tmp_path):
    run_elsewhere("-c", EXTENDED, repositories / name, cwd=tmp_path)


def test_package_model_supports_copy_and_pickle():
    model, batch = BERT.make_model("BertModel", "gqa").eval(), BERT.make_batch("BertModel")
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
        for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert same(**batch).last_hidden_state.equal(expected)


def test_saving_replaces_the_code_of_another_mechanism(tmp_path):
    BERT.make_model("BertModel", "gqa_talking").save_pretrained(tmp_path)
    BERT.make_model("BertModel", "gqa").save_pretrained(tmp_path)
    assert "triton" not in "".join(path.read_text() for path in tmp_path.glob("*.py"))
    assert hf_attn_variants.AttnVariantBertModel.from_pretrained(tmp_path).config.talking_heads is None
