"""Compare the closed forms for heads with rotary positions with brute force, and convert models to shared heads."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from fixtures.attention_tensors import make_attention_tensors, make_head_counts
from fixtures.native_models import make_eurobert, make_t5gemma
from fixtures.word_tokenizers import END_TEMPLATE, build_word_tokenizer
from tokenizers.pre_tokenizers import Whitespace
from transformers import EuroBertModel, ModernBertConfig, ModernBertForMaskedLM, NomicBertConfig, NomicBertForMaskedLM
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_interleaved
from transformers.models.eurobert.modeling_eurobert import apply_rotary_pos_emb as apply_half

from hf_attn_variants.conversion import Calibration, convert
from hf_attn_variants.conversion.attention_tensors import AttentionInputs, AttentionTensors, LayerContext
from hf_attn_variants.conversion.calibration.head_groups import find_best_groups
from hf_attn_variants.conversion.calibration.head_moments import compute_head_moments, project_heads
from hf_attn_variants.conversion.calibration.methods import (
    Aligned,
    iterate_closed_form_projections,
    refit_rotary_queries,
)
from hf_attn_variants.conversion.calibration.recording import compute_attention, record_inputs
from hf_attn_variants.conversion.calibration.rotary_heads import (
    compute_pair_moments,
    find_shared_rotary_head,
    make_commuting_maps,
)
from hf_attn_variants.conversion.rotary_positions import RotaryPositions
from hf_attn_variants.registration import get_variant_config_class, get_variant_model_class

LAYOUTS = pytest.mark.parametrize("layout", ["half", "interleaved"])
FREQUENCIES = pytest.mark.parametrize("frequencies", [(1.0, 0.1), (0.3, 0.3001)], ids=["distinct", "close"])
QUERY_HEADS, WIDTH = 4, 12


def make_rotary(length, frequencies, layout):
    angles = torch.outer(torch.arange(length, dtype=torch.float64), torch.tensor(frequencies, dtype=torch.float64))[
        None
    ]
    return RotaryPositions(angles.cos(), angles.sin(), layout)


def make_attention(head_dim=4, key_heads=QUERY_HEADS, seed=0):
    biases, options = ("query", "key", "value"), {"seed": seed, "scale": 1 / 3, "dtype": torch.float64}
    return make_attention_tensors(QUERY_HEADS, key_heads, head_dim, WIDTH, biases, **options)


def make_inputs(frequencies, layout, lengths=(9, 6), seed=1):
    """Return one batch of texts that are smooth in time, so that queries, keys and positions are correlated."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(lengths), max(lengths), WIDTH, generator=generator, dtype=torch.float64).cumsum(1) / 2
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask = torch.zeros(valid.shape, dtype=torch.float64).masked_fill(~valid, torch.finfo(torch.float64).min)
    rotary = make_rotary(max(lengths), frequencies, layout)
    return [AttentionInputs(states, states, mask[:, None, None], None, valid, 0.5, rotary=rotary)]


def make_counts(new=2, old=QUERY_HEADS, head_dim=4):
    return make_head_counts(QUERY_HEADS, old, new, head_dim)


def make_factors(heads, pairs, modulus=True, seed=2):
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randn(heads, pairs, 2, generator=generator, dtype=torch.float64)
    factors = torch.view_as_complex(factors) + 0.3
    return factors if modulus else factors / factors.abs()


@pytest.mark.parametrize(("layout", "apply"), [("half", apply_half), ("interleaved", apply_interleaved)])
def test_rotation_equals_that_of_transformers(layout, apply):
    states = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    angles = torch.rand(2, 7, 4, dtype=torch.float64)
    angles = torch.cat([angles, angles], -1) if layout == "half" else angles.repeat_interleave(2, -1)
    expected, _ = apply(states, states, angles.cos(), angles.sin())
    rotary = RotaryPositions.from_embeddings(angles.cos(), angles.sin(), layout)
    torch.testing.assert_close(rotary.rotate(states.transpose(1, 2)).transpose(1, 2), expected)


