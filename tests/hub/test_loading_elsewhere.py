"""Check that saved checkpoints load under every Auto class in a process without this package."""

import ast
import builtins
import json
import textwrap

import pytest
import torch
from architectures import ARCHITECTURES, BERT
from fixtures.elsewhere import WITHOUT_PACKAGE, run_elsewhere
from fixtures.extensions import ALL_FIELDS
from safetensors.torch import save_file

import hf_attn_variants
from hf_attn_variants.modeling.architectures.configuration_attn_variants import CONFIG_CLASSES
from hf_attn_variants.modeling.code_builder import get_file_names
from hf_attn_variants.modeling.remote_code import get_code_files, write_code

# The models that are saved for each architecture: pairs of a variant and a head.
KINDS = [("gqa", "base"), ("gqa_talking", "language_model")]
KINDS += [(variant, "language_model") for variant in ("latent", "by layer", "by place", "favor", "extensions")]
OTHER_KINDS = [("gqa", "language_model"), ("gqa_talking", "base"), ("hedgehog", "language_model")]

# This code runs in a new folder with a new Hugging Face home, and cannot import the package.
ELSEWHERE = WITHOUT_PACKAGE + textwrap.dedent(
    """
    import json, re
    import torch, transformers
    from safetensors.torch import load_file

    def load(folder, tensors, resaved):
        saved = load_file(tensors)
        inputs = {name.removeprefix("input."): value for name, value in saved.items() if name.startswith("input.")}
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
        seen = {}
        for auto_class in sorted(set(config.auto_map) - {"AutoConfig"}):
            model = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True).eval()
            assert type(model).__module__.startswith("transformers_modules."), type(model)
            parameters = {n: p for n, p in model.named_parameters() if re.search("atte?n", n.lower())}
            assert parameters and all(p.isfinite().all() for p in parameters.values())
            seen[auto_class] = type(model).__name__
            if auto_class == "AutoModel":
                with torch.no_grad():
                    result = model(**inputs).last_hidden_state
                torch.testing.assert_close(result, saved["expected"], atol=1e-6, rtol=0)
                model.save_pretrained(resaved)
            if auto_class in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"):
                names = (f"input.{model.main_input_name}", "input.decoder_input_ids")
                prompts = next(saved[name] for name in names if name in saved)
                generated = model.generate(prompts, max_new_tokens=3, do_sample=False, pad_token_id=0)
                assert generated.shape[0] == prompts.shape[0]
            if auto_class == "AutoModelForCausalLM":
                # The Trainer of Transformers shifts the labels of classes in this mapping.
                names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
                assert type(model).__name__ in names.values()
        again = transformers.AutoModel.from_pretrained(resaved, trust_remote_code=True)
        with torch.no_grad():
            torch.testing.assert_close(again.eval()(**inputs).last_hidden_state, saved["expected"], atol=1e-6, rtol=0)
        return seen

    # Several models in one process use the code of their own folders.
    print(json.dumps([load(*sys.argv[i : i + 3]) for i in range(1, len(sys.argv), 3)]))
    """
)


