"""Check the files of `accelerate_configs/`: accelerate reads them, and training with them equals one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from fixtures.commands import run_command
from fixtures.linear_loop import log_of
from fixtures.processes import run_and_check, run_script
from fixtures.uptraining import make_t5, make_text
from safetensors.torch import load_file

import hf_attn_variants
from hf_attn_variants.commands import load_command
from hf_attn_variants.commands.training import glue as glue_command
from hf_attn_variants.commands.training import uptrain
from hf_attn_variants.conversion import convert_checkpoint
from hf_attn_variants.training.engine.optimization import list_fsdp_layer_class_names
from hf_attn_variants.training.engine.session import configure_deepspeed, open_session

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "accelerate_configs"
TYPES = {
    "cpu": DistributedType.MULTI_GPU,
    "single_gpu": DistributedType.NO,
    "multi_gpu_ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "deepspeed_zero2": DistributedType.DEEPSPEED,
}


def test_every_config_has_a_test():
    assert {path.stem for path in CONFIGS.iterdir()} == TYPES.keys()


@pytest.mark.parametrize("name", TYPES)
def test_accelerate_knows_every_key(name):
    path = str(CONFIGS / f"{name}.yaml")
    assert load_config_from_file(path).distributed_type == TYPES[name]  # raises an error for unknown keys
    # accelerate does not check keys below fsdp_config and deepspeed_config, which must be launcher options.
    known = vars(launch_command_parser().parse_args(["script.py"]))
    settings = yaml.safe_load(Path(path).read_text())
    for section in ("fsdp_config", "deepspeed_config"):
        assert settings.get(section, {}).keys() <= known.keys()
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", path, "script.py"]))
    assert args.use_fsdp == (name == "fsdp2") and args.use_deepspeed == (name == "deepspeed_zero2")
    assert args.use_cpu == (name == "cpu") and args.mixed_precision == ("no" if name == "cpu" else "bf16")


@pytest.mark.parametrize(
    ("name", "sizes", "layers"),
    [
        ("BertForSequenceClassification", {"num_hidden_layers": 1, "intermediate_size": 16}, {"BertLayer"}),
        ("AlbertForSequenceClassification", {"num_hidden_layers": 1, "intermediate_size": 16}, set()),
        ("T5ForConditionalGeneration", {"num_layers": 1, "d_ff": 16}, {"T5Block"}),
    ],
)
def test_fsdp2_shards_existing_layer_classes(name, sizes, layers):
    # Without fsdp_transformer_layer_cls_to_wrap, these are the classes in `_no_split_modules`. ALBERT has none there
    # because its layers share one set of weights, so it is sharded as a whole.
    model_class = getattr(hf_attn_variants, f"AttnVariant{name}")
    model = model_class(model_class.config_class(vocab_size=50, **sizes))
    assert list_fsdp_layer_class_names(model) == layers
    assert layers <= set(model._no_split_modules) and layers <= {type(module).__name__ for module in model.modules()}


def test_deepspeed_gets_the_batch_size_and_unsupported_options_raise():
    config = {"gradient_clipping": 1.0, "gradient_accumulation_steps": 4}
    flags = ["--model_name_or_path", "m", "--task_name", "cola", "--output_dir", "o", "--max_grad_norm", "0.5"]
    configure_deepspeed(glue_command.parse_args(flags), config)
    sizes = {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 32}
    assert config == {"gradient_clipping": 0.5, **sizes}
    with pytest.raises(ValueError, match="--gradient_accumulation_steps must be 1"):
        configure_deepspeed(glue_command.parse_args([*flags, "--gradient_accumulation_steps", "2"]), config)


def _open_session(tmp_path, *flags):
    needed = ["--model_name_or_path", "m", "--task_name", "cola", "--output_dir", str(tmp_path / "out"), "--cpu"]
    return open_session(glue_command.parse_args([*needed, *flags]))


def test_accelerate_environment_does_not_scale_the_gradient(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    weight = torch.ones(1, requires_grad=True)
    with _open_session(tmp_path) as accelerator:
        accelerator.backward(weight.sum())
    assert weight.grad == 1


def test_adafactor_with_fsdp2_raises_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "is_fsdp2", True)
    with (
        pytest.raises(ValueError, match="--optim adafactor is not supported"),
        _open_session(tmp_path, "--optim", "adafactor"),
    ):
        pass
    assert not (tmp_path / "out").exists()


def run_fsdp(environment, command, argv):
    """Run a training command like `accelerate launch` with FSDP2, on the CPU."""
    os.environ.update(environment)
    # accelerate disables FSDP without an accelerator, so the test pretends that there is one.
    PartialState._prepare_backend = lambda self, *args, **others: ("gloo", DistributedType.MULTI_GPU)
    training = load_command(command)
    run_command(training, *argv)


def launch(config, script, *argv):
    launcher = ["--config_file", CONFIGS / config, "--num_processes", 2, "--main_process_port", 0]
    launcher += ["--mixed_precision", "no"]  # this CPU may have no bfloat16 instructions
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, script, *argv]
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def launch_fsdp():
    """Run a command with the environment variables of `accelerate launch` and fsdp2.yaml, in two forked processes."""
    argv = ["--config_file", CONFIGS / "fsdp2.yaml", "--num_processes", 2, "--mixed_precision", "no", "script.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([str(part) for part in argv]))
    set_by_it = {name: value for name, value in prepare_multi_gpu_env(args).items() if name not in os.environ}
    set_by_it = {name: value for name, value in set_by_it.items() if not name.startswith("MASTER_")}

    def launch(command, *flags):
        environment = {**set_by_it, "ACCELERATE_TORCH_DEVICE": "cpu"}
        run_and_check(2, run_fsdp, environment, command, flags)

    return launch


def read_losses(folder):
    return [record["loss"] for record in log_of(folder) if "loss" in record]


def has_close_weights(first, second):
    result, expected = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert result.keys() == expected.keys()
    return all(torch.allclose(result[name], expected[name], atol=1e-5) for name in result)


def make_glue_flags(model, glue, out, batch_size, *more):
    return [
        "--model_name_or_path", model, "--task_name", "stsb", "--data_dir", glue / "STS-B", "--output_dir", out,
        "--max_length", 48, "--per_device_train_batch_size", batch_size, "--gradient_accumulation_steps", 2,
        "--max_train_steps", 6, "--dropout_rate", 0, "--logging_steps", 1, "--checkpointing_steps", 4,
        "--skip_predict", "--disable_tqdm", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def variant(tiny_bert):
    convert_checkpoint(tiny_bert, tiny_bert.parent / "variant", 2, talking_heads="both")
    return tiny_bert.parent / "variant"


@pytest.fixture(scope="module")
def one_process(variant, glue, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "out"
    run_command(glue_command, *make_glue_flags(variant, glue, out, 4, "--cpu"))
    return out


@pytest.mark.thorough
def test_two_cpu_processes_equal_one_and_resume_bitwise_equal(variant, glue, one_process, tmp_path):
    launch("cpu.yaml", ROOT / "scripts/run_glue.py", *make_glue_flags(variant, glue, tmp_path / "two", 2, "--cpu"))
    assert (tmp_path / "two/checkpoint-4/random_states_1.pkl").is_file()
    assert len(read_losses(one_process)) == 6
    assert read_losses(tmp_path / "two") == pytest.approx(read_losses(one_process), rel=1e-4)
    assert has_close_weights(tmp_path / "two", one_process)
    resume = ["--cpu", "--resume_from_checkpoint", tmp_path / "two/checkpoint-4"]
    flags = make_glue_flags(variant, glue, tmp_path / "resumed", 2, *resume)
    run_and_check(2, run_script, "run_glue", flags)
    assert read_losses(tmp_path / "resumed") == read_losses(tmp_path / "two")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("two", "resumed")]
    assert weights[0] == weights[1]
    with pytest.raises(ValueError, match="processes was 2 and is now 1"):
        run_command(glue_command, *make_glue_flags(variant, glue, tmp_path / "alone", 2, *resume))


@pytest.mark.thorough
def test_fsdp2_equals_one_process_and_resumes_bitwise_equal(variant, glue, one_process, launch_fsdp, tmp_path):
    uninterrupted, resumed = tmp_path / "whole", tmp_path / "resumed"
    launch_fsdp("glue", *make_glue_flags(variant, glue, uninterrupted, 2))
    assert (uninterrupted / "checkpoint-4/pytorch_model_fsdp_0/__1_0.distcp").is_file()  # each process saved its share
    assert read_losses(uninterrupted) == pytest.approx(read_losses(one_process), rel=1e-4)
    assert has_close_weights(uninterrupted, one_process)
    code = {path.name for path in one_process.glob("*.py")}
    assert "modeling_attn_variant_bert.py" in code and {path.name for path in uninterrupted.glob("*.py")} == code
    launch_fsdp(
        "glue", *make_glue_flags(variant, glue, resumed, 2, "--resume_from_checkpoint", uninterrupted / "checkpoint-4")
    )
    assert read_losses(resumed) == read_losses(uninterrupted)
    assert (resumed / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()


@pytest.mark.thorough
def test_fsdp2_trains_a_t5_with_tied_embeddings_and_keeps_its_best_weights(launch_fsdp, tmp_path):
    make_text(tmp_path)
    source, target = tmp_path / "source.txt", tmp_path / "target.txt"
    convert_checkpoint(make_t5(tmp_path / "t5"), tmp_path / "gqa", 2)

    def flags(out, batch_size, *more):
        pairs = ["--source_file", source, "--target_file", target]
        pairs += ["--validation_source_file", source, "--validation_target_file", target]
        return [
            "--model_name_or_path", tmp_path / "gqa", "--objective", "seq2seq", *pairs, "--output_dir", out,
            "--max_length", 16, "--per_device_train_batch_size", batch_size, "--max_train_steps", 4,
            "--eval_steps", 2, "--learning_rate", 3e-3, "--trainable", "all", "--metric_for_best_model", "loss",
            "--dropout_rate", 0, "--logging_steps", 1, "--disable_tqdm", *more,
        ]  # fmt: skip

    one, two = tmp_path / "one", tmp_path / "two"
    expected = run_command(uptrain, *flags(one, 16, "--cpu"))
    launch_fsdp("uptrain", *flags(two, 8))
    results = json.loads((two / "all_results.json").read_text())
    assert read_losses(two) == pytest.approx(read_losses(one), rel=1e-4) and len(read_losses(one)) == 4
    assert results["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert results["best_step"] == expected["best_step"] and has_close_weights(two, one)
