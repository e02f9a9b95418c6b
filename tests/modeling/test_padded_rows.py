"""Check that rows give the same outputs in padded batches: patterns and kernels count only real tokens."""

import pytest
import torch
from architectures import ARCHITECTURES, BERT, T5, make_token_ids
from fixtures.largest_tensor import LargestTensor
from relatives import ENCODER_DECODERS, ENCODERS, RELATIVES

pytestmark = pytest.mark.cross_product

ROWS = {row.name: row for row in (*ARCHITECTURES, *RELATIVES)}
PATTERNS = {
    "random_blocks": {"attention_block_size": 3, "num_random_blocks": 1, "attention_seed": 5},
    "strided": {"attention_block_size": 4},
    "strided, split": {"attention_block_size": 4, "split_attention_heads": True},
    "fixed": {"attention_block_size": 4, "num_summary_tokens": 2},
    "fixed, split": {"attention_block_size": 4, "num_summary_tokens": 1, "split_attention_heads": True},
    "local_blocks": {"attention_block_size": 5},
    "sliding_window": {"attention_window": 4},
    "sliding_window, dilated": {"attention_window": 4, "attention_dilation": 2},
}
# Patterns that only encoders support.
LEARNED = {
    "memory_compressed": {"attention_block_size": 3},
    "transient_global": {"attention_window": 4, "attention_block_size": 3},
}
KERNELS = {
    "elu": {},
    "hedgehog": {},
    "favor": {},
    "rfa": {},
    "hybrid": {"attention_window": 4},
    "linformer": {"attention_kernel_features": 5},
}
LENGTH = 23
# The start and the end of the text in each row, with padding on the left, on the right or on both sides.
SIDES = {
    "left": ((0, 23), (8, 23), (19, 23)),
    "right": ((0, 23), (0, 12), (0, 4)),
    "both": ((1, 20), (7, 23), (5, 18)),
}
EVERY_SIDE = pytest.mark.parametrize("side", SIDES)


def get_fields(name, prefix="", **more):
    if name in KERNELS:
        fields = {"attention_kernel": name} | KERNELS[name]
    else:
        fields = {"attention_pattern": name.split(",")[0], **(PATTERNS | LEARNED)[name]}
    feature_fields = {"attention_kernel_features": fields.pop("attention_kernel_features", None)}
    feature_fields = {field: value for field, value in feature_fields.items() if value is not None}
    return {prefix + field: value for field, value in (fields | more).items()} | feature_fields


