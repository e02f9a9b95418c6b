"""Compare the terms of distillation with their formulas, and check the recorded states of each architecture."""

import types

import pytest
import torch
from architectures import ALBERT, ARCHITECTURES, BERT, T5
from relatives import ENCODERS
from torch.nn import functional

from hf_attn_variants.model_properties import LogitsKind, get_logits_kind
from hf_attn_variants.training.engine.optimization import compute_token_cross_entropy
from hf_attn_variants.training.engine.trainable_parameters import (
    iterate_attention_modules,
    select_trainable_parameters,
)
from hf_attn_variants.training.uptraining import objective
from hf_attn_variants.training.uptraining.objective import (
    ActivationRecorder,
    Teacher,
    TermWeights,
    UptrainingObjective,
    check_teacher_config,
    compute_embedding_distance,
    compute_label_divergence,
    compute_layer_error,
    compute_logits_divergence,
    compute_scores_error,
)

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
BASES = {"bert": "BertModel", "albert": "AlbertModel", "t5": "T5ForConditionalGeneration"}


def draw_random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_layer_error_is_the_share_of_the_variance_and_ignores_padding():
    student, teacher = [draw_random(2, 4, 3, seed=i) for i in (0, 1)], [draw_random(2, 4, 3, seed=i) for i in (2, 3)]
    sums, items = compute_layer_error(student, teacher, [torch.tensor(2.0), torch.tensor(4.0)], MASK)
    expected = torch.zeros(2)
    for b, n in MASK.nonzero().tolist():
        for layer, variance in enumerate((2.0, 4.0)):
            expected[b] += ((student[layer][b, n] - teacher[layer][b, n]) ** 2).mean() / variance / 2
    torch.testing.assert_close(sums, expected)
    assert items.tolist() == [3, 1]
    for states in (*student, *teacher):
        states[MASK == 0] = torch.nan_to_num(states[MASK == 0] + 1e3)
    torch.testing.assert_close(
        compute_layer_error(student, teacher, [torch.tensor(2.0), torch.tensor(4.0)], MASK)[0], sums
    )


def test_mean_vector_of_the_teacher_has_error_one():
    architecture, head = BERT, "BertModel"
    teacher = Teacher(architecture.make_model(head), hidden_states=True, attention_outputs=True)
    batch = architecture.make_batch(head)
    mask = batch["attention_mask"]
    teacher.measure_variances([(batch, {"encoder": mask})])
    states = teacher.run(batch)
    for kind in ("hidden_states", "attention_outputs"):
        layers = getattr(states, kind)["encoder"]
        means = [layer[mask.bool()].mean(0).expand_as(layer) for layer in layers]
        sums, items = compute_layer_error(means, layers, teacher.variances[kind, "encoder"], mask)
        assert float(sums.sum() / items.sum()) == pytest.approx(1.0, rel=1e-4)


def test_logits_divergence_equals_kullback_leibler_at_the_temperature():
    student, teacher = draw_random(2, 4, 5).float(), draw_random(2, 4, 5, seed=1).float()
    sums, items = compute_logits_divergence(student, teacher, MASK, temperature=2.0)
    p, q = (teacher / 2).softmax(-1), (student / 2).softmax(-1)
    expected = (4 * (p * (p / q).log()).sum(-1) * MASK).sum(-1)
    torch.testing.assert_close(sums, expected)
    assert items.tolist() == [3, 1]
    sums, items = compute_logits_divergence(student[:, 0], teacher[:, 0], None, temperature=2.0)
    torch.testing.assert_close(sums, 4 * (p * (p / q).log()).sum(-1)[:, 0])
    assert items.tolist() == [1, 1]


@pytest.mark.parametrize("mask", [None, MASK])
def test_multilabel_probabilities_are_compared_per_label(mask):
    student, teacher = draw_random(2, 4).float(), draw_random(2, 4, seed=1).float()
    sums, items = compute_label_divergence(student, teacher, mask, temperature=2.0)
    p, q = (teacher / 2).sigmoid(), (student / 2).sigmoid()
    expected = 4 * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())
    counted = torch.ones(2, 4) if mask is None else mask
    torch.testing.assert_close(sums, (expected * counted).sum(-1))
    assert items.tolist() == counted.sum(-1).tolist()


def _compute_logits_term(student, teacher, batch):
    objective = UptrainingObjective(student, TermWeights(logits=1.0), Teacher(teacher))
    with torch.no_grad():
        sums, items = objective.compute_terms(student, batch)["logits_divergence"]
        return sums.sum() / items.sum(), student(**batch).logits, teacher(**batch).logits


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_shifted_multilabel_logits_change_the_error_unlike_a_softmax(problem):
    head = "BertForSequenceClassification"
    teacher, student = (BERT.make_model(head, num_labels=3, problem_type=problem) for _ in range(2))
    with torch.no_grad():
        student.classifier.bias.add_(1.0)
    actual, student_logits, teacher_logits = _compute_logits_term(student, teacher, BERT.make_batch(head))
    p, q = teacher_logits.sigmoid(), student_logits.sigmoid()
    of_labels = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    expected = float(of_labels) if problem.startswith("multi") else 0.0
    assert float(actual) == pytest.approx(expected, rel=1e-4, abs=1e-6) and float(of_labels) > 0.01


