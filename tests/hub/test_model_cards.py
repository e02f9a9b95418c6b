"""The cards of real runs in model_cards/: as they were generated, with metadata that huggingface_hub reads."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_attn_variants.hub.card import is_untouched

CARDS = sorted((Path(__file__).resolve().parents[2] / "model_cards").glob("*.md"))


def test_there_is_one_of_a_minilm_one_of_a_whisper_and_one_of_a_t5():
    names = {"all-MiniLM-L6-v2-gqa4", "t5-mini-multi30k-en-de-latents", "whisper-base-gqa4"}
    assert {path.stem for path in CARDS} == names


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_a_card_is_as_it_was_generated_and_its_metadata_is_whole(path):
    text = path.read_text(encoding="utf-8")
    assert is_untouched(text), "edited by hand: generate it again"
    data = ModelCard.load(path, ignore_metadata_errors=False).data
    assert data.license and data.pipeline_tag and "attn-variants" in data.tags
    assert data.eval_results and all(isinstance(each.metric_value, float) for each in data.eval_results)
    for section in ("## Heads", "## Use", "## Conversion", "## Scores", "## Limits", "## License", "## Papers"):
        assert f"\n{section}\n" in text
    assert "/tmp" not in text and "/work" not in text