def remove_positions(model):
    """Remove the positions of a model, because those counted from the start of a row differ in Transformers too."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if "position" in name and hasattr(module, "weight") and "relative" not in name:
                module.weight.zero_()
            if "position" in name and hasattr(module, "weights"):
                module.weights.zero_()
    return model


def make_padded_ids(side):
    ids, mask = make_token_ids(3, LENGTH), torch.zeros(3, LENGTH, dtype=torch.long)
    for row, (begin, end) in enumerate(SIDES[side]):
        mask[row, begin:end] = 1
    return ids * mask + (1 - mask), mask  # 1 is the padding token


def check_rows(states_of, side, atol=2e-5):
    """Check that the states of each row in the batch equal those of the single row."""
    ids, mask = make_padded_ids(side)
    with torch.no_grad():
        together = states_of(ids, mask)
        for row, (begin, end) in enumerate(SIDES[side]):
            alone = states_of(ids[row : row + 1, begin:end], None)
            torch.testing.assert_close(together[row, begin:end], alone[0], atol=atol, rtol=0)


def make_encoder(row, variant="gqa", **fields):
    model = remove_positions(row.make_model(next(iter(row.heads)), variant, **fields))
    return model.get_encoder() if prefix_of(row) else model


def prefix_of(row):
    return "encoder_" if hasattr(row.config_class, "encoder_attention_pattern") else ""


def check_encoder(encoder, side):
    for implementation in ("eager", "sdpa"):
        encoder.set_attn_implementation(implementation)
        check_rows(lambda ids, mask: encoder(input_ids=ids, attention_mask=mask).last_hidden_state, side)


ENCODER_CASES = [
    *((name, architecture, {}) for name in PATTERNS for architecture in ("roberta", "t5")),
    *((name, architecture, {"num_global_tokens": 2}) for name in PATTERNS for architecture in ("bert", "t5")),
    ("memory_compressed", "roberta", {}),
    ("transient_global", "t5", {}),
    *((name, "roberta", {}) for name in KERNELS),
    *(("local_blocks", row.name, {}) for row in (*ARCHITECTURES, *ENCODERS, *ENCODER_DECODERS)),
    *(("linformer", row.name, {}) for row in (BERT, *ENCODERS)),
]
ENCODER_IDS = [f"{name}-{architecture}-{'-'.join(more)}" for name, architecture, more in ENCODER_CASES]


@pytest.mark.parametrize("name, architecture, more", ENCODER_CASES, ids=ENCODER_IDS)
@EVERY_SIDE
@pytest.mark.parametrize("in_blocks", [False, True], ids=["", "blocks"])
def test_encoder_row_is_the_same_alone_and_in_a_batch(name, architecture, more, side, in_blocks, request):
    if in_blocks:
        request.getfixturevalue("gathered_blocks")
    row = ROWS[architecture]
    check_encoder(make_encoder(row, **get_fields(name, prefix_of(row), **more)), side)


@pytest.mark.parametrize("variant", ["talking", "latent"])
@pytest.mark.parametrize("name", ["random_blocks", "fixed, split", "local_blocks", "sliding_window"])
@pytest.mark.parametrize("architecture", ["bert", "t5"])
def test_talking_heads_and_latent_rows_are_the_same_in_a_batch(name, architecture, variant, gathered_blocks):
    row = ROWS[architecture]
    more = {"num_global_tokens": 1}
    check_encoder(make_encoder(row, variant, **get_fields(name, prefix_of(row), **more)), "both")


@pytest.mark.parametrize("name", ["sliding_window", "fixed"])
def test_global_attention_mask_applies_per_row(name):
    encoder = make_encoder(BERT, **get_fields(name, num_global_tokens=1))
    ids, mask = make_padded_ids("both")
    is_global = (torch.rand(mask.shape) < 0.2).long() * mask
    with torch.no_grad():
        together = encoder(input_ids=ids, attention_mask=mask, global_attention_mask=is_global).last_hidden_state
        for row, (begin, end) in enumerate(SIDES["both"]):
            rows = slice(row, row + 1), slice(begin, end)
            alone = encoder(input_ids=ids[rows], global_attention_mask=is_global[rows]).last_hidden_state
            torch.testing.assert_close(together[row, begin:end], alone[0], atol=2e-5, rtol=0)


def test_returned_weights_are_at_the_positions_of_the_tokens():
    encoders = [
        (make_encoder(BERT, **get_fields("fixed", num_global_tokens=1)), 0),
        (make_encoder(BERT, **get_fields("sliding_window", num_global_tokens=1)), 0),
        (make_encoder(ROWS["roberta"], **get_fields("linformer")), 0),
        (make_encoder(T5, **get_fields("transient_global", "encoder_")), None),
    ]
    ids, mask = make_padded_ids("left")
    begin, end = SIDES["left"][1]
    for encoder, summaries in encoders:
        with torch.no_grad():
            weights = encoder(input_ids=ids, attention_mask=mask, output_attentions=True).attentions[-1][1]
            alone = encoder(input_ids=ids[1:2, begin:end], output_attentions=True).attentions[-1][0]
        before = LENGTH // 3 if summaries is None else 0
        fewer = (end - begin) // 3 if summaries is None else 0
        torch.testing.assert_close(weights[:, begin:end, before + begin :], alone[:, :, fewer:], atol=1e-5, rtol=0)
        torch.testing.assert_close(weights[:, begin:end, :fewer], alone[:, :, :fewer], atol=1e-5, rtol=0)


DECODERS = {"bert": "BertLMHeadModel", "roberta": "RobertaForCausalLM", "bart": "BartForCausalLM"}
DECODERS |= {"t5": "T5ForConditionalGeneration", "whisper": "WhisperForConditionalGeneration"}
DECODER_CASES = [
    *((name, architecture) for name in PATTERNS for architecture in ("bert", "t5")),
    *((name, "bert") for name in KERNELS if name != "linformer"),
    *(("local_blocks", architecture) for architecture in DECODERS),
]


DECODER_IDS = ["-".join(case) for case in DECODER_CASES]
EVERY_DECODER = pytest.mark.parametrize("name, architecture", DECODER_CASES, ids=DECODER_IDS)


def make_decoder(architecture, name, **more):
    row = ROWS[architecture]
    return row, remove_positions(row.make_model(DECODERS[architecture], "gqa", **get_fields(name), **more))


def make_source(row, rows):
    """Return the encoder's inputs, equal for each row."""
    torch.manual_seed(2)
    inputs = {name: value[:1] for name, value in row.make_batch(next(iter(row.heads))).items()}
    if not prefix_of(row) or "encoder_outputs" in inputs:
        return {}
    inputs.pop("decoder_input_ids", None)
    return {name: value.expand(rows, *value.shape[1:]) for name, value in inputs.items()}


