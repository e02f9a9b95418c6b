"""Check the progress bars: live on a terminal, rare lines in a log file, and none if bars are disabled."""

import io
import sys

import datasets
import pytest
from accelerate import Accelerator
from transformers.utils import logging as transformers_logging

from hf_attn_variants import progress
from hf_attn_variants.inspection.speed import measure_speed
from hf_attn_variants.training.engine import session


class Terminal(io.StringIO):
    def isatty(self):
        return True


def make_training_bar(items):
    return session.show_progress(Accelerator(cpu=True), items, "Running")


@pytest.fixture(autouse=True)
def _bars_enabled(monkeypatch):
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)


@pytest.mark.parametrize("make", [progress.progress_bar, make_training_bar])
def test_progress_bar_is_live_on_terminals_and_rare_in_log_files(make, monkeypatch):
    for stream, interval in ((Terminal(), 0.1), (io.StringIO(), 20.0)):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = make(range(2))
        assert not bar.disable and bar.mininterval == interval
        assert list(bar) == [0, 1] and "/2 [" in stream.getvalue()
    assert progress.progress_bar(range(2), disable=True).disable


@pytest.mark.parametrize("make", [progress.progress_bar, make_training_bar])
def test_progress_bars_follow_the_switches_of_the_libraries(make, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.disable_progress_bars():
        assert make(range(2)).disable
        assert not transformers_logging.is_progress_bar_enabled() and datasets.are_progress_bars_disabled()
        with progress.disable_progress_bars():
            pass
        assert make(range(2)).disable  # unchanged outside of the context
    with progress.disable_progress_bars(False):
        assert not make(range(2)).disable
    assert transformers_logging.is_progress_bar_enabled() and not datasets.are_progress_bars_disabled()


def test_timings_show_progress_bars_by_the_same_rule(monkeypatch):
    sizes = {"d_model": 8, "num_heads": 2, "d_kv": 4, "num_layers": 1, "d_ff": 8, "decoder_start_token_id": 0}
    config = {"model_type": "t5", "vocab_size": 16, "is_encoder_decoder": True, **sizes}
    for shown in (True, False):
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        with progress.disable_progress_bars(not shown):
            measure_speed(
                config, kv_heads=[1], talking_heads=False, batch_size=1, length=4, max_new_tokens=2, rounds=1
            )
        assert ("timing" in stream.getvalue()) is shown
