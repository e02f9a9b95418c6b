"""Check masked-LM pretraining on the license text: masks, loss, trained-context check, a whole run, exact resume."""

import gzip
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixtures.commands import run_command
from fixtures.data_files import write_lines
from fixtures.licence_text import LICENCE, write_shards
from fixtures.linear_loop import log_of, log_without_times
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE, WordPiece
from tokenizers.pre_tokenizers import ByteLevel, Whitespace
from tokenizers.trainers import BpeTrainer
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoTokenizer,
    BartConfig,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from hf_attn_variants import (
    AttnVariantAlbertConfig,
    AttnVariantAlbertForMaskedLM,
    AttnVariantAlbertForPreTraining,
    AttnVariantBertConfig,
    AttnVariantBertForPreTraining,
)
from hf_attn_variants.commands.training import pretrain
from hf_attn_variants.registration import get_variant_model_class
from hf_attn_variants.training.engine.dataloaders import IGNORED_LABEL, MaskedLMPreparer, make_word_start_mask
from hf_attn_variants.training.engine.loop import TrainingLoop
from hf_attn_variants.training.engine.models import get_vocabulary_size, make_new_config
from hf_attn_variants.training.pretraining.task import (
    compute_context_results,
    make_masked_lm_objective,
    shuffle_positions,
    zero_attention,
)

