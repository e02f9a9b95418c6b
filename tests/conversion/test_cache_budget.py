"""Check `kv_cache_bytes`: it selects ranks that fit into a cache and lose the least."""

import itertools

import pytest
import torch
from architectures import BERT, T5
from fixtures.caches import get_cache
from fixtures.tiny_t5 import make_lines_of_words, make_tiny_t5
from relatives import ENCODERS
from transformers import AutoTokenizer, T5ForConditionalGeneration

from hf_attn_variants import convert
from hf_attn_variants.conversion import Calibration
from hf_attn_variants.conversion.attention_tensors import (
    QuadraticErrorForm,
    compute_energy_loss_by_rank,
    compute_preserved_energy_share,
    find_best_latent,
)
from hf_attn_variants.conversion.layer_choice import allocate_ranks


def make_random_form(seed, size=12):
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(2, size, size, generator=generator, dtype=torch.float64)
    return QuadraticErrorForm(*(part @ part.T for part in parts))


def test_loss_by_rank_equals_that_of_the_best_latent():
    form = make_random_form(0)
    lost = compute_energy_loss_by_rank([form])
    assert lost.shape == (13,) and lost[0] == pytest.approx(1) and lost[12] == 0
    for rank in range(1, 13):
        preserved = compute_preserved_energy_share(form, find_best_latent([form], rank))
        assert float(lost[rank]) == pytest.approx(1 - preserved, abs=1e-9)
    gains = lost[:-1] - lost[1:]
    assert (gains[:-1] >= gains[1:] - 1e-12).all()


@pytest.mark.parametrize("total", range(3, 20))
def test_selected_ranks_lose_the_least_for_their_size(total):
    # A power of the loss is also a decreasing, convex function of the rank.
    lost = [compute_energy_loss_by_rank([make_random_form(seed, 8)]) ** (seed + 1) for seed in range(3)]
    most = [8, 8, 5]
    ranks = allocate_ranks(lost, total, most)
    best = min(
        sum(float(row[rank]) for row, rank in zip(lost, ranks, strict=True))
        for ranks in itertools.product(range(1, 9), range(1, 9), range(1, 6))
        if sum(ranks) <= total
    )
    assert sum(ranks) == min(total, 21) and all(1 <= rank <= top for rank, top in zip(ranks, most, strict=True))
    assert sum(float(row[rank]) for row, rank in zip(lost, ranks, strict=True)) == pytest.approx(best)


def test_ranks_are_multiples_of_eight_if_they_fit():
    lost = [compute_energy_loss_by_rank([make_random_form(seed, 64)]) for seed in range(2)]
    ranks = allocate_ranks(lost, 53, [64, 20])
    assert sum(ranks) <= 53 and all(rank % 8 == 0 or rank == 20 for rank in ranks)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A tiny T5's folder: width 32, two layers, 4 heads of size 8, and 64 key and value numbers per layer."""
    return make_tiny_t5(tmp_path_factory.mktemp("t5"))


def cache_bytes(model):
    ids = torch.randint(5, 60, (1, 40))
    cache = get_cache(model(input_ids=ids, decoder_input_ids=ids[:, :10], use_cache=True))
    result = []
    for part, length in ((cache.cross_attention_cache, 40), (cache.self_attention_cache, 10)):
        storages = {t.data_ptr(): t.nbytes for item in part.layers for t in (item.keys, item.values)}
        result.append(sum(storages.values()) / length)
    return result


@pytest.mark.thorough
@pytest.mark.parametrize("text", [None, "text"])
@pytest.mark.parametrize("budget", [(48, 64), (128, 4 * 50), (200, 4 * 60), (4096, 40)], ids=str)
def test_converted_cache_fits_into_the_budget(budget, text, source):
    model = T5ForConditionalGeneration.from_pretrained(source).eval()
    options = {"method": "mean"}
    if text:
        texts = make_lines_of_words(160), make_lines_of_words(160, 1)
        options = {"calibration": Calibration(*texts, AutoTokenizer.from_pretrained(source), fit_steps=0)}
    converted = convert(model, kv_cache_bytes=budget, **options)
    taken = cache_bytes(converted)
    assert taken[0] <= budget[0] and taken[1] <= budget[1]
    # The budget is used as far as possible.
    now = 4 * 2 * 64
    assert taken[0] == (now if budget[0] >= now else min(budget[0], 4 * 32))
    assert taken[1] > budget[1] - 4 * 8 or taken[1] == now
    assert (converted.config.cross_kv_lora_rank is None) is (budget[0] >= now)


def test_budget_keeps_latents_of_the_source(source):
    """Check an original model with latents, whose uncompressed keys and values would need a larger cache."""
    model = convert(T5ForConditionalGeneration.from_pretrained(source), kv_lora_rank=24, method="mean").eval()
    converted = convert(model, kv_cache_bytes=(64, 4 * 42), method="mean")
    assert sorted(converted.config.per_layer_values["kv_lora_rank"]) == [16, 24]
    assert cache_bytes(converted) == [64, 4 * 40]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_cache_bytes": (0, 5)}, "`kv_cache_bytes`"),
        ({"kv_cache_bytes": (64, 64), "kv_lora_rank": 4}, "combined with `kv_lora_rank`"),
        ({"kv_cache_bytes": (64, 64), "per_layer_values": {"num_key_value_heads": [1, 2]}}, "combined with `num_key"),
        ({"kv_cache_bytes": (64, 64), "num_key_value_heads": 2}, "`num_key_value_heads`"),
        ({"kv_cache_bytes": (3, 64)}, "at least 4 bytes per source token .*got 3 and 64"),
        ({"kv_cache_bytes": (64, 7)}, "8 bytes per generated token .*got 64 and 7"),
        ({"kv_cache_bytes": (9999, 9999)}, "got 9999 and 9999"),
    ],
    ids=str,
)
def test_impossible_budget_raises_an_error(options, message, source):
    with pytest.raises(ValueError, match=message):
        convert(str(source), method="mean", **options)


@pytest.mark.parametrize(
    "model, message",
    [
        (lambda: BERT.make_model("BertModel"), "`kv_cache_bytes`"),
        (lambda: T5.make_model("T5EncoderModel"), "`kv_cache_bytes`"),
        (lambda: ENCODERS[0].make_model("RobertaForCausalLM"), "not for AttnVariantRobertaForCausalLM"),
    ],
)
def test_budget_for_a_model_without_a_cache_raises_an_error(model, message):
    with pytest.raises(ValueError, match=message):
        convert(model(), kv_cache_bytes=(64, 64), method="mean")