def test_discriminator_outputs_are_compared_per_token_without_padding():
    electra = next(item for item in ENCODERS if "ElectraModel" in item.heads)
    student, teacher = (electra.make_model("ElectraForPreTraining", seed=seed) for seed in (0, 1))
    batch = electra.make_batch("ElectraForPreTraining")
    actual, student_logits, teacher_logits = _compute_logits_term(student, teacher, batch)
    p, q, mask = teacher_logits.sigmoid(), student_logits.sigmoid(), batch["attention_mask"]
    divergence = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    assert float(actual) == pytest.approx(float((divergence * mask).sum() / mask.sum()), rel=1e-3)


def test_score_error_is_a_share_of_the_variance():
    student, teacher = draw_random(5, 2).float(), draw_random(5, 2, seed=1).float()
    sums, items = compute_scores_error(student, teacher, torch.tensor(4.0))
    torch.testing.assert_close(sums, ((student - teacher) ** 2).mean(-1) / 4)
    assert items.tolist() == [1] * 5


@pytest.mark.parametrize(
    ("head", "fields", "answer"),
    [
        ("SequenceClassification", {"num_labels": 1}, LogitsKind.SCORES),
        ("SequenceClassification", {"num_labels": 3}, LogitsKind.CLASSES),
        ("SequenceClassification", {"num_labels": 3, "problem_type": "regression"}, LogitsKind.SCORES),
        ("SequenceClassification", {"num_labels": 3, "problem_type": "multi_label_classification"}, LogitsKind.LABELS),
        ("SequenceClassification", {"num_labels": 1, "problem_type": "multi_label_classification"}, LogitsKind.LABELS),
        (
            "SequenceClassification",
            {"num_labels": 2, "problem_type": "single_label_classification"},
            LogitsKind.CLASSES,
        ),
        ("TokenClassification", {"num_labels": 3}, LogitsKind.CLASSES),
        ("MaskedLM", {"num_labels": 1}, LogitsKind.CLASSES),
        ("PreTraining", {}, LogitsKind.TOKENS),
    ],
)
def test_logits_are_interpreted_like_the_losses_of_transformers(head, fields, answer):
    electra = next(item for item in ENCODERS if "ElectraModel" in item.heads)
    assert get_logits_kind(electra.make_model(f"ElectraFor{head}", **fields)) is answer
    if head != "PreTraining":
        assert get_logits_kind(BERT.make_upstream_model(f"BertFor{head}", **fields)) is answer


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_is_excluded_from_answer_positions(dtype, temperature):
    spans = [draw_random(2, 2, 4, seed=seed).to(dtype) for seed in (0, 1)]
    inputs = {"attention_mask": MASK}
    outputs = [types.SimpleNamespace(start_logits=pair[:, 0], end_logits=pair[:, 1]) for pair in spans]
    masked = [objective._get_span_logits(inputs, output) for output in outputs]
    sums, items = compute_logits_divergence(*masked, torch.ones(2, 2), temperature)
    assert items.tolist() == [2, 2]
    student, teacher = (pair[0, :, :3].float() for pair in spans)  # the first example has three tokens
    p, q = (teacher / temperature).softmax(-1), (student / temperature).softmax(-1)
    expected = temperature**2 * (p * (p / q).log()).sum()
    torch.testing.assert_close(sums, torch.stack([expected, torch.zeros(())]), rtol=1e-4, atol=1e-6)


