"""Check that selected rows of a cache whose beams share encoder outputs continue with their own sentence."""

import pytest
import torch
from architectures import BATCH, LENGTH, T5
from fixtures.caches import CHOICES, get_cache, with_cache
from relatives import ENCODER_DECODERS
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.modeling_outputs import BaseModelOutput

BEAMS = 2
BART = ENCODER_DECODERS[0]
FORMS = {
    "plain": {},
    "grouped": {"num_key_value_heads": 4},
    "exact": {"cross_kv_lora_rank": None},  # the rank is the width of the encoder outputs
    "low rank": {"cross_kv_lora_rank": 16},
    "values of their own size": {"value_head_dim": 6},
    "a kernel": {"cross_attention_kernel": "elu"},
}
# A static cache supports only `reorder_cache`, and kernels do not use static caches.
CASES = [(choice, form, "dynamic") for choice in CHOICES for form in FORMS] + [
    (choice, form, "static")
    for choice, (method, _) in CHOICES.items()
    for form in FORMS
    if method == "reorder_cache" and form != "a kernel"
]


def cache_for(model, kind):
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(), DynamicCache())
    return EncoderDecoderCache(*(StaticCache(config=model.config, max_cache_len=size) for size in (12, LENGTH)))


@pytest.mark.parametrize("family", [T5, BART], ids=["t5", "bart"])
@pytest.mark.parametrize(("choice", "form", "kind"), CASES)
def test_selected_beams_attend_to_their_own_sentence(choice, family, form, kind):
    method, rows = CHOICES[choice]
    rows = torch.tensor(rows)
    name = "BartForConditionalGeneration" if family is BART else "T5ForConditionalGeneration"
    fields = dict(FORMS[form])
    if form == "exact":
        fields["cross_kv_lora_rank"] = family.tiny["d_model"]
    model = family.make_model(name, **fields)
    batch = family.make_batch(name)
    encoder_inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    ids = torch.randint(3, 20, (BATCH * BEAMS, 4), generator=torch.Generator().manual_seed(0))
    logits = []
    with torch.no_grad():
        states = model.get_encoder()(**encoder_inputs).last_hidden_state
        every, mask = (item.repeat_interleave(BEAMS, dim=0) for item in (states, batch["attention_mask"]))
        for encoder_states, its_mask in ((states, batch["attention_mask"]), (every, mask)):
            outputs = BaseModelOutput(last_hidden_state=encoder_states)
            output = model(
                encoder_outputs=outputs,
                attention_mask=its_mask,
                decoder_input_ids=ids[:, :3],
                **with_cache(cache_for(model, kind)),
            )
            cache = get_cache(output)
            getattr(cache, method)(rows)
            nothing = BaseModelOutput(last_hidden_state=torch.full_like(every[rows], torch.nan))
            continuation = {
                "encoder_outputs": nothing,
                "attention_mask": mask[rows],
                "decoder_input_ids": ids[rows][:, 3:],
            }
            logits.append(model(**continuation, **with_cache(cache)).logits)
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