@LAYOUTS
def test_maps_commute_with_partial_rotary_positions(layout):
    rotary = make_rotary(5, (1.0, 0.2), layout)
    pairs = rotary.get_pairs(7)
    maps = make_commuting_maps(make_factors(1, 2), torch.randn(1, 3, 3, dtype=torch.float64), pairs)[0]
    states = torch.randn(1, 5, 2, 7, dtype=torch.float64)
    torch.testing.assert_close(rotary.rotate(states @ maps.T), rotary.rotate(states) @ maps.T)
    assert not torch.allclose(rotary.rotate(states)[..., :4], states[..., :4])


def list_scores(tensors, inputs, heads):
    """Return the scores of each head [h, pairs of tokens] for the pairs in each text, minus their mean over keys."""
    rows = []
    for batch in inputs:
        query, key = (project_heads(tensors, role, heads, batch) for role in ("query", "key"))
        for text, valid in enumerate(batch.valid):
            scores = torch.einsum("nhd,mhd->hnm", query[text, valid], key[text, valid])
            # Each query has the same weight, regardless of its number of keys.
            rows.append(((scores - scores.mean(-1, keepdim=True)) / valid.sum() ** 0.5).flatten(1))
    return torch.cat(rows, 1)


@LAYOUTS
@FREQUENCIES
@pytest.mark.parametrize("head_dim", [4, 6], ids=["full", "partial"])
def test_query_factors_equal_least_squares_over_all_pairs_of_tokens(layout, frequencies, head_dim):
    inputs, heads = make_inputs(frequencies, layout), make_counts(head_dim=head_dim)
    tensors, new = make_attention(head_dim), make_attention(head_dim, key_heads=2, seed=5)
    pairs = inputs[0].rotary.get_pairs(head_dim)
    fitted = refit_rotary_queries(tensors, new, heads, inputs, pairs)
    counts = make_counts(old=2, head_dim=head_dim)
    # Brute force: the scores of each basis map, for all pairs of tokens.
    rest = torch.eye(len(pairs.rest) ** 2, dtype=torch.float64).unflatten(1, (len(pairs.rest), len(pairs.rest)))
    factors = torch.cat([torch.eye(2, dtype=torch.complex128), 1j * torch.eye(2, dtype=torch.complex128)])
    basis = [
        *make_commuting_maps(factors, rest.new_zeros(4, *rest.shape[1:]), pairs),
        *make_commuting_maps(torch.zeros(len(rest), 2, dtype=torch.complex128), rest, pairs),
    ]
    columns = []
    for matrix in basis:
        query = tensors.apply_to_role("query", partial(apply_maps, maps=matrix.repeat(QUERY_HEADS, 1, 1)))
        columns.append(list_scores(AttentionTensors(**{**get_fields(new), **query}), inputs, counts))
    target = list_scores(tensors, inputs, heads)
    for head in range(QUERY_HEADS):
        features = torch.stack([column[head] for column in columns], 1)
        solution = torch.linalg.lstsq(features, target[head, :, None], driver="gelsd").solution
        best = (features @ solution)[:, 0] - target[head]
        error = list_scores(fitted, inputs, counts)[head] - target[head]
        torch.testing.assert_close(error.norm(), best.norm(), rtol=1e-4, atol=1e-4)
        assert best.norm() > 0.05 * target[head].norm()  # the comparison needs an error clearly above 0


def apply_maps(projection, maps):
    """Apply the matrices [h, d, d] to the heads of a projection [h*d, ...]."""
    return torch.einsum("hde,he...->hd...", maps, projection.unflatten(0, (len(maps), -1))).flatten(0, 1)


def get_fields(tensors):
    names = [f"{role}_{part}" for role in ("query", "key", "value", "output") for part in ("weight", "bias")]
    return {name: getattr(tensors, name) for name in names}