def save_one(architecture, variant, saved, folder):
    """Save a model and its outputs for a batch; return what the other process must load."""
    base = next(iter(architecture.heads))
    auto_classes = architecture.config_class.auto_classes
    kinds = ("AutoModelForPreTraining", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForMaskedLM")
    language_model = next(auto_classes[kind] for kind in kinds if kind in auto_classes)
    heads = {"base": base, "language_model": language_model}
    head = heads[saved].removeprefix("AttnVariant")
    fields = {}
    if variant == "by layer":
        count = architecture.make_config().get_num_layers("kv_lora_rank")
        variant, fields = "latent", {"per_layer_values": {"kv_lora_rank": [16, None][:count]}}
        fields["score_function"] = "additive"
        if "sinusoidal" in architecture.config_class.position_types:
            fields["position_embedding_type"] = "sinusoidal"
    if variant == "by place":
        variant, fields = "mha", {"talking_heads": "both"}
        if hasattr(architecture.config_class, "encoder_talking_heads"):
            fields = {"cross_talking_heads": "both", "encoder_talking_heads": "logits"}
            fields["per_layer_values"] = {"talking_heads": [None, "weights"]}
    if variant == "extensions":
        variant, fields = "gqa", ALL_FIELDS
    if variant in ("favor", "hedgehog"):  # with random vectors, and with learned feature maps
        has_cross = hasattr(architecture.config_class, "cross_attention_kernel")
        variant, fields = "gqa", {"cross_attention_kernel" if has_cross else "attention_kernel": variant}
        if not has_cross and "hedgehog" in fields.values():  # also with the factor of a window
            fields = {"attention_kernel": "hybrid", "attention_window": 4}
    architecture.make_model(head, variant, **fields).save_pretrained(folder / "repo")
    model = getattr(hf_attn_variants, f"AttnVariant{base}").from_pretrained(folder / "repo").eval()
    inputs = architecture.make_batch(base)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    save_file(
        {"expected": expected} | {f"input.{name}": value.contiguous() for name, value in inputs.items()},
        folder / "tensors.safetensors",
    )
    return folder / "repo", folder / "tensors.safetensors", folder / "resaved"


@pytest.mark.thorough
@pytest.mark.parametrize("kinds", [KINDS, pytest.param(OTHER_KINDS, marks=pytest.mark.slow)], ids=["some", "others"])
def test_every_auto_class_loads_without_this_package(tmp_path, kinds):
    rows = [row for row in ARCHITECTURES for _ in kinds]
    folders = [save_one(row, *kind, tmp_path / row.name / "-".join(kind)) for row in ARCHITECTURES for kind in kinds]
    printed = run_elsewhere("-c", ELSEWHERE, *(path for paths in folders for path in paths), cwd=tmp_path / "cwd")
    assert json.loads(printed.splitlines()[-1]) == [row.config_class.auto_classes for row in rows]
    for repo, _, resaved in folders:
        assert sorted(path.name for path in resaved.glob("*.py")) == sorted(path.name for path in repo.glob("*.py"))


ADAPTED_ELSEWHERE = ELSEWHERE.split("import torch")[0] + textwrap.dedent(
    """
    import transformers

    import peft

    models = [transformers.AutoModel.from_pretrained(folder, trust_remote_code=True) for folder in sys.argv[1:]]
    adapted = [peft.get_peft_model(model, peft.LoraConfig(r=2)) for model in models]
    print(json.dumps([model.get_nb_trainable_parameters()[0] for model in adapted]))
    """
)


@pytest.mark.slow
def test_peft_finds_target_modules_without_this_package(tmp_path):
    peft = pytest.importorskip("peft")
    models = {row.name: row.make_model(next(iter(row.heads)), "gqa") for row in ARCHITECTURES}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    printed = run_elsewhere("-c", ADAPTED_ELSEWHERE, *(tmp_path / name for name in models), cwd=tmp_path)
    lora = peft.LoraConfig(r=2, target_modules=["query", "value", "q", "v"])
    adapted = [peft.get_peft_model(model, lora) for model in models.values()]
    assert json.loads(printed.splitlines()[-1]) == [item.get_nb_trainable_parameters()[0] for item in adapted]


@pytest.mark.parametrize("mechanisms", [None, frozenset(), frozenset({"patterns"})], ids=["all", "none", "patterns"])
@pytest.mark.parametrize("config_class", CONFIG_CLASSES, ids=lambda item: item.model_type)
def test_files_of_a_repository_import_only_each_other(config_class, mechanisms, tmp_path):
    """Check the imports that Transformers finds with a regular expression, also in docstrings."""
    from transformers.dynamic_module_utils import get_relative_imports

    files = get_code_files(config_class, config_class.modeling_file, mechanisms)
    write_code(tmp_path, config_class, config_class.modeling_file, mechanisms)
    assert {*files} == {path.name for path in tmp_path.iterdir()} and len(files) <= 8
    assert {*files} <= get_file_names()
    for name, text in files.items():
        assert text == (tmp_path / name).read_text(encoding="utf-8")
        assert {f"{item}.py" for item in get_relative_imports(tmp_path / name)} <= files.keys(), name
        assert not find_undefined_names(text), name


def find_undefined_names(text):
    """Return the names that a file uses without a definition anywhere in the file."""
    tree = ast.parse(text)
    defined = {*dir(builtins), "__file__", "__name__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - defined


def test_user_subclass_is_saved_with_its_own_file(tmp_path, monkeypatch):
    """Check that Transformers saves it next to our code, without copying our classes."""
    (tmp_path / "derived.py").write_text(
        "from hf_attn_variants import AttnVariantBertModel\n\n\nclass Derived(AttnVariantBertModel):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import derived

    assert hf_attn_variants.AttnVariantBertModel._auto_class is None and derived.Derived._auto_class == "AutoModel"
    BERT.make_model("BertModel", "gqa").save_pretrained(tmp_path / "ours")
    derived.Derived.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    variant_files, user_files = ({path.name for path in (tmp_path / item).glob("*.py")} for item in ("ours", "theirs"))
    assert user_files == variant_files | {"derived.py"}
    auto_map = json.loads((tmp_path / "theirs/config.json").read_text())["auto_map"]
    assert auto_map["AutoModel"] == "derived.Derived" and len(auto_map) > 5
