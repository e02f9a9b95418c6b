"""Check the cards of real runs in model_cards/: they are as generated, and huggingface_hub reads their metadata."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_attn_variants.hub.card import is_unedited_card

CARDS = sorted((Path(__file__).resolve().parents[2] / "model_cards").glob("*.md"))


def test_example_cards_exist_for_minilm_whisper_and_t5():
    names = {"all-MiniLM-L6-v2-gqa4", "t5-mini-multi30k-en-de-latents", "whisper-base-gqa4"}
    assert {path.stem for path in CARDS} == names


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.stem)
def test_example_card_is_as_generated_with_valid_metadata(path):
    text = path.read_text(encoding="utf-8")
    assert is_unedited_card(text), "the card was edited manually; generate it again"
    data = ModelCard.load(path, ignore_metadata_errors=False).data
    assert data.license and data.pipeline_tag and "attn-variants" in data.tags
    assert data.eval_results and all(isinstance(item.metric_value, float) for item in data.eval_results)
    for section in ("## Heads", "## Use", "## Conversion", "## Scores", "## Limits", "## License", "## Papers"):
        assert f"\n{section}\n" in text
    assert "/tmp" not in text and "/work" not in text