@LAYOUTS
def test_shared_keys_equal_the_principal_components_of_complex_keys(layout):
    inputs, heads = make_inputs((1.0, 0.1), layout), make_counts(new=1)
    tensors, pairs = make_attention(), inputs[0].rotary.get_pairs(4)
    moments = compute_head_moments(tensors, heads, inputs, [range(4)])
    key_maps, query_maps, energy = find_shared_rotary_head(moments.queries, moments.keys[0], pairs)
    batch, rows, weights = inputs[0], [], []
    for text, valid in enumerate(batch.valid):
        key = project_heads(tensors, "key", heads, batch)[text, valid]
        rows.append(key - key.mean(0))
        weights.append(project_heads(tensors, "query", heads, batch)[text, valid])
    key, query = (torch.cat(parts) for parts in (rows, weights))
    preserved = total = 0.0
    for first, second in zip(pairs.first, pairs.second, strict=True):
        numbers = torch.complex(key[..., first], key[..., second])  # [rows, h]
        scales = torch.complex(query[..., first], query[..., second]).abs().square().mean(0).sqrt()
        singular = torch.linalg.svdvals(numbers * scales)
        preserved, total = preserved + singular[0] ** 2, total + singular.square().sum()
        new = torch.complex(*torch.einsum("hde,nhe->nd", key_maps, key)[:, [first, second]].T)
        # The best factors predict each key from the new key, so the remainder is orthogonal to the new key.
        factors = torch.complex(query_maps[:, first, first], -query_maps[:, second, first])
        left = numbers - new[:, None] * factors
        torch.testing.assert_close((left * new.conj()[:, None]).mean(0).abs(), torch.zeros(4, dtype=torch.float64))
    assert energy == pytest.approx(float(preserved / total))


def make_tied_attention(layout, modulus, frequencies=(1.0, 0.1), head_dim=6):
    """Return an attention with 4 heads in two groups, in which the keys differ only by commuting matrices."""
    tensors, pairs = make_attention(head_dim), make_rotary(1, frequencies, layout).get_pairs(head_dim)
    generator = torch.Generator().manual_seed(3)
    rest = torch.linalg.qr(torch.randn(QUERY_HEADS, 2, 2, dtype=torch.float64, generator=generator))[0]
    maps = make_commuting_maps(make_factors(QUERY_HEADS, 2, modulus), rest, pairs)
    changed = {}
    for part in ("weight", "bias"):
        key, value = (getattr(tensors, f"{role}_{part}").unflatten(0, (QUERY_HEADS, -1)) for role in ("key", "value"))
        changed[f"key_{part}"] = apply_maps(key[[0, 0, 2, 2]].flatten(0, 1), maps)
        changed[f"value_{part}"] = value[[0, 0, 2, 2]].flatten(0, 1)
    return AttentionTensors(**{**get_fields(tensors), **changed})


def compute_output_error(tensors, new, inputs):
    expected, outputs = (
        torch.cat([compute_attention(attention, batch, QUERY_HEADS)[0][batch.valid] for batch in inputs])
        for attention in (tensors, new)
    )
    return float((outputs - expected).norm() / expected.norm())


@LAYOUTS
def test_aligned_heads_that_differ_by_phases_are_merged_without_a_loss(layout):
    inputs, heads = make_inputs((1.0, 0.1), layout), make_counts(head_dim=6)
    tensors = make_tied_attention(layout, modulus=False)
    layer = LayerContext("layer", "self", torch.Generator(), 0.02, inputs=inputs)
    assert compute_output_error(tensors, Aligned().convert_module(tensors, heads, layer), inputs) < 1e-6


@LAYOUTS
@FREQUENCIES
def test_closed_form_merges_heads_that_differ_by_complex_factors(layout, frequencies):
    inputs, heads = make_inputs(frequencies, layout, lengths=(30, 25, 17)), make_counts(head_dim=6)
    tensors = make_tied_attention(layout, modulus=True, frequencies=frequencies)
    targets = [compute_attention(tensors, batch, QUERY_HEADS)[0] for batch in inputs]
    forms = list(iterate_closed_form_projections(tensors, heads, inputs, targets))
    forms.append(refit_rotary_queries(tensors, forms[0], heads, inputs, inputs[0].rotary.get_pairs(6)))
    errors = [compute_output_error(tensors, form, inputs) for form in forms]
    assert len(errors) == 4 and max(errors) < 1e-3
    assert find_best_groups(tensors, heads, inputs, torch.Generator().manual_seed(0)) == [[0, 1], [2, 3]]


