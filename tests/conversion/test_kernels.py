"""Check conversions to linear attention: kernels as initialized, and fitted on text."""

import json
import re

import pytest
import torch
from fixtures.calibrations import compute_error, make_bert, make_calibration, make_inputs, make_t5, make_texts
from safetensors.torch import load_file
from transformers import AutoModel

from hf_attn_variants import AttnVariantBertConfig, AttnVariantBertModel, cli
from hf_attn_variants.conversion import convert_checkpoint, convert_model, load_converted

pytestmark = pytest.mark.cross_product

KERNELS = ("elu", "relu", "hedgehog", "favor", "rfa", "hybrid", "linformer")


def get_kernel_fields(kernel):
    return {"attention_kernel": kernel} | ({"attention_window": 2} if kernel == "hybrid" else {})


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_conversion_without_text_initializes_the_kernel(kernel):
    model = make_bert()
    converted = convert_model(model, **get_kernel_fields(kernel), method="mean")
    fresh = AttnVariantBertModel(AttnVariantBertConfig.from_upstream(model.config, **get_kernel_fields(kernel)))
    fresh.load_state_dict(model.state_dict(), strict=False)
    assert converted.state_dict().keys() == fresh.state_dict().keys()
    assert all(fresh.state_dict()[name].equal(tensor) for name, tensor in converted.state_dict().items())
    with torch.no_grad():
        assert converted(**make_inputs())[0].equal(fresh.eval()(**make_inputs())[0])


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", KERNELS)
def test_fitted_kernel_has_a_smaller_error(kernel):
    """Check the regression of the output projection, and fitting steps that also change the other projections."""
    model = make_bert()
    errors = [compute_error(convert_model(model, **get_kernel_fields(kernel), method="mean"), model)]
    for steps in (0, 60):
        calibration = make_calibration(fit_steps=steps, fit_learning_rate=0.1)
        errors.append(compute_error(convert_model(model, **get_kernel_fields(kernel), calibration=calibration), model))
    # For linformer, only the output projection is fitted, by a regression without fitting steps.
    least = {"linformer": 1.01}.get(kernel, 0.95)
    assert errors[2] < least * errors[1] < least * errors[0], errors


def test_heads_and_kernels_convert_together():
    model = make_bert()
    calibration = make_calibration(fit_steps=40, fit_learning_rate=0.1)
    both = convert_model(model, 2, attention_kernel="hedgehog", calibration=calibration)
    averaged = convert_model(model, 2, attention_kernel="hedgehog", method="mean")
    assert both.config.num_key_value_heads == 2
    assert both.encoder.layer[0].attention.self.key_kernel_proj.shape == (2, 8, 8)
    assert compute_error(both, model) < compute_error(averaged, model)


def test_cross_attention_of_t5_converts_to_a_kernel():
    model = make_t5()
    calibration = make_calibration(fit_steps=40, fit_learning_rate=0.1, target_texts=make_texts(seed=1))
    loose = convert_model(model, cross_attention_kernel="hedgehog", method="mean")
    fitted = convert_model(model, cross_attention_kernel="hedgehog", calibration=calibration)
    assert compute_error(fitted, model) < compute_error(loose, model)
    cross_attention = fitted.decoder.block[0].layer[1].EncDecAttention
    assert cross_attention.kernel.name == "hedgehog" and fitted.decoder.block[0].layer[0].SelfAttention.kernel is None


