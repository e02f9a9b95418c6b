"""Check every pair of mechanisms: a row of the table rejects it, or it makes a model that computes outputs."""

from itertools import combinations

import pytest
import torch
from architectures import BERT, T5, make_token_ids
from fixtures.extensions import ALL_FIELDS

import hf_attn_variants
from hf_attn_variants.modeling.fields.composition import ATTENTION_EXTENSIONS, UNSUPPORTED_PAIRS
from hf_attn_variants.modeling.mechanisms.additive_score import AdditiveScore
from hf_attn_variants.modeling.mechanisms.kernels.kernel_table import KERNELS, get_kernel_class
from hf_attn_variants.modeling.mechanisms.latents import LatentAttention
from hf_attn_variants.modeling.mechanisms.mechanism import PREFIXES, Mechanism
from hf_attn_variants.modeling.mechanisms.patterns.pattern_table import PATTERNS, get_pattern_class
from hf_attn_variants.modeling.mechanisms.sinusoidal_positions import RelativePositionBias, SinusoidalPositions
from hf_attn_variants.modeling.mechanisms.talking_heads import DynamicTalkingHeads, TalkingHeadsSettings

# Other fields that a pattern requires. Only T5 supports the transient-global pattern.
SIZES = {
    "attention_window": 4,
    "attention_dilation": 2,
    "attention_block_size": 2,
    "num_random_blocks": 1,
    "num_summary_tokens": 1,
}
OF_T5 = "transient_global"
LINFORMER_NEEDS_POSITIONS = {"linformer", SinusoidalPositions.name}


def make_samples():
    """Return fields that select each mechanism, and the class of the mechanism."""
    result = {
        "heads": ({"num_key_value_heads": 4}, ()),
        "values": ({"value_head_dim": 6}, ()),
        "latent": ({"kv_lora_rank": 8}, (LatentAttention,)),
        "talking": ({"talking_heads": "both"}, (TalkingHeadsSettings,)),
        "terms": (
            {"talking_heads": "both", "talking_heads_dynamic": ["x2l", "m2w"]},
            (TalkingHeadsSettings, DynamicTalkingHeads),
        ),
        AdditiveScore.name: ({AdditiveScore.field: AdditiveScore.name}, (AdditiveScore,)),
        SinusoidalPositions.name: ({SinusoidalPositions.field: SinusoidalPositions.name}, (SinusoidalPositions,)),
    }
    for extension in ATTENTION_EXTENSIONS:
        result[extension.field] = ({extension.field: ALL_FIELDS[extension.field]}, (extension,))
    for name in KERNELS:
        window = {"attention_window": 4} if get_kernel_class(name).needs_window else {}
        result[name] = ({"attention_kernel": name, **window}, (get_kernel_class(name),))
    for name in PATTERNS:
        sizes = {field: SIZES[field] for field in get_pattern_class(name).needed}
        result[name] = ({"attention_pattern": name, **sizes}, (get_pattern_class(name),))
    return result


SAMPLES = make_samples()
ALONE = [name for name in SAMPLES if name != OF_T5]


def list_conflicts(*classes):
    """Return the rows of the table for two of these classes."""
    return [
        row
        for row in UNSUPPORTED_PAIRS
        if any(issubclass(item, row.first) for item in classes)
        and any(issubclass(item, row.second) for item in classes)
    ]


def iterate_pairs():
    for first, second in combinations(ALONE, 2):
        fields = [SAMPLES[first][0], SAMPLES[second][0]]
        shared = fields[0].keys() & fields[1].keys()
        if all(fields[0][name] == fields[1][name] for name in shared) and {first, second} != LINFORMER_NEEDS_POSITIONS:
            yield pytest.param(
                fields[0] | fields[1], (*SAMPLES[first][1], *SAMPLES[second][1]), id=f"{first}-{second}"
            )


@pytest.mark.thorough
@pytest.mark.parametrize("fields, classes", list(iterate_pairs()))
def test_pair_of_mechanisms_computes_or_raises_the_error_of_its_row(fields, classes):
    rows = list_conflicts(*classes)
    if not rows:
        model = hf_attn_variants.AttnVariantBertModel(BERT.make_config(num_hidden_layers=1, **fields)).eval()
        with torch.no_grad():
            assert model(make_token_ids(2, 9))[0].isfinite().all()
        return
    with pytest.raises(ValueError) as error:
        BERT.make_config(**fields)
    messages = [
        row.format_message(*((mechanism.field, fields[mechanism.field]) for mechanism in row[:2])) for row in rows
    ]
    assert str(error.value) in messages


def test_every_composition_row_is_tested():
    of_t5 = {(row.first, row.second) for row in UNSUPPORTED_PAIRS if RelativePositionBias in row} | {
        (get_pattern_class(OF_T5), LatentAttention)
    }
    tried = {
        (row.first, row.second)
        for first, second in combinations(ALONE, 2)
        for row in list_conflicts(*SAMPLES[first][1], *SAMPLES[second][1])
    }
    assert {(row.first, row.second) for row in UNSUPPORTED_PAIRS} == of_t5 | tried
    assert all(issubclass(item, Mechanism) for row in UNSUPPORTED_PAIRS for item in row[:2])


def test_mechanism_reports_its_place_in_the_configuration():
    config = T5.make_config(talking_heads="both", cross_talking_heads="none", cross_kv_lora_rank=8)
    talking, latents, bias = (
        [mechanism.find_requesting_field(config, prefix) for prefix in PREFIXES]
        for mechanism in (TalkingHeadsSettings, LatentAttention, RelativePositionBias)
    )
    assert talking == [("talking_heads", "both")] * 2 + [None]
    assert latents == [None, None, ("cross_kv_lora_rank", 8)]
    assert [field is None for field in bias] == [False, False, True]
    assert RelativePositionBias.find_requesting_field(T5.make_config(position_embedding_type="sinusoidal"), "") is None
    window = BERT.make_config(attention_pattern="sliding_window", attention_window=4)
    requesting_fields = {name: get_pattern_class(name).find_requesting_field(window, "") for name in PATTERNS}
    assert {name for name, result in requesting_fields.items() if result} == {"sliding_window"}


def test_every_mechanism_has_a_name_and_a_paper():
    classes = [*map(get_kernel_class, KERNELS), *map(get_pattern_class, PATTERNS), AdditiveScore, SinusoidalPositions]
    unnamed = (LatentAttention, TalkingHeadsSettings, DynamicTalkingHeads, RelativePositionBias)
    for item in (*classes, *ATTENTION_EXTENSIONS, *unnamed):
        title, arxiv = item.paper
        assert title and arxiv.count(".") == 1 and arxiv.replace(".", "").isdecimal()
        assert item.field and (item not in classes or item.name)


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"num_key_value_heads": 2}, "heads=4, key_value_heads=2"),
        ({"kv_lora_rank": 8, "talking_heads": "both"}, "key_value_heads=4, kv_lora_rank=8, talking_heads=both"),
        ({"attention_kernel": "hedgehog"}, "kernel=hedgehog"),
        ({"attention_pattern": "local_blocks", "attention_block_size": 4}, "pattern=local_blocks"),
        ({"score_function": "additive"}, "score=AdditiveScore()"),
    ],
)
def test_printed_model_shows_the_variant_of_each_attention(fields, shown):
    config = hf_attn_variants.AttnVariantBertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16, **fields
    )
    assert shown in str(hf_attn_variants.AttnVariantBertModel(config))