@LAYOUTS
def test_groups_of_heads_that_differ_by_complex_factors_are_found(layout):
    tensors, inputs = make_tied_attention(layout, modulus=True), make_inputs((1.0, 0.1), layout, lengths=(30, 25))
    order = [0, 2, 1, 3]
    changed = {}
    for role in ("query", "key", "value"):
        for part in ("weight", "bias"):
            changed[f"{role}_{part}"] = getattr(tensors, f"{role}_{part}").unflatten(0, (4, -1))[order].flatten(0, 1)
    changed["output_weight"] = tensors.output_weight.unflatten(1, (4, -1))[:, order].flatten(1)
    shuffled = AttentionTensors(**{**get_fields(tensors), **changed})
    groups = find_best_groups(shuffled, make_counts(head_dim=6), inputs, torch.Generator().manual_seed(0))
    assert groups == [[0, 2], [1, 3]]


@FREQUENCIES
def test_fitted_factors_are_between_those_of_separate_pairs_and_the_joint_optimum(frequencies):
    inputs, heads = make_inputs(frequencies, "half", lengths=(20, 15)), make_counts(new=1)
    tensors, pairs = make_attention(), inputs[0].rotary.get_pairs(4)
    targets = [compute_attention(tensors, batch, QUERY_HEADS)[0] for batch in inputs]
    form = next(iterate_closed_form_projections(tensors, heads, inputs, targets))
    forms = form, refit_rotary_queries(tensors, form, heads, inputs, pairs)
    counts, target = make_counts(new=1, old=1), list_scores(tensors, inputs, heads)
    separate, fitted = ((list_scores(factor_set, inputs, counts) - target).norm() for factor_set in forms)
    # Brute force: all factors of keys and queries, from several random starts.
    keys, queries = (tensors.join_weight_and_bias(role).unflatten(0, (4, -1)) for role in ("key", "query"))
    best = []
    for seed in range(3):
        factors = [make_factors(4, 2, seed=seed + 10 * part).requires_grad_() for part in (1, 2)]
        optimizer = torch.optim.LBFGS(factors, max_iter=2000, line_search_fn="strong_wolfe")

        def compute_loss(factors=factors, optimizer=optimizer):
            optimizer.zero_grad()
            key_maps, query_maps = (make_commuting_maps(f, f.real.new_zeros(4, 0, 0), pairs) for f in factors)
            changed = tensors.split_weight_and_bias("key", (key_maps @ keys).sum(0))
            changed |= tensors.split_weight_and_bias("query", (query_maps @ queries).flatten(0, 1))
            error = (list_scores(replace(tensors, **changed), inputs, counts) - target).square().sum()
            error.backward()
            return error

        optimizer.step(compute_loss)
        best.append(float(compute_loss().detach()) ** 0.5)
    assert min(best) <= float(fitted) + 1e-6 and float(fitted) <= float(separate) + 1e-6
    if frequencies == (1.0, 0.1):
        assert float(fitted) < 1.15 * min(best)


WORDS = [f"w{i}" for i in range(90)]


def make_tokenizer():
    words = ["<pad>", "</s>", "<s>", "<unk>", "<mask>", *WORDS]
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "mask_token": "<mask>"}
    return build_word_tokenizer(words, Whitespace(), END_TEMPLATE, **special)


def make_texts(count=48, length=20):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(WORDS), (count, length), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in row) for row in rows]