@pytest.fixture
def folder(tmp_path):
    make_bert().save_pretrained(tmp_path / "source")
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("kernel", ["hybrid", "favor"])
def test_folder_conversion_equals_the_in_memory_conversion(kernel, folder):
    options = {**get_kernel_fields(kernel), "calibration": make_calibration(fit_steps=10), "dtype": "bfloat16"}
    report = convert_checkpoint(folder / "source", folder / "made", **options)
    assert [layer.change for layer in report.layers] == ["kernel"] * 2 and report.is_reduced()
    names = {"relative_error_closed_form", "relative_error_fitted", "output_relative_error", "fit_kept"}
    assert all(layer.details.keys() == names for layer in report.layers)
    stored = load_file(folder / "made/model.safetensors")
    new = {"hybrid": "window_log_factor", "favor": "kernel_vectors"}[kernel]
    assert stored[f"encoder.layer.1.attention.self.{new}"].dtype == torch.bfloat16
    loaded = AutoModel.from_pretrained(folder / "made", dtype=torch.bfloat16)
    assert type(loaded) is AttnVariantBertModel and loaded.config.attention_kernel == kernel
    assert all(loaded.state_dict()[name].equal(tensor) for name, tensor in stored.items())
    model = load_converted(folder / "source", **options)
    assert all(model.state_dict()[name].equal(tensor) for name, tensor in stored.items())
    # Fewer heads keep random vectors unchanged. Learned feature maps cannot get fewer heads.
    if kernel == "favor":
        fewer = convert_model(loaded, 2, method="mean").state_dict()
        name = f"encoder.layer.1.attention.self.{new}"
        assert fewer[name].equal(stored[name])
    else:
        with pytest.raises(ValueError, match="`num_key_value_heads`"):
            convert_model(loaded, 2, method="mean")


def test_invalid_kernel_requests_raise_before_any_work(folder):
    for kernel, name in (("elu", "made"), ("linformer", "rows")):
        convert_checkpoint(folder / "source", folder / name, attention_kernel=kernel, method="mean")
    for source, fields, message in (
        ("made", {"attention_kernel": "favor"}, "`attention_kernel`"),
        ("made", {"num_key_value_heads": 2, "calibration": make_calibration()}, "the original model uses a kernel"),
        ("rows", {"max_position_embeddings": 600}, "`max_position_embeddings`"),
        ("source", {"attention_kernel": "exp"}, "`attention_kernel`"),
        ("source", {"attention_kernel": "elu", "talking_heads": "both"}, "cannot be combined"),
    ):
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(folder / source, folder / "other", **fields)
    assert not (folder / "other").exists()


def test_softmax_layers_stay_unchanged_in_a_kernel_conversion(folder, capsys):
    """Check that other layers equal a conversion of all layers, because each is fitted to the source."""
    lists = {"attention_kernel": [None, "hedgehog"]}
    options = {"calibration": make_calibration(fit_steps=10)}
    report = convert_checkpoint(folder / "source", folder / "some", per_layer_values=lists, **options)
    convert_checkpoint(folder / "source", folder / "all", attention_kernel="hedgehog", **options)
    assert [layer.change for layer in report.layers] == ["same", "kernel"]
    assert report.other_fields == {"attention_kernel": (None, [None, "hedgehog"])}
    some, everywhere, source = (load_file(folder / name / "model.safetensors") for name in ("some", "all", "source"))
    first, second = "encoder.layer.0.attention.", "encoder.layer.1.attention."
    names = {name for name in some if name.startswith(first)}
    assert names == {name for name in source if name.startswith(first)}
    assert all(some[name].equal(source[name]) for name in names)
    names = {name for name in some if name.startswith(second)}
    assert names == {name for name in everywhere if name.startswith(second)}
    assert all(some[name].equal(everywhere[name]) for name in names)
    model = AutoModel.from_pretrained(folder / "some")
    assert compute_error(model, make_bert()) < compute_error(AutoModel.from_pretrained(folder / "all"), make_bert())
    command = ["convert", "--model_name_or_path", str(folder / "source"), "--output_dir", str(folder / "told")]
    command += ["--per_layer_values", json.dumps(lists), "--method", "mean"]
    assert cli.main(command) == 0
    assert re.search(r"^  attention_kernel +none -> \[none, hedgehog\]$", capsys.readouterr().out, re.M)
    for values in (["hedgehog", None], ["hedgehog", "hedgehog"]):
        with pytest.raises(ValueError, match="`attention_kernel`"):
            convert_checkpoint(
                folder / "some", folder / "other", per_layer_values={"attention_kernel": values}, method="mean"
            )
