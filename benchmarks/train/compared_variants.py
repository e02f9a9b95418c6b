"""The models that `finetuned_variants.py` compares, and how each is created from the original model."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class TaskDistillation(NamedTuple):
    """The settings of a distillation on training texts of a task.

    Args:
        texts: The number of texts. uptrain.py holds out a twentieth of them, but at most 512.
        flags: Other flags of uptrain.py.
    """

    texts: int
    flags: tuple[str, ...]


BEFORE = TaskDistillation(5312, ("--max_train_steps", "150", "--learning_rate", "1e-4"))
# One epoch of the SQuAD subset.
EPOCH_BEFORE = TaskDistillation(18_995, ("--max_train_steps", "577", "--learning_rate", "1e-4"))
# Half an epoch of the subset, for a converted fine-tuned model. The calibration has already fitted its attention.
AFTER = TaskDistillation(
    18_995, ("--max_train_steps", "280", "--learning_rate", "2e-5", "--attention_outputs_weight", "0")
)


# The second and third layer of MiniLM are token-matching layers.
MATCHING = {"keep_matching_layers": 2, "method": "calibrated"}


@dataclass(frozen=True)
class Variant:
    """A model of the comparison.

    Args:
        fields: The arguments of `convert_checkpoint`. `Variant()` is the original model.
        distilled_from: The name of the variant that `scripts/uptrain.py` trains. In this case, nothing is converted.
        distillation: The settings of a distillation on the training texts of the task, or None for a distillation on
            lines of Wikipedia.
        on_task: Whether the calibration or the distillation reads the training texts of the task. If so, there is one
            checkpoint per task.
        at_defaults: Whether the calibration uses the defaults of `convert`, with lines and passages of Wikipedia.
        of_finetuned: Whether the source and the teacher are the fine-tuned "MHA" of the same task and seed. The result
            is not trained on the labels of the task again, unless `trained_again` is set.
        trained_again: The name of the variant whose checkpoint is trained on the task, with the same settings as MHA.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    distilled_from: str | None = None
    distillation: TaskDistillation | None = None
    on_task: bool = False
    at_defaults: bool = False
    of_finetuned: bool = False
    trained_again: str | None = None


MHA = "MHA"
VARIANTS = {
    MHA: Variant(),
    "GQA-4 (calibrated, distilled)": Variant(distilled_from="GQA-4 (calibrated)"),
    "GQA-4 (calibrated on the task)": Variant({"num_key_value_heads": 4, "method": "calibrated"}, on_task=True),
    "GQA-4 (calibrated on the task, distilled on it)": Variant(
        distilled_from="GQA-4 (calibrated on the task)", distillation=BEFORE, on_task=True
    ),
    "GQA-4 (calibrated on the task, distilled on it for 577 steps)": Variant(
        distilled_from="GQA-4 (calibrated on the task)", distillation=EPOCH_BEFORE, on_task=True
    ),
    "GQA-4 (the fine-tuned MHA, calibrated on the task)": Variant(
        {"num_key_value_heads": 4, "method": "calibrated"}, on_task=True, of_finetuned=True
    ),
    "GQA-4 (the fine-tuned MHA, calibrated on the task, distilled on it)": Variant(
        distilled_from="GQA-4 (the fine-tuned MHA, calibrated on the task)",
        distillation=AFTER,
        on_task=True,
        of_finetuned=True,
    ),
    "GQA-4 (calibrated)": Variant({"num_key_value_heads": 4, "method": "calibrated"}),
    "GQA-4 (calibrated at the defaults)": Variant(
        {"num_key_value_heads": 4, "method": "calibrated"}, at_defaults=True
    ),
    **{
        f"{name} but in matching layers (calibrated at the defaults)": Variant(
            {"num_key_value_heads": heads} | MATCHING, at_defaults=True
        )
        for name, heads in (("GQA-4", 4), ("GQA-2", 2), ("MQA", 1))
    },
    "GQA-4 but in matching layers (calibrated on the task)": Variant(
        {"num_key_value_heads": 4} | MATCHING, on_task=True
    ),
    # For comparison, two unconverted layers that are not token-matching layers.
    "GQA-4 but in layers 0 and 3 (calibrated at the defaults)": Variant(
        {"per_layer_values": {"num_key_value_heads": [12, 4, 4, 12, 4, 4]}, "method": "calibrated"}, at_defaults=True
    ),
    "MQA (calibrated at the defaults)": Variant({"num_key_value_heads": 1, "method": "calibrated"}, at_defaults=True),
    "GQA-4 (mean)": Variant({"num_key_value_heads": 4}),
    "MQA (calibrated)": Variant({"num_key_value_heads": 1, "method": "calibrated"}),
    "MQA (calibrated on the task)": Variant({"num_key_value_heads": 1, "method": "calibrated"}, on_task=True),
    "MQA (mean)": Variant({"num_key_value_heads": 1}),
    "hedgehog (calibrated at the defaults)": Variant(
        {"attention_kernel": "hedgehog", "method": "calibrated"}, at_defaults=True
    ),
    "hedgehog (calibrated on the task)": Variant(
        {"attention_kernel": "hedgehog", "method": "calibrated"}, on_task=True
    ),
    "hedgehog (calibrated on the task, distilled on it)": Variant(
        distilled_from="hedgehog (calibrated on the task)", distillation=BEFORE, on_task=True
    ),
    "hedgehog (calibrated on the task, distilled on it for 577 steps)": Variant(
        distilled_from="hedgehog (calibrated on the task)", distillation=EPOCH_BEFORE, on_task=True
    ),
    "hedgehog of 128 features (calibrated on the task)": Variant(
        {"attention_kernel": "hedgehog", "attention_kernel_features": 128, "method": "calibrated"}, on_task=True
    ),
    "hybrid (calibrated on the task)": Variant(
        {"attention_kernel": "hybrid", "attention_window": 8, "method": "calibrated"}, on_task=True
    ),
    "linformer (calibrated on the task)": Variant(
        {"attention_kernel": "linformer", "attention_kernel_features": 64, "method": "calibrated"}, on_task=True
    ),
    "hedgehog (the fine-tuned MHA, calibrated on the task)": Variant(
        {"attention_kernel": "hedgehog", "method": "calibrated"}, on_task=True, of_finetuned=True
    ),
    "hedgehog (the fine-tuned MHA, calibrated on the task, distilled on it for 577 steps)": Variant(
        distilled_from="hedgehog (the fine-tuned MHA, calibrated on the task)",
        distillation=EPOCH_BEFORE,
        on_task=True,
        of_finetuned=True,
    ),
    "hedgehog but in matching layers (calibrated at the defaults)": Variant(
        {"attention_kernel": "hedgehog"} | MATCHING, at_defaults=True
    ),
    "hedgehog but in matching layers (the fine-tuned MHA, calibrated on the task)": Variant(
        {"attention_kernel": "hedgehog"} | MATCHING, on_task=True, of_finetuned=True
    ),
    "talking heads (identity)": Variant({"talking_heads": "both"}),
}
for _name in (
    "hedgehog (the fine-tuned MHA, calibrated on the task)",
    "hedgehog (the fine-tuned MHA, calibrated on the task, distilled on it for 577 steps)",
    "hedgehog but in matching layers (the fine-tuned MHA, calibrated on the task)",
):
    VARIANTS[f"{_name[:-1]}, trained again)"] = replace(VARIANTS[_name], trained_again=_name)