def test_encoder_decoder_answers_are_distributions_over_the_text():
    model = T5.make_model("T5ForQuestionAnswering")
    ids = torch.tensor([[3, 4, 5, 1], [3, 4, 1, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    actual = ActivationRecorder(model).run(model, {"input_ids": ids, "attention_mask": mask})
    assert actual.span_logits.shape == (2, 2, 4) and actual.logits is None
    assert actual.span_logits.softmax(-1)[1, :, 3].max() == 0


def test_cross_entropy_and_embedding_distance_equal_their_formulas():
    logits, labels = draw_random(2, 4, 5).float(), torch.tensor([[1, -100, 4, 0], [-100, -100, -100, -100]])
    sums, items = compute_token_cross_entropy(logits, labels)
    expected = functional.cross_entropy(logits[0], labels[0], reduction="sum", ignore_index=-100)
    torch.testing.assert_close(sums, torch.tensor([float(expected), 0.0]))
    assert items.tolist() == [3, 0]
    states = draw_random(2, 4, 3).float()
    turned = states @ torch.tensor([[0.0, 1, 0], [-1, 0, 0], [0, 0, 1]])
    distances, items = compute_embedding_distance(turned, 3 * states, MASK)
    means = [(states[b] * MASK[b][:, None]).sum(0) / MASK[b].sum() for b in range(2)]
    by_hand = [1 - float(m[2] ** 2 / (m @ m)) for m in means]
    assert distances.tolist() == pytest.approx(by_hand, rel=1e-5) and items.tolist() == [1, 1]


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)
@pytest.mark.parametrize("upstream", [False, True], ids=["ours", "upstream"])
def test_all_layers_and_attentions_are_recorded(architecture, upstream):
    head = BASES[architecture.name]
    model = (architecture.make_upstream_model if upstream else architecture.make_model)(head)
    batch = architecture.make_batch(head)
    activations = ActivationRecorder(model, attention_outputs=True).run(model, batch, hidden_states=True)
    sides = {"encoder", "decoder"} if architecture is T5 else {"encoder"}
    assert set(activations.hidden_states) == set(activations.attention_outputs) == sides
    layers = architecture.tiny.get("num_hidden_layers") or architecture.tiny["num_layers"]
    size = architecture.tiny.get("hidden_size") or architecture.tiny["d_model"]
    for side in sides:
        assert [tuple(states.shape) for states in activations.hidden_states[side]] == [(3, 9, size)] * layers
        attentions = layers * (2 if side == "decoder" else 1)
        assert [tuple(states.shape) for states in activations.attention_outputs[side]] == [(3, 9, size)] * attentions
    assert (activations.logits is not None) == (architecture is T5)


def test_albert_attention_is_recorded_once_per_layer():
    model = ALBERT.make_model("AlbertModel", "gqa")
    assert len(list(iterate_attention_modules(model))) == 1
    outputs = ActivationRecorder(model, True).run(model, ALBERT.make_batch("AlbertModel")).attention_outputs["encoder"]
    assert len(outputs) == 2 and not torch.equal(*outputs)


def test_teacher_is_frozen_without_gradients():
    model = BERT.make_model("BertModel").train()
    teacher = Teacher(model, hidden_states=True)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert not teacher.run(BERT.make_batch("BertModel")).hidden_states["encoder"][-1].requires_grad


def test_teacher_encodes_long_text_in_pieces():
    model = BERT.make_model("BertForMaskedLM")
    teacher = Teacher(model, hidden_states=True, attention_outputs=True, max_length=4)
    ids = torch.randint(3, 20, (2, 10), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(10) < torch.tensor([[10], [5]])).long()
    actual = teacher.run({"input_ids": ids, "attention_mask": mask})
    alone = Teacher(model, hidden_states=True, attention_outputs=True)
    for row, (first, last) in ((0, (0, 4)), (0, (4, 8)), (0, (8, 10)), (1, (0, 4)), (1, (4, 5))):
        piece = ids[row : row + 1, first:last]
        expected = alone.run({"input_ids": piece, "attention_mask": torch.ones_like(piece)})
        torch.testing.assert_close(actual.logits[row, first:last], expected.logits[0])
        for kind in ("hidden_states", "attention_outputs"):
            pairs = zip(getattr(actual, kind)["encoder"], getattr(expected, kind)["encoder"], strict=True)
            for full, part in pairs:
                assert full.shape[:2] == (2, 10)
                torch.testing.assert_close(full[row, first:last], part[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda row: row.name)
def test_only_attention_is_trainable_on_request(architecture):
    model = architecture.make_model(BASES[architecture.name], "gqa_talking")
    select_trainable_parameters(model, "attention")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {
        name for name, _ in model.named_parameters() if "attention" in name.lower() and "layer_norm" not in name
    }
    assert trained == expected and trained
    select_trainable_parameters(model, "all")
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("vocab_size", "vocab_size.*2.*got 1"),
        ("hidden_size", "hidden_size.*2.*got 1"),
        ("num_hidden_layers", "num_hidden_layers.*2.*got 1"),
        ("num_decoder_layers", "num_decoder_layers.*2.*got 1"),
        ("decoder_layers", "decoder_layers.*2.*got 1"),
    ],
)
def test_incompatible_teacher_error_names_the_teacher(field, message):
    same = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 7, "is_encoder_decoder": False}
    student, teacher = (types.SimpleNamespace(**{**same, field: value}) for value in (2, 1))
    with pytest.raises(ValueError, match=message):
        check_teacher_config(student, teacher, hidden_states=True, attention_outputs=False, embedding=False)
    if field != "vocab_size":
        check_teacher_config(student, teacher, hidden_states=False, attention_outputs=False, embedding=False)
