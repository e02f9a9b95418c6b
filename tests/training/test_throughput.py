"""Compare the tokens and FLOPs of a run with torch's counter of a step, and with hand computations."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForQuestionAnswering

import hf_attn_variants
from hf_attn_variants import (
    AttnVariantAlbertConfig,
    AttnVariantAlbertForMaskedLM,
    AttnVariantBertConfig,
    AttnVariantBertForTokenClassification,
    AttnVariantT5Config,
    AttnVariantT5ForConditionalGeneration,
)
from hf_attn_variants.training.engine.loop import TrainingCostCounter
from hf_attn_variants.training.pretraining.task import make_masked_lm_objective

BERT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
ALBERT = BERT | {"embedding_size": 16, "num_hidden_groups": 1}
T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3}


def count_executed_flops(model, batch, loss):
    """Return the FLOPs of the matrix products of a step, by torch's counter."""
    model.train()
    with FlopCounterMode(display=False) as counter:
        loss(model, batch).backward()
    return counter.get_total_flops()


def make_batch(n, b=2, **others):
    return {"input_ids": torch.randint(5, 50, (b, n)), "attention_mask": torch.ones(b, n, dtype=torch.int64), **others}


def sum_outputs(model, batch):
    return model(**{key: value for key, value in batch.items()}).logits.sum()


@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 1}, {"talking_heads": "both"}])
def test_encoder_step_flops_equal_the_torch_counter(fields):
    config = AttnVariantBertConfig(**BERT, **fields, attn_implementation="eager")
    model = AttnVariantBertForTokenClassification(config)
    tokens, flops = TrainingCostCounter(model).count(make_batch(7), num_items=2)
    assert tokens == 14 and flops == count_executed_flops(model, make_batch(7), sum_outputs)


def test_transformers_model_has_equal_flops_and_padding_counts_nothing():
    model = BertForQuestionAnswering(BertConfig(**BERT, attn_implementation="eager"))
    batch = make_batch(7)
    cost = TrainingCostCounter(model)
    tokens, flops = cost.count(batch, num_items=2)
    assert tokens == 14
    assert flops == count_executed_flops(
        model, batch, lambda m, x: (lambda o: (o.start_logits + o.end_logits).sum())(m(**x))
    )
    batch["attention_mask"][0, 3:] = 0
    shorter = cost.count(batch, num_items=2)
    alone = [cost.count(make_batch(n, b=1), num_items=1) for n in (3, 7)]
    assert shorter == (10, alone[0][1] + alone[1][1]) and shorter[1] < flops


def test_masked_lm_head_counts_only_masked_tokens():
    model = AttnVariantAlbertForMaskedLM(AttnVariantAlbertConfig(**ALBERT, attn_implementation="eager"))
    labels = torch.full((2, 9), -100)
    labels[0, 2:4], labels[1, 5] = 7, 8
    objective = make_masked_lm_objective(model)
    batch = make_batch(9, labels=labels)
    assert objective.count(batch) == 3
    tokens, flops = TrainingCostCounter(model, objective.applies_head_to_items_only).count(batch, num_items=3)
    result = count_executed_flops(model, batch, objective.loss_sum)
    assert tokens == 18 and flops == result


@pytest.mark.parametrize("name", ["Roberta", "Electra", "DistilBert"])
def test_masked_lm_head_is_recognized_under_any_name(name):
    sizes = {"vocab_size": 50, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}
    fields = sizes if name == "DistilBert" else BERT | ({"embedding_size": 16} if name == "Electra" else {})
    config_class = getattr(hf_attn_variants, f"AttnVariant{name}Config")
    model = getattr(hf_attn_variants, f"AttnVariant{name}ForMaskedLM")(
        config_class(**fields, attn_implementation="eager")
    )
    labels = torch.full((2, 9), -100)
    labels[0, 2:4], labels[1, 5] = 7, 8
    objective, batch = make_masked_lm_objective(model), make_batch(9, labels=labels)
    flops = TrainingCostCounter(model, objective.applies_head_to_items_only).count(batch, num_items=3)[1]
    assert flops == count_executed_flops(model, batch, objective.loss_sum)


@pytest.mark.parametrize("name", ["Roberta", "Electra", "DistilBert"])
def test_classification_head_counts_once_per_sequence(name):
    sizes = {"vocab_size": 50, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64}
    config_class = getattr(hf_attn_variants, f"AttnVariant{name}Config")
    model = getattr(hf_attn_variants, f"AttnVariant{name}ForSequenceClassification")(
        config_class(
            **(sizes if name == "DistilBert" else BERT | {"embedding_size": 32} if name == "Electra" else BERT)
        )
    )
    base = TrainingCostCounter(getattr(hf_attn_variants, f"AttnVariant{name}Model")(model.config))
    assert TrainingCostCounter(model).flops_per_token == base.flops_per_token


def test_encoder_decoder_flops_count_sources_and_targets():
    config = AttnVariantT5Config(**T5, num_key_value_heads=2, decoder_start_token_id=0, attn_implementation="eager")
    model = AttnVariantT5ForConditionalGeneration(config)
    batch = make_batch(6, labels=torch.randint(5, 50, (2, 4)))
    tokens, flops = TrainingCostCounter(model).count(batch, num_items=8)
    assert tokens == 20 and flops == count_executed_flops(model, batch, sum_outputs)
    batch["labels"][0, 1:] = -100
    assert TrainingCostCounter(model).count(batch, num_items=5)[0] == 17


def test_frozen_weights_have_no_backward_flops():
    model = AttnVariantBertForTokenClassification(AttnVariantBertConfig(**BERT))
    unfrozen_flops = TrainingCostCounter(model).count(make_batch(7), num_items=2)[1]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert TrainingCostCounter(model).count(make_batch(7), num_items=2)[1] == round(unfrozen_flops * 2 / 3)


def test_shared_layers_count_once_per_run():
    model = AttnVariantAlbertForMaskedLM(AttnVariantAlbertConfig(**ALBERT, attn_implementation="eager"))
    counter = TrainingCostCounter(model)
    for parameter in model.predictions.parameters():
        parameter.requires_grad_(False)
    # The shared layer runs three times, with 4 x 32^2 + 2 x 32 x 64 weights, and the embedding projection has 16 x 32.
    # The frozen head has 32 x 16 and 16 x 50.
    body, head = 3 * (4 * 32**2 + 2 * 32 * 64) + 16 * 32, 32 * 16 + 16 * 50
    assert counter.passes == 3 and TrainingCostCounter(model).passes == pytest.approx(2 + body / (body + head))


def test_unknown_model_reports_tokens_without_flops():
    assert TrainingCostCounter(nn.Linear(3, 2)).count(make_batch(5), num_items=2) == (10, 0)
    assert TrainingCostCounter(nn.Linear(3, 2)).count({"x": torch.ones(2, 3)}, num_items=2) == (0, 0)