def make_decoder_inputs(row, head, ids, mask):
    """Return the keyword arguments of a decoder's forward pass."""
    if head.endswith("ForConditionalGeneration"):
        return make_source(row, len(ids)) | {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    return {"input_ids": ids, "attention_mask": mask}


@EVERY_DECODER
@EVERY_SIDE
@pytest.mark.parametrize("in_blocks", [False, True], ids=["", "blocks"])
def test_decoder_row_is_the_same_alone_and_in_a_batch(name, architecture, side, in_blocks, request):
    if in_blocks:
        request.getfixturevalue("gathered_blocks")
    row, model = make_decoder(architecture, name)

    def decode(ids, mask):
        return model(**make_decoder_inputs(row, DECODERS[architecture], ids, mask), use_cache=False).logits

    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        check_rows(decode, side)


@EVERY_DECODER
def test_row_generates_the_same_alone_and_in_a_batch(name, architecture, gathered_blocks):
    row, model = make_decoder(architecture, name)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 9, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    ids, mask = make_padded_ids("left")
    # Otherwise `generate` would insert the start token before the padding.
    if prefix_of(row) and "CausalLM" not in DECODERS[architecture]:
        ids[torch.arange(3), mask.argmax(1)] = model.config.decoder_start_token_id

    def generated(ids, mask):
        result = model.generate(**make_decoder_inputs(row, DECODERS[architecture], ids, mask), **options)
        return result.sequences[:, -9:], torch.stack(result.scores, 1)

    tokens, scores = generated(ids, mask)
    for place, (begin, _) in enumerate(SIDES["left"]):
        alone = ids[place : place + 1, begin:]
        expected, expected_scores = generated(alone, torch.ones_like(alone))
        assert tokens[place].equal(expected[0])
        torch.testing.assert_close(scores[place], expected_scores[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["random_blocks", "fixed", "local_blocks"])
def test_more_right_padding_changes_no_output(name):
    encoder = make_encoder(BERT, **get_fields(name))
    ids = make_token_ids(2, 12)
    mask = torch.ones_like(ids)
    longer, longer_mask = (torch.nn.functional.pad(item, (0, 20)) for item in (ids, mask))
    with torch.no_grad():
        expected = encoder(ids, attention_mask=mask)[0]
        actual = encoder(longer, attention_mask=longer_mask)[0][:, :12]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_left_padding_allocates_no_quadratic_tensor():
    sizes = []
    for n in (1024, 2048):
        window = get_fields("sliding_window", "encoder_", num_global_tokens=1)
        for pattern in (window, get_fields("local_blocks", "encoder_")):
            encoder = T5.make_model("T5EncoderModel", "gqa", num_layers=1, num_decoder_layers=1, **pattern)
            mask = torch.ones(2, n, dtype=torch.long)
            mask[1, : n // 3] = 0
            with torch.no_grad(), LargestTensor() as largest:
                encoder(make_token_ids(2, n), attention_mask=mask)
            sizes.append(largest.numel)
    assert sizes[2] <= 2.1 * sizes[0] and sizes[3] <= 2.1 * sizes[1]


# By default, test one block pattern that changes the masks and one pattern that computes other keys.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "random_blocks",
        "memory_compressed",
        pytest.param("local_blocks", marks=pytest.mark.slow),
        pytest.param("sliding_window", marks=pytest.mark.slow),
    ],
)
def test_compiled_and_exported_encoders_count_only_real_tokens(name):
    more = {"num_global_tokens": 1} if name == "sliding_window" else {}
    encoder = make_encoder(ROWS["roberta"], **get_fields(name, **more))
    ids, mask = make_padded_ids("left")
    with torch.no_grad():
        expected = encoder(ids, attention_mask=mask).last_hidden_state
        sizes = {"input_ids": {1: torch.export.Dim.AUTO}, "attention_mask": {1: torch.export.Dim.AUTO}}
        inputs = {"input_ids": ids, "attention_mask": mask}
        program = torch.export.export(encoder, (), kwargs=inputs, dynamic_shapes=sizes)
        actual = program.module()(**inputs).last_hidden_state
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
        compiled = torch.compile(encoder, backend="eager", fullgraph=True)
        actual = compiled(ids, attention_mask=mask).last_hidden_state
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()], atol=1e-5, rtol=0)