TINY = "hidden_size=16,num_hidden_layers=2,num_attention_heads=4,intermediate_size=32,max_position_embeddings=64"
STEPS = ["--max_train_steps", 6]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Three shards and a held-out file of the license."""
    return write_shards(tmp_path_factory.mktemp("text"), 3)


def make_argv(text, tokenizer, out, *more):
    argv = ["--tokenizer_name", tokenizer.name_or_path, "--output_dir", out, "--max_length", 24]
    argv += [] if "--train_file" in more else ["--train_file", *sorted(text.glob("train-*.txt.gz"))]
    argv += [] if "--validation_file" in more else ["--validation_file", text / "valid.txt"]
    argv += ["--per_device_train_batch_size", 4, "--max_eval_samples", 8, "--learning_rate", "1e-3", "--cpu"]
    argv += ["--logging_steps", 1, "--shuffle_buffer_size", 10, "--disable_tqdm", *more]
    return [str(item) for item in argv]


@pytest.fixture
def run(text, tokenizer, tmp_path):
    def call(*more, out=tmp_path / "out"):
        return run_command(pretrain, *make_argv(text, tokenizer, out, *more)), out

    return call


def make_scratch_flags(model_type="bert", *more):
    return ["--model_type", model_type, "--config_overrides", TINY, *more]


def count_masked_tokens(prepare, blocks):
    actual = {"chosen": 0, "mask": 0, "random": 0, "kept": 0, "tokens": 0}
    for i, block in enumerate(blocks):
        example = prepare(block, (0, i))
        original = np.concatenate([[prepare.cls_id], block, [prepare.sep_id]])
        inputs, labels = example["input_ids"][: len(original)], example["labels"][: len(original)]
        chosen = labels != IGNORED_LABEL
        assert (labels[chosen] == original[chosen]).all() and (inputs[~chosen] == original[~chosen]).all()
        assert not chosen[[0, -1]].any() and (example["labels"][len(original) :] == IGNORED_LABEL).all()
        assert example["attention_mask"].tolist() == [1] * len(original) + [0] * (prepare.length - len(original))
        actual["tokens"] += len(block)
        actual["chosen"] += chosen.sum()
        actual["mask"] += (inputs[chosen] == prepare.mask_id).sum()
        actual["kept"] += (inputs[chosen] == original[chosen]).sum()
    actual["random"] = actual["chosen"] - actual["mask"] - actual["kept"]
    return actual


@pytest.fixture(scope="module")
def blocks(tokenizer):
    ids = tokenizer(" ".join(LICENCE.read_text().split()), add_special_tokens=False, verbose=False)["input_ids"]
    return [np.array(ids[i : i + 60]) for i in range(0, len(ids), 60)]


@pytest.mark.parametrize("whole_words", [False, True])
def test_masks_have_the_requested_rates(tokenizer, blocks, whole_words):
    prepare = MaskedLMPreparer(tokenizer, 64, 0.15, seed=1, whole_words=whole_words)
    actual = count_masked_tokens(prepare, blocks * 5)
    assert actual["tokens"] > 20_000
    assert actual["chosen"] / actual["tokens"] == pytest.approx(0.15, abs=0.015)
    assert actual["mask"] / actual["chosen"] == pytest.approx(0.8, abs=0.03)
    assert actual["random"] / actual["chosen"] == pytest.approx(0.1, abs=0.025)


def test_masks_depend_only_on_seed_epoch_and_row(tokenizer, blocks):
    def labels(seed, *key):
        return MaskedLMPreparer(tokenizer, 64, 0.15, seed)(blocks[0], key)["labels"].tolist()

    assert labels(1, 0, 0) == labels(1, 0, 0)
    assert len({str(actual) for actual in (labels(1, 0, 0), labels(1, 1, 0), labels(1, 0, 1), labels(2, 0, 0))}) == 4


@pytest.mark.parametrize("task", ["nsp", "sop"])
def test_half_of_the_sentence_pairs_are_changed(tokenizer, blocks, task):
    prepare = MaskedLMPreparer(tokenizer, 64, 0.15, seed=1, sentence_task=task)
    assert prepare.block_length == 61
    changed, cuts = 0, set()
    for i, block in enumerate(blocks * 4):
        other = blocks[(i + 7) % len(blocks)]
        example = prepare(block, (0, i), other) if task == "nsp" else prepare(block, (0, i))
        ids = np.where(example["labels"] != IGNORED_LABEL, example["labels"], example["input_ids"])
        used = example["attention_mask"].sum()
        middle, end = np.flatnonzero(ids[:used] == prepare.sep_id)
        first, second = ids[1:middle].tolist(), ids[middle + 1 : end].tolist()
        assert ids[0] == prepare.cls_id and end == used - 1 and (ids[used:] == prepare.pad_id).all()
        assert example["token_type_ids"].tolist() == [0] * (middle + 1) + [1] * (end - middle) + [0] * (64 - used)
        if not example["sentence_labels"]:
            assert first + second == block.tolist()
        elif task == "sop":
            assert second + first == block.tolist()
        else:
            assert first == block[: len(first)].tolist() and second == other[: len(block) - len(first)].tolist()
        changed += example["sentence_labels"]
        cuts.add(len(first))
    assert changed / (4 * len(blocks)) == pytest.approx(0.5, abs=0.05) and len(cuts) > 50
    assert str(prepare(blocks[0], (3, 5), blocks[1])) == str(prepare(blocks[0], (3, 5), blocks[1]))


def test_impossible_sentence_pairs_raise_an_error(tokenizer, blocks):
    prepare = MaskedLMPreparer(tokenizer, 64, 0.15, seed=1, sentence_task="nsp")
    short = prepare(blocks[0][:1], (0, 0), blocks[1])
    assert short["sentence_labels"] == IGNORED_LABEL and short["attention_mask"].sum() == 4
    assert not any(prepare(blocks[0], (0, i), None)["sentence_labels"] for i in range(20))


def test_whole_word_masking_masks_all_pieces(tokenizer, blocks):
    prepare = MaskedLMPreparer(tokenizer, 64, 0.3, seed=0, whole_words=True)
    starts = make_word_start_mask(tokenizer)
    num_whole_words = parts = 0
    for i, block in enumerate(blocks):
        chosen = prepare(block, (0, i))["labels"][1 : len(block) + 1] != IGNORED_LABEL
        for j in range(1, len(block)):
            if not starts[block[j]]:
                assert chosen[j] == chosen[j - 1]
                num_whole_words += 1
        parts += (chosen[1:] != chosen[:-1]).sum()
    assert num_whole_words > 500 and parts > 500


def test_vocabulary_may_have_gaps(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "talk", "##ing", "heads"]
    vocabulary = {piece: 3 * i for i, piece in enumerate(pieces)}  # a trainer that sees a piece twice leaves gaps
    raw = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = Whitespace()
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), pieces, strict=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, **{f"{name}_token": v for name, v in names.items()})
    ids = np.array(tokenizer("talking heads", add_special_tokens=False)["input_ids"])
    assert ids.tolist() == [15, 18, 21] and get_vocabulary_size(tokenizer) == 22
    assert make_word_start_mask(tokenizer)[ids].tolist() == [True, False, True]
    prepare = MaskedLMPreparer(tokenizer, 8, 0.9, seed=0, whole_words=True)
    assert prepare(ids, (0, 0))["input_ids"].shape == (8,)
    argv = ["--tokenizer_name", tmp_path, "--output_dir", tmp_path, "--train_file", "x", *STEPS, *make_scratch_flags()]
    assert make_new_config(pretrain.parse_args(list(map(str, argv))), tokenizer).vocab_size == 22


def test_byte_level_pieces_are_grouped_into_words():
    raw = Tokenizer(BPE())
    raw.pre_tokenizer, raw.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=600, special_tokens=["<s>", "</s>"], initial_alphabet=ByteLevel.alphabet())
    raw.train_from_iterator([LICENCE.read_text()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    ids = tokenizer("Redistribution (of licenses), 2004.")["input_ids"]
    starts, words = make_word_start_mask(tokenizer)[ids], []
    for token, begins in zip(tokenizer.convert_ids_to_tokens(ids), starts, strict=True):
        words = [*words, token] if begins or not words else [*words[:-1], words[-1] + token]
    assert words == ["Redistribution", "Ġ(of", "Ġlicenses", ")", ",", "Ġ2004", "."]


@pytest.mark.thorough
def test_sentencepiece_pieces_are_grouped_into_words(shared_data):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "tokenizers/albert")
    ids = tokenizer("Unbelievably gargling (electrolytes), 1998.", add_special_tokens=False)["input_ids"]
    tokens, starts = tokenizer.convert_ids_to_tokens(ids), make_word_start_mask(tokenizer)[ids]
    words = []
    for token, begins in zip(tokens, starts, strict=True):
        words = [*words, token] if begins else [*words[:-1], words[-1] + token]
    actual = [word.strip("▁") for word in words if word.strip("▁")]
    assert actual == ["unbelievably", "gargling", "(", "electrolytes", ")", ",", "1998", "."]


SIZES = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 32}
SIZES |= {"num_hidden_layers": 2}


def make_tiny_models():
    torch.manual_seed(0)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    distilbert = {"vocab_size": 50, "dim": 16, "n_heads": 4, "hidden_dim": 32, "n_layers": 2}
    models = [
        BertForMaskedLM(BertConfig(**SIZES, **dropout)),
        AlbertForMaskedLM(AlbertConfig(**SIZES, embedding_size=8)),
        RobertaForMaskedLM(RobertaConfig(**SIZES, **dropout)),
        ElectraForMaskedLM(ElectraConfig(**SIZES, **dropout, embedding_size=8)),
        DistilBertForMaskedLM(DistilBertConfig(**distilbert, dropout=0.0, attention_dropout=0.0)),
    ]
    for model in models[:]:
        variant_class = get_variant_model_class(type(model).__name__)
        models.append(variant_class(variant_class.config_class.from_upstream(model.config, num_key_value_heads=2)))
    for model in models:
        torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    return models


def make_random_batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 50, (3, 10), generator=generator)
    labels = torch.where(torch.rand(3, 10, generator=generator) < 0.3, ids, IGNORED_LABEL)
    attention_mask = torch.ones_like(ids)
    attention_mask[2, 7:], labels[2, 7:] = 0, IGNORED_LABEL
    return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}


@pytest.mark.parametrize("model", make_tiny_models(), ids=lambda model: type(model).__name__)
def test_loss_on_masked_positions_equals_the_model_loss(model):
    batch = make_random_batch()
    objective = make_masked_lm_objective(model)
    count = objective.count(batch)
    assert count == (batch["labels"] != IGNORED_LABEL).sum() and objective.examples(batch) == 3
    model_loss = model(**batch).loss
    gradients = torch.autograd.grad(model_loss, list(model.parameters()), allow_unused=True)
    objective_loss = objective.loss_sum(model, batch) / count
    torch.testing.assert_close(objective_loss, model_loss)
    for actual, expected in zip(
        torch.autograd.grad(objective_loss, list(model.parameters()), allow_unused=True), gradients, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
    assert model(**batch).logits.shape == (3, 10, 50)
    batch["labels"][:] = IGNORED_LABEL
    nothing = objective.loss_sum(model, batch)
    nothing.backward()
    assert nothing.item() == 0.0 and objective.count(batch) == 0


@pytest.mark.parametrize(
    ("model", "label_name"),
    [
        (BertForPreTraining(BertConfig(**SIZES)), "next_sentence_label"),
        (AttnVariantBertForPreTraining(AttnVariantBertConfig(**SIZES, num_key_value_heads=1)), "next_sentence_label"),
        (AttnVariantAlbertForPreTraining(AttnVariantAlbertConfig(**SIZES)), "sentence_order_label"),
    ],
    ids=["BERT", "MQA BERT", "ALBERT"],
)
def test_loss_with_a_sentence_task_equals_the_model_loss(model, label_name):
    model.eval()
    batch = make_random_batch() | {"token_type_ids": (torch.arange(10) > 4).long().repeat(3, 1)}
    model_loss = model(**batch, **{label_name: torch.tensor([1, 0, 1])}).loss
    batch["sentence_labels"] = torch.tensor([1, 0, 1])
    masked = int((batch["labels"] != IGNORED_LABEL).sum())
    # The model adds the means of both losses. In our sum, a sentence counts as `masked / 3` masked tokens.
    objective = make_masked_lm_objective(model, sentence_weight=masked / 3)
    torch.testing.assert_close(objective.loss_sum(model, batch) / masked, model_loss)
    batch["sentence_labels"][:] = IGNORED_LABEL
    without = objective.loss_sum(model, batch)
    without.backward()
    assert without.item() / masked < model_loss.item()


@pytest.mark.parametrize("model", make_tiny_models(), ids=lambda model: type(model).__name__)
@torch.no_grad()
def test_positions_are_independent_without_attention(model):
    model.eval()
    ids = make_random_batch()["input_ids"]
    changed = ids.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 50
    others = [i for i in range(10) if i != 4]
    before = model(ids).logits
    assert not torch.allclose(model(changed).logits[:, others], before[:, others])
    with zero_attention(model):
        assert torch.equal(model(changed).logits[:, others], model(ids).logits[:, others])
    assert torch.equal(model(ids).logits, before)


def test_shuffled_context_keeps_tokens_and_labels():
    batch = make_random_batch()
    shuffled = shuffle_positions(batch)
    assert torch.equal(shuffled["input_ids"], shuffle_positions(batch)["input_ids"])
    for row, length in enumerate([10, 10, 7]):
        before, after = (
            list(zip(b["input_ids"][row].tolist(), b["labels"][row].tolist(), strict=True)) for b in (batch, shuffled)
        )
        assert before != after and sorted(before) == sorted(after)
        assert (before[0], before[length - 1 :]) == (after[0], after[length - 1 :])


@pytest.mark.parametrize(
    ("shuffled", "zeroed", "passed"), [(3.31, 3.31, True), (3.31, 3.2, False), (3.2, 9.0, False), (2.0, 9.0, False)]
)
def test_context_check_needs_both_losses(shuffled, zeroed, passed):
    assert compute_context_results(3.0, shuffled, zeroed)["gate_passed"] is passed


@pytest.mark.thorough
def test_new_bert_trains_with_windows(run, tokenizer):
    flags = ["--attention_pattern", "sliding_window", "--attention_window", 4, "--num_global_tokens", 1]
    results, out = run(*make_scratch_flags("bert", *flags), *STEPS)
    config = AutoConfig.from_pretrained(out)
    actual = config.attention_pattern, config.attention_window, config.num_global_tokens
    assert actual == ("sliding_window", 4, 1)
    wider = AutoModelForMaskedLM.from_pretrained(out, attention_window=64).eval()
    model = AutoModelForMaskedLM.from_pretrained(out).eval()
    ids = torch.arange(5, 29)[None]
    assert not torch.allclose(model(ids).logits, wider(ids).logits, atol=1e-5)
    again, _ = run("--model_name_or_path", out, *STEPS, out=out.parent / "again")
    assert again["eval_loss"] < results["eval_loss"] + 0.1
    with pytest.raises(ValueError, match="--attention_pattern is only supported for a model from scratch"):
        run("--model_name_or_path", out, *flags, *STEPS, out=out.parent / "other")
    with pytest.raises(ValueError, match="`attention_window` must be set"):
        run(*make_scratch_flags("bert", *flags[:2]), *STEPS, out=out.parent / "other")


def test_variant_fields_may_be_overrides(tokenizer):
    fields = "encoder_attention_pattern=fixed,encoder_attention_block_size=4,encoder_num_summary_tokens=1"
    settings = SimpleNamespace(model_type="t5", config_overrides=fields, dropout_rate=None)
    config = make_new_config(settings, tokenizer)
    assert config.model_type == "attn_variant_t5" and config.encoder_attention_block_size == 4


@pytest.mark.thorough
def test_new_albert_variant_trains_and_loads(run, tokenizer):
    results, out = run(*make_scratch_flags("albert", "--num_key_value_heads", 2, "--talking_heads", "logits"), *STEPS)
    assert results["steps"] == 6 and results["train_samples"] == 24 and results["train_tokens"] == 24 * 24
    assert results["eval_samples"] == 8 and results["eval_loss"] == pytest.approx(np.log(results["eval_perplexity"]))
    saved = json.loads((out / "all_results.json").read_text())
    assert saved["eval_loss"] == results["eval_loss"] and saved["gate_passed"] is False
    assert saved["arguments"]["num_key_value_heads"] == 2
    assert (out / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    config = AutoConfig.from_pretrained(out)
    assert (config.model_type, config.num_key_value_heads, config.talking_heads) == (
        "attn_variant_albert",
        2,
        "logits",
    )
    assert config.vocab_size == len(tokenizer) and config.hidden_size == 16
    assert isinstance(AutoModelForMaskedLM.from_pretrained(out), AttnVariantAlbertForMaskedLM)
    assert len(AutoTokenizer.from_pretrained(out)) == len(tokenizer)
    again, _ = run("--model_name_or_path", out, "--num_train_epochs", 0, out=out.parent / "again")
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-6) and again["steps"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "task", "loaded"),
    [("bert", "nsp", AttnVariantBertForPreTraining), ("albert", "sop", AttnVariantAlbertForPreTraining)],
)
def test_sentence_task_trains_its_head(run, model_type, task, loaded):
    results, out = run(*make_scratch_flags(model_type, "--num_key_value_heads", 2), "--sentence_task", task, *STEPS)
    assert results["eval_sentence_loss"] > 0 and results["eval_sentence_accuracy"] in [i / 8 for i in range(9)]
    model = AutoModelForPreTraining.from_pretrained(out)
    assert isinstance(model, loaded) and model.config.num_key_value_heads == 2
    log = log_of(out)
    assert "eval_sentence_accuracy" in log[-1]
    again, _ = run(
        *("--model_name_or_path", out, "--sentence_task", task, "--num_train_epochs", 0), out=out.parent / "again"
    )
    for name in ("eval_loss", "eval_sentence_loss"):
        assert again[name] == pytest.approx(results[name], rel=1e-6)


def test_run_reports_throughput_and_utilization(run):
    results, out = run(*make_scratch_flags(), *STEPS, "--peak_tflops", "0.5", "--logging_steps", 3)
    # Compare seconds instead of rates, because times are rounded to milliseconds and the run is short.
    seconds, tokens = results["train_runtime"], results["train_tokens"]
    assert tokens / results["train_tokens_per_second"] == pytest.approx(seconds, abs=1e-3, rel=1e-2)
    assert tokens / 24 / results["train_samples_per_second"] == pytest.approx(seconds, abs=1e-3, rel=1e-2)
    # The FLOPs of two layers with four projections, two feed-forward matrices and attention over 24 tokens. The head
    # is not included.
    flops = 3 * tokens * 2 * (2 * (4 * 16 * 16 + 2 * 16 * 32) + 4 * 24 * 16)
    seconds = tokens / results["train_tokens_per_second"]
    assert flops < results["train_tflops_per_second"] * 1e12 * seconds < 2 * flops
    assert results["train_mfu"] == pytest.approx(results["train_tflops_per_second"] / 0.5, rel=2e-3)
    logged = [record for record in log_of(out) if "loss" in record]
    for record, begin in zip(logged, [0, logged[0]["time"]], strict=True):
        assert tokens / 2 / record["tokens_per_second"] == pytest.approx(record["time"] - begin, abs=2e-3, rel=1e-2)
    with pytest.raises(ValueError, match="--peak_tflops must be more than 0, got 0"):
        run(*make_scratch_flags(), *STEPS, "--peak_tflops", 0, out=out.parent / "zero")


def test_evaluating_a_sentence_task_with_a_new_head_raises_an_error(run):
    _, out = run(*make_scratch_flags(), *STEPS)
    with pytest.raises(ValueError, match="cannot be loaded as BertForPreTraining"):
        run(
            *("--model_name_or_path", out, "--sentence_task", "nsp", "--num_train_epochs", 0),
            out=out.parent / "scores",
        )
    results, _ = run("--model_name_or_path", out, "--sentence_task", "nsp", *STEPS, out=out.parent / "more")
    assert results["steps"] == 6


def test_continued_training_starts_from_the_checkpoint(run):
    first, out = run(*make_scratch_flags(), "--max_train_steps", 40, "--learning_rate", "1e-2")
    log = log_of(out)
    assert log[0]["loss"] - first["eval_loss"] > 1
    run("--model_name_or_path", out, *STEPS, out=out.parent / "more")
    more = log_of(out.parent / "more")
    assert log[0]["loss"] - more[0]["loss"] > 0.7


@pytest.mark.thorough
@pytest.mark.parametrize(
    "more",
    [
        ["--optim", "adafactor", "--adafactor_scale_parameter"],
        pytest.param(["--optim", "adafactor", "--adafactor_relative_step"], marks=pytest.mark.slow),
        ["--gradient_accumulation_steps", 2, "--dataloader_num_workers", 1, "--whole_word_mask"],
        ["--sentence_task", "nsp"],
    ],
)
def test_interrupted_mlm_run_resumes_bitwise_equal(run, tmp_path, monkeypatch, more):
    # 30 steps of 4 examples cross the end of an epoch. Dropout has BERT's default rate.
    flags = [*make_scratch_flags(), "--max_train_steps", 30, "--checkpointing_steps", 4, "--eval_steps", 10, *more]
    flags += ["--metric_for_best_model", "loss"]
    expected, uninterrupted = run(*flags, out=tmp_path / "whole")
    assert expected["epoch"] >= 1
    step = TrainingLoop._run_optimizer_step
    stops = [10, 23]

    def die(self, group):
        if stops and self.state.step == stops[0]:
            stops.pop(0)
            raise KeyboardInterrupt
        step(self, group)

    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", die)
    cut = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run(*flags, out=cut)
    with pytest.raises(KeyboardInterrupt):
        run(*flags, "--resume_from_checkpoint", "latest", out=cut)
    results, _ = run(*flags, "--resume_from_checkpoint", "latest", out=cut)
    assert log_without_times(cut) == log_without_times(uninterrupted) and results["eval_loss"] == expected["eval_loss"]
    assert (cut / "model.safetensors").read_bytes() == (uninterrupted / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"mlm_probability was 0\.15 and is now 0\.2"):
        run(*flags, "--resume_from_checkpoint", "latest", "--mlm_probability", 0.2, out=cut)


@pytest.mark.thorough
def test_trained_model_passes_the_context_check_and_an_untrained_one_gives_a_warning(tokenizer, tmp_path, caplog):
    # A block of 11 can begin with either letter, so that only neighbors determine a letter. The default
    # initialization is made for 768 hidden units; with 16 the attention would learn too slowly.
    (tmp_path / "train-0.txt.gz").write_bytes(gzip.compress(b"a b " * 3000))
    (tmp_path / "valid.txt").write_text("a b " * 300)
    flags = ["--model_type", "bert", "--config_overrides", f"{TINY},initializer_range=0.25", "--dropout_rate", 0]
    flags += ["--max_length", 13, "--learning_rate", "1e-2", "--per_device_train_batch_size", 16]
    flags += ["--max_eval_samples", 50, "--logging_steps", 50, "--eval_steps", 200]

    def train(steps):
        out = tmp_path / f"out-{steps}"
        return run_command(pretrain, *make_argv(tmp_path, tokenizer, out, *flags, "--max_train_steps", steps))

    untrained = train(1)
    assert not untrained["gate_passed"] and "unigram model" in caplog.text
    caplog.clear()
    trained = train(250)
    assert trained["eval_loss"] < 0.5 and trained["gate_passed"] and "unigram" not in caplog.text
    assert trained["gate_shuffled_loss"] - trained["eval_loss"] == pytest.approx(trained["gate_shuffled_cost"])


def test_empty_text_raises_before_removing_the_earlier_run(run, tmp_path):
    void = tmp_path / "void.txt"
    void.write_text("\u200b [PAD] \u200b\n")
    _, out = run(*make_scratch_flags(), *STEPS)
    before = sorted(path.name for path in out.iterdir())
    for flag in ("--train_file", "--validation_file"):
        with pytest.raises(ValueError, match=r"void\.txt"):
            run(*make_scratch_flags(), *STEPS, "--overwrite_output_dir", flag, void)
    assert sorted(path.name for path in out.iterdir()) == before


@pytest.mark.thorough
def test_resumed_run_selects_weights_with_the_same_text(text, tokenizer, tmp_path):
    (tmp_path / "dev.txt").write_text(LICENCE.read_text())
    flags = ["--train_file", *text.glob("*.gz"), "--validation_file", tmp_path / "dev.txt", "--max_length", 24]
    flags += ["--tokenizer_name", tokenizer.name_or_path, "--output_dir", tmp_path / "out", "--checkpointing_steps", 3]
    flags += [*make_scratch_flags(), *STEPS, "--disable_tqdm", "--cpu"]

    def again(*more):
        return run_command(pretrain, *flags, *more)

    again()
    (tmp_path / "dev.txt").write_text(LICENCE.read_text()[100:])
    again("--resume_from_checkpoint", "latest")
    again("--overwrite_output_dir", "--metric_for_best_model", "loss")
    (tmp_path / "dev.txt").write_text(LICENCE.read_text()[200:])
    with pytest.raises(ValueError, match="hash of the held-out text was"):
        again("--metric_for_best_model", "loss", "--resume_from_checkpoint", "latest")


def test_dataset_validation_split_is_used(tokenizer, tmp_path):
    articles = [article for article in LICENCE.read_text().split("\n\n") if article.strip()]
    (tmp_path / "data").mkdir()
    for split, rows in (("train", articles[4:]), ("validation", articles[:4])):
        write_lines(tmp_path / f"data/{split}.jsonl", ({"body": row} for row in rows))
    flags = ["--dataset_name", tmp_path / "data", "--text_column", "body", "--tokenizer_name", tokenizer.name_or_path]
    flags += ["--max_length", 24, "--disable_tqdm", "--cpu", "--output_dir", tmp_path / "out", *STEPS]
    results = run_command(pretrain, *flags, *make_scratch_flags())
    assert results["steps"] == 6 and results["eval_samples"] > 5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--model_name_or_path.*--model_type"),
        (make_scratch_flags("bert", "--mlm_probability", 1.5), r"--mlm_probability must be in \(0, 1\), got 1.5"),
        (make_scratch_flags("bert", "--dataset_name", "x"), "--train_file.*--dataset_name"),
        (make_scratch_flags("bert", "--dataloader_num_workers", 2), "--dataloader_num_workers.*got 2"),
        (make_scratch_flags("bert", "--metric_for_best_model", "f1"), "must be one of loss, perplexity, accuracy"),
        (make_scratch_flags("bert", "--num_key_value_heads", 3), "num_key_value_heads"),
        (["--model_type", "bert", "--config_overrides", "hidden_size=wide"], "hidden_size"),
        (["--model_type", "bert", "--config_overrides", "hidden_size=10"], "multiple of the number of attention"),
    ],
)
def test_invalid_mlm_arguments_raise_before_writing(run, tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        run(*STEPS, *more)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("roberta", TINY),
        ("electra", TINY),
        ("distilbert", "dim=16,n_layers=2,n_heads=4,hidden_dim=32,max_position_embeddings=64"),
        ("modernbert", f"{TINY},local_attention=8"),
        ("nomic_bert", TINY),
    ],
)
def test_new_relative_of_bert_trains_and_loads(run, model_type, sizes):
    argv = ["--model_type", model_type, "--config_overrides", sizes, "--num_key_value_heads", 2]
    results, out = run(*argv, "--max_train_steps", 2)
    model = AutoModelForMaskedLM.from_pretrained(out)
    assert model.config.model_type == f"attn_variant_{model_type}" and model.config.num_key_value_heads == 2
    again, _ = run("--model_name_or_path", out, "--num_train_epochs", 0, out=out.parent / "again")
    assert again["eval_loss"] == pytest.approx(results["eval_loss"], rel=1e-6)
    with pytest.raises(ValueError, match="--sentence_task sop"):
        run("--model_name_or_path", out, *STEPS, "--sentence_task", "sop", out=out.parent / "pairs")


def test_model_without_a_masked_lm_raises_an_error(run, tokenizer, tmp_path):
    ElectraForPreTraining(ElectraConfig(**SIZES | {"vocab_size": len(tokenizer)})).save_pretrained(tmp_path / "e")
    with pytest.raises(ValueError, match=r"ElectraForMaskedLM.*ElectraForPreTraining.*uptrain"):
        run("--model_name_or_path", tmp_path / "e", *STEPS)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": len(tokenizer)}
    BartConfig(**sizes, architectures=["BartForConditionalGeneration"]).save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match=r"\(bart\)"):
        run("--model_name_or_path", tmp_path / "b", *STEPS)
    RobertaConfig(**SIZES | {"vocab_size": len(tokenizer)}, is_decoder=True).save_pretrained(tmp_path / "r")
    with pytest.raises(ValueError, match=r"is a decoder \(is_decoder\)"):
        run("--model_name_or_path", tmp_path / "r", *STEPS)


def test_roberta_positions_start_after_the_padding_index(run, tokenizer, tmp_path):
    # Texts cannot use all 64 positions, because they start after the padding index.
    used = 63 - tokenizer.pad_token_id
    results, _ = run(*make_scratch_flags("roberta"), "--max_train_steps", 1, "--max_length", used)
    assert results["steps"] == 1
    with pytest.raises(ValueError, match=f"--max_length must be at most {used}, .* got {used + 1}"):
        run(*make_scratch_flags("roberta"), *STEPS, "--max_length", used + 1, out=tmp_path / "long")


def test_held_out_text_without_masks_raises_before_training(run, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingLoop, "_run_optimizer_step", None)
    (tmp_path / "short.txt").write_text("a\n")
    with pytest.raises(ValueError, match=r"short\.txt"):
        run(*STEPS, *make_scratch_flags(), "--validation_file", tmp_path / "short.txt", "--mlm_probability", 0.01)


def test_epochs_with_a_stream_raise_an_error(run):
    with pytest.raises(ValueError, match="--max_train_steps"):
        run(*make_scratch_flags())
