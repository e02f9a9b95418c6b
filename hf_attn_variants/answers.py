"""What a model's head answers: by what its logits mean, two models' answers are compared."""

from enum import Enum

from transformers import PreTrainedModel

__all__ = ["Answer", "answer_of"]


class Answer(Enum):
    """What the logits of a model's head mean, by which they are compared with a teacher's."""

    CLASSES = "one distribution over classes"
    LABELS = "a probability for each label"
    TOKENS = "a probability for each token"
    SCORES = "scores"


def answer_of(model: PreTrainedModel) -> Answer:
    """Return what a model's logits mean: as transformers' own losses, by the class and its `problem_type`."""
    name, config = type(model).__name__, model.config
    if name.endswith("ForPreTraining") and config.model_type.endswith("electra"):
        return Answer.TOKENS  # that it was replaced: logits [b, n]
    if not name.endswith("ForSequenceClassification"):
        return Answer.CLASSES
    problem = getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return Answer.LABELS
    is_regression = config.num_labels == 1 if problem is None else problem == "regression"
    return Answer.SCORES if is_regression else Answer.CLASSES
