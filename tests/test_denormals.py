"""Denormals are zero inside, as they were outside, and so in every script's session."""

import argparse

import pytest
import torch

from hf_attn_variants.denormals import flushed_denormals
from hf_attn_variants.training.run_glue import parse_args
from hf_attn_variants.training.session import open_session

CAN_FLUSH = torch.set_flush_denormal(False)
pytestmark = pytest.mark.skipif(not CAN_FLUSH, reason="this CPU cannot flush denormals")


def is_flushing() -> bool:
    return bool(torch.full((), torch.finfo(torch.float32).tiny) / 2 == 0)


def test_denormals_are_zero_inside_and_as_before_outside():
    assert not is_flushing()
    with flushed_denormals():
        assert is_flushing()
        with flushed_denormals():
            pass
        assert is_flushing()
    assert not is_flushing()
    with pytest.raises(RuntimeError), flushed_denormals():
        raise RuntimeError
    assert not is_flushing()


def test_a_training_session_flushes_them(tmp_path):
    flags = ["--model_name_or_path", "m", "--task_name", "cola", "--data_dir", "d", "--cpu"]
    args: argparse.Namespace = parse_args([*flags, "--output_dir", str(tmp_path / "out")])
    with open_session(args):
        assert is_flushing()
    assert not is_flushing()