def tie_keys(model):
    """Make the keys of each pair of key/value heads differ only by complex factors, and their values not at all."""
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    pairs = RotaryPositions(torch.ones(1, 1, dim // 2), torch.ones(1, 1, dim // 2), "half").get_pairs(dim)
    maps = make_commuting_maps(make_factors(heads, dim // 2), torch.zeros(heads, 0, 0, dtype=torch.float64), pairs)
    with torch.no_grad():
        for layer in model.layers:
            for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                first = linear.weight.unflatten(0, (heads, -1))[[i // 2 * 2 for i in range(heads)]].flatten(0, 1)
                linear.weight.copy_(apply_maps(first.double(), maps) if linear is layer.self_attn.k_proj else first)
    return model


def test_calibrated_eurobert_reproduces_texts_of_2048_tokens():
    model = tie_keys(make_eurobert(95, EuroBertModel, max_position_embeddings=4096, initializer_range=0.1)).eval()
    calibration = Calibration(make_texts(), tokenizer=make_tokenizer(), fit_steps=0)
    converted = convert(model, 2, calibration=calibration)
    ids = torch.randint(5, 95, (1, 2100), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, outputs, averaged = (m(ids).last_hidden_state for m in (model, converted, convert(model, 2)))
    assert type(converted) is EuroBertModel and converted.config.num_key_value_heads == 2
    # The calibration texts have only 21 tokens, but the factors are valid at every distance.
    assert (outputs - expected)[:, -50:].norm() < 0.02 * expected[:, -50:].norm()
    assert (averaged - expected)[:, -50:].norm() > 0.2 * expected[:, -50:].norm()


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def make_modernbert(vocab_size):
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    config = ModernBertConfig(vocab_size=vocab_size, initializer_range=0.3, local_attention=8, **SIZES, **tokens)
    return ModernBertForMaskedLM(config)


def make_nomic_bert(vocab_size):
    torch.manual_seed(0)
    return NomicBertForMaskedLM(NomicBertConfig(vocab_size=vocab_size, initializer_range=0.3, **SIZES))


@pytest.mark.parametrize("method", ["aligned", "calibrated"])
@pytest.mark.parametrize("name", ["eurobert", "modernbert", "nomic_bert", "t5gemma"])
def test_no_attention_module_is_worse_than_with_averaged_heads(tmp_path, method, name):
    makers = {"eurobert": make_eurobert, "modernbert": make_modernbert}
    makers |= {"nomic_bert": make_nomic_bert, "t5gemma": make_t5gemma}
    model, texts = makers[name](95), make_texts()
    model.save_pretrained(tmp_path / "source")
    fields = {"encoder_num_key_value_heads": 1} if name == "t5gemma" else {}
    targets = {"target_texts": texts} if name == "t5gemma" else {}
    steps = {"fit_steps": 40} if method == "calibrated" else {}
    calibration = Calibration(texts, tokenizer=make_tokenizer(), **steps, **targets)
    report = convert(tmp_path / "source", 1, method, calibration=calibration, output_dir=tmp_path / "out", **fields)
    details = [layer.details for layer in report.layers]
    errors, averaged = (
        torch.tensor([detail[name] for detail in details])
        for name in ("output_relative_error", "output_relative_error_averaged")
    )
    assert len(errors) == (6 if name == "t5gemma" else 2)
    assert (errors <= averaged).all() and errors.sum() < 0.97 * averaged.sum()


def test_recorded_outputs_of_t5gemma_include_soft_capping_and_windows():
    plain = make_t5gemma()
    native = get_variant_model_class(type(plain).__name__)(
        get_variant_config_class("t5gemma").from_upstream(plain.config)
    )
    native.load_state_dict(plain.state_dict())
    ids = torch.randint(5, 99, (2, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 13:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    batch |= {f"decoder_{name}": value[:, :15] for name, value in batch.items()}
    modules, outputs = list(native.eval().named_attention_modules()), {}
    for _, path, module in modules:
        module.register_forward_hook(lambda module, args, output, path=path: outputs.update({path: output[0]}))
    with torch.no_grad():
        native(**batch)
    expected = dict(outputs)
    calls = record_inputs(native, [path for _, path, _ in modules], [batch])
    for site, path, module in modules:
        tensors = AttentionTensors(*(module.get_submodule(linear).weight for linear in site.projections.values()))
        (inputs,) = calls[path]
        assert inputs.softcap == 5.0 and (inputs.rotary is None) is site.is_cross_attention
        with torch.no_grad():
            output = compute_attention(tensors, inputs, 8)[0]
        torch.testing.assert_close(output[inputs.valid], expected[path][inputs.valid], rtol=1e-4, atol=1e-4)


def test_complex_moments_are_those_of_complex_heads():
    states = torch.randn(50, 3, 4, dtype=torch.float64)
    pairs = make_rotary(1, (1.0, 0.5), "interleaved").get_pairs(4)
    stacked = states.flatten(1)
    numbers = torch.view_as_complex(states.unflatten(-1, (2, 2)).contiguous())
    expected = torch.einsum("nip,njp->pij", numbers, numbers.conj())
    torch.testing.assert_close(compute_pair_moments(stacked.T @ stacked, 4, pairs), expected)
