"""Check `attn-variants export --to onnx`: the outputs of the graphs, their names, and ONNX Runtime's tokens."""

import gzip
import importlib.util
import json
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import transformers
from architectures import ARCHITECTURES, BERT, T5
from fixtures.elsewhere import WITHOUT_PACKAGE, run_elsewhere
from fixtures.golden_sources import make_tokenizer
from fixtures.native_models import make_eurobert
from relatives import ENCODER_DECODERS, RELATIVES, ROTARY, WHISPER

import hf_attn_variants
from examples.onnx_decoding import greedy, load_graph, load_graphs
from hf_attn_variants import cli
from hf_attn_variants.export import onnx_decoder
from hf_attn_variants.export.onnx import ExampleSizes, build_model_graphs, export_onnx
from hf_attn_variants.export.onnx_int8 import Int8Export, compare_encoders, make_text_batches, read_comparison_texts

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared/data"
ROWS = {row.name: row for row in (*ARCHITECTURES, *RELATIVES)}
WRITERS = {
    row.name: next(head for head in row.heads if head.endswith(("ForConditionalGeneration", "MTModel")))
    for row in (T5, *ENCODER_DECODERS, WHISPER)
}
RANKS = {"kv_lora_rank": 16, "encoder_kv_lora_rank": 20, "cross_kv_lora_rank": 24}
# The fields of each variant. Whisper and BART have unequal head counts here, so they have no talking heads.
VARIANTS = {"gqa": {}, "latent": RANKS, "talking": {"encoder_attention_heads": 12}, "values": {}}
DECODER_FILES = ("encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged")
NAMES = ["input_ids", "attention_mask", "token_type_ids"]
DECODED = [(name, variant) for name in WRITERS for variant in VARIANTS]


def test_old_torch_raises_before_reading_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_attn_variants.export.onnx.MIN_TORCH_VERSION", "99.0")
    with pytest.raises(ValueError, match=r"torch 99\.0"):
        export_onnx(tmp_path / "nothing", tmp_path / "out")


def make_generating_model(name, variant="gqa", **fields):
    fields |= {field: value for field, value in VARIANTS[variant].items() if "heads" not in field or "t5" not in name}
    # A head that is tied to random embeddings and small weights would make the model repeat one token.
    fields |= {} if "t5" in name else {"tie_word_embeddings": False}
    model = ROWS[name].make_model(WRITERS[name], variant, **fields)
    model.get_output_embeddings().weight = torch.nn.Parameter(torch.randn_like(model.get_output_embeddings().weight))
    if "t5" not in name:
        model.get_decoder().embed_tokens.weight.data *= 20
    return model


@pytest.mark.parametrize("name, variant", DECODED)
@torch.no_grad()
def test_onnx_graphs_equal_the_model(name, variant):
    model = make_generating_model(name, variant)
    model.set_attn_implementation("eager")
    encoder, first, step = build_model_graphs(model)
    assert [graph.name for graph in (encoder, first, step)] == [
        "encoder_model",
        "decoder_model",
        "decoder_with_past_model",
    ]
    sizes = ExampleSizes(batch=3, source=7, target=4)
    inputs = encoder.make_inputs(sizes)
    states = encoder.module(inputs)["last_hidden_state"]
    tokens = torch.randint(5, 60, (3, 5))
    expected = model(**inputs, decoder_input_ids=tokens, use_cache=False).logits
    model_inputs = {"input_ids": tokens[:, :4], "encoder_hidden_states": states}
    mask = {} if name == "whisper" else {"encoder_attention_mask": inputs["attention_mask"]}
    assert (model_inputs | mask).keys() == first.axes.keys() == first.make_inputs(sizes).keys()
    first_outputs = first.module(model_inputs | mask)
    torch.testing.assert_close(first_outputs.pop("logits"), expected[:, :4], atol=2e-5, rtol=1e-5)
    cache = {key.replace("present", "past_key_values"): value for key, value in first_outputs.items()}
    model_inputs = {"input_ids": tokens[:, 4:]} | mask | cache
    assert model_inputs.keys() == step.axes.keys() == step.make_inputs(sizes).keys()
    # optimum passes the cache inputs by position, layer by layer.
    assert [key for key in step.axes if key in cache] == list(cache)
    if variant == "latent":
        assert cache["past_key_values.0.encoder.key"].shape[1::2] == (1, 24)
        names = [f"past_key_values.{name}.key" for name in ("0.decoder", "0.encoder", "1.decoder")]
        assert list(cache) == names
    else:
        kinds = [f"{part}.{kind}" for part in ("decoder", "encoder") for kind in ("key", "value")]
        assert list(cache) == [f"past_key_values.{layer}.{kind}" for layer in range(2) for kind in kinds]
        assert cache["past_key_values.1.encoder.value"].shape[1] == model.config.num_key_value_heads
    first_outputs = step.module(model_inputs)
    torch.testing.assert_close(first_outputs["logits"], expected[:, 4:], atol=2e-5, rtol=1e-5)
    assert first_outputs["present.0.decoder.key"].shape[2] == 5 and not any("encoder" in key for key in first_outputs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, variant, layers",
    [
        # An export takes seconds per graph and layer.
        ("t5", "gqa", 1),
        *(
            pytest.param(*case, 2, marks=pytest.mark.slow)
            for case in DECODED
            if case[1] == "gqa" or case[0] in ("t5", "marian")
        ),
    ],
)
def test_onnx_runtime_generates_the_tokens_of_generate(name, variant, layers, tmp_path, capsys):
    model = make_generating_model(name, variant, **({"num_layers": 1} if layers == 1 else {}))
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(tmp_path / "model")
    model = type(model).from_pretrained(tmp_path / "model").eval()  # recomputes sinusoidal positions
    assert cli.main(["export", str(tmp_path / "model"), "--to", "onnx", "--output_dir", str(tmp_path / "onnx")]) == 0
    printed = capsys.readouterr().out
    assert "onnx/decoder_with_past_model.onnx within" in printed and "opset 18" in printed
    config = json.loads((tmp_path / "onnx/config.json").read_text())
    assert config["model_type"] in ROWS[name].config_class.transformers_model_types and "auto_map" not in config
    assert not list((tmp_path / "onnx").glob("*.py")) and (tmp_path / "onnx/generation_config.json").is_file()
    inputs = build_model_graphs(model)[0].make_inputs(ExampleSizes(batch=5, source=11))
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False, num_beams=1)
    start = model.config.decoder_start_token_id
    source = {key: value.numpy() for key, value in inputs.items()}
    for merged in (False, True):
        result = greedy(load_graphs(tmp_path / "onnx", merged=merged), source, start, end=-1, pad=0, new_tokens=8)
        result = result[:, -expected.shape[1] :]  # `generate` of Whisper omits the start
        assert result.tolist() == expected.tolist()
    # Loading ties the heads of Marian and PEGASUS to the embeddings again, so these models repeat one token.
    assert name in ("marian", "pegasus") or len(set(result.flatten().tolist())) > 3


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads, opset", [(8, 18), (2, 18), (2, 23)])
def test_real_t5_gives_equal_translations_in_onnx_runtime(kv_heads, opset, tmp_path):
    checkpoint = SHARED / "checkpoints/t5-mini-multi30k-en-de"
    if not checkpoint.is_dir():
        pytest.skip("needs the shared checkpoint")
    texts = [SHARED / f"multi30k/train.{side}.gz" for side in ("en", "de")]
    lines = [gzip.open(path, "rt", encoding="utf-8").read().splitlines()[:300] for path in texts]
    hf_attn_variants.convert(
        checkpoint, kv_heads, calibration=list(zip(*lines, strict=True)), output_dir=tmp_path / "gqa"
    )
    export_onnx(tmp_path / "gqa", tmp_path / "onnx", opset=opset)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "onnx")
    with gzip.open(SHARED / "multi30k/test_2016_flickr.en.gz", "rt", encoding="utf-8") as file:
        batch = tokenizer([next(file).strip() for _ in range(50)], padding=True, return_tensors="pt")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "gqa").eval()
    expected = model.generate(**batch, max_new_tokens=60, do_sample=False, num_beams=1)
    source = {name: batch[name].numpy() for name in ("input_ids", "attention_mask")}
    result = greedy(load_graphs(tmp_path / "onnx"), source, start=0, end=1, pad=0, new_tokens=60)
    assert result.tolist() == expected.tolist()


ENCODER_CASES = [
    ("BertForQuestionAnswering", "gqa", 18, ["input_ids", "attention_mask", "token_type_ids"]),
    ("BertForMultipleChoice", "talking", 18, ["input_ids", "attention_mask", "token_type_ids"]),
    ("RobertaForMaskedLM", "latent", 23, ["input_ids", "attention_mask", "token_type_ids"]),
    ("DistilBertModel", "mqa", 20, ["input_ids", "attention_mask"]),
    ("ElectraForSequenceClassification", "gqa", 18, ["input_ids", "attention_mask", "token_type_ids"]),
    ("ModernBertForMaskedLM", "gqa", 18, ["input_ids", "attention_mask"]),
    ("ModernBertModel", "talking", 18, ["input_ids", "attention_mask"]),
    ("NomicBertForMaskedLM", "gqa", 18, ["input_ids", "attention_mask", "token_type_ids"]),
    ("AlbertModel", "gqa", 18, ["input_ids", "attention_mask", "token_type_ids"]),
    ("T5ForTokenClassification", "gqa", 18, ["input_ids", "attention_mask"]),
    ("WhisperForAudioClassification", "gqa", 18, ["input_features"]),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "head, variant, opset, names",
    [
        pytest.param(*case, marks=[] if case[0] == "BertForQuestionAnswering" else pytest.mark.slow)
        for case in ENCODER_CASES
    ],
)
@torch.no_grad()
def test_encoder_is_exported_as_one_graph(head, variant, opset, names, tmp_path):
    row = next(row for row in ROWS.values() if head in row.heads)
    model = row.make_model(head, variant)
    model.save_pretrained(tmp_path / "model")
    written = export_onnx(tmp_path / "model", tmp_path / "onnx", opset=opset)
    error, inputs = written.graphs["onnx/model.onnx"]
    assert error < 1e-4 and inputs == names and written.architecture == head
    operators = Counter(node.op_type for node in onnx.load(tmp_path / "onnx/onnx/model.onnx").graph.node)
    assert operators["Attention"] == (row.tiny["num_hidden_layers"] if opset == 23 else 0)
    graph = load_graph(tmp_path / "onnx/onnx/model.onnx")
    batch = {name: value for name, value in row.make_batch(head).items() if name in names}
    expected = model(**batch)
    # All inputs of a graph are required. Missing token types are 0.
    inputs = {name: batch.get(name, torch.zeros_like(next(iter(batch.values())))).numpy() for name in names}
    for output in graph.get_outputs():
        [result] = graph.run([output.name], inputs)
        # In a local layer of ModernBERT, padding may attend to no token, and its outputs have no meaning.
        real = batch["attention_mask"].bool() if row in ROTARY else ...
        torch.testing.assert_close(torch.from_numpy(result)[real], expected[output.name][real], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "row, head, fields, message",
    [
        (BERT, "BertLMHeadModel", {}, "BertLMHeadModel"),
        (ROWS["bart"], "BartForCausalLM", {}, "BartForCausalLM"),
        (T5, "T5ForSequenceClassification", {}, "T5ForSequenceClassification"),
        (T5, "T5ForConditionalGeneration", {"variant": "dynamic"}, "`talking_heads_dynamic`"),
        (ROWS["bart"], "BartForConditionalGeneration", {"attention_kernel": "elu"}, "`attention_kernel`"),
    ],
)
def test_unsupported_onnx_exports_name_the_reason(row, head, fields, message, tmp_path):
    row.make_model(head, **fields).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        export_onnx(tmp_path / "model", tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_invalid_onnx_options_and_missing_packages_raise_before_any_work(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="`opset`"):
        export_onnx(tmp_path, tmp_path / "onnx", opset=17)
    for options, name in (
        ({"quantization": "float16"}, "quantization"),
        ({"calibration_file": "texts.txt"}, "quantization"),
        ({"validation_file": "texts.txt"}, "quantization"),
        ({"pooling": "max"}, "pooling"),
        ({"normalize": True}, "pooling"),
    ):
        with pytest.raises(ValueError, match=f"`{name}`"):
            export_onnx(tmp_path, tmp_path / "onnx", **options)
    command = ["export", "x", "--to", "onnx", "--output_dir", "out"]
    for options, message in (
        (["--dtype", "float32"], "--dtype is only supported with --to transformers"),
        (["--to", "transformers", "--opset", "18"], "--opset is only supported with --to onnx"),
        (["--to", "transformers", "--pooling", "mean"], "--pooling is only supported with --to onnx"),
    ):
        with pytest.raises(SystemExit):
            cli.main([*command, *options])
        assert message in capsys.readouterr().err
    result = importlib.util.find_spec
    missing = ("onnxscript", "onnxruntime")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name in missing else result(name, *rest)
    )
    assert cli.main(command) == 2
    assert "`pip install onnxscript onnxruntime`" in capsys.readouterr().err


@pytest.mark.thorough
def test_graph_with_other_outputs_raises_an_error(tmp_path):
    """Check a file with the graph of another model."""
    from hf_attn_variants.export.onnx import _compute_largest_difference, _write_graph

    model, other = (BERT.make_model("BertModel", "mqa", seed=seed, num_hidden_layers=1) for seed in (0, 1))
    [graph], [wrong] = build_model_graphs(model), build_model_graphs(other)
    _write_graph(graph, 18, tmp_path / "model.onnx")
    with torch.no_grad():
        assert _compute_largest_difference(graph, tmp_path / "model.onnx") < 1e-4
        with pytest.raises(ValueError, match="last_hidden_state"):
            _compute_largest_difference(wrong, tmp_path / "model.onnx")


@pytest.fixture(scope="module")
def sentence_encoder(tmp_path_factory):
    """A BERT with an int8 graph that also returns embeddings."""
    folder = tmp_path_factory.mktemp("sentence_encoder")
    texts = "the first text\na second text\n"
    BERT.make_model("BertModel", "gqa").save_pretrained(folder / "model")
    make_tokenizer("bert", texts, folder / "model")
    (folder / "texts.txt").write_text(4 * texts)
    arguments = ["export", str(folder / "model"), "--to", "onnx", "--output_dir", str(folder / "out")]
    arguments += ["--pooling", "mean", "--normalize", "--quantization", "int8"]
    assert cli.main([*arguments, "--validation_file", str(folder / "texts.txt")]) == 0
    return folder


@torch.no_grad()
def test_graph_with_pooling_returns_normalized_mean_embeddings(sentence_encoder):
    model = transformers.AutoModel.from_pretrained(sentence_encoder / "model").eval()
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    means = torch.stack([states[0].mean(0), states[1, :2].mean(0)])
    graph = load_graph(sentence_encoder / "out/onnx/model.onnx")
    inputs = {"input_ids": ids.numpy(), "attention_mask": mask.numpy(), "token_type_ids": np.zeros_like(ids.numpy())}
    embeddings, result = graph.run(["sentence_embedding", "last_hidden_state"], inputs)
    expected = torch.nn.functional.normalize(means, dim=-1)
    torch.testing.assert_close(torch.from_numpy(embeddings), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.from_numpy(result), states, atol=1e-4, rtol=0)


def test_int8_graph_is_smaller_and_close_to_the_float32_graph(sentence_encoder):
    float32, int8 = (sentence_encoder / f"out/onnx/{name}.onnx" for name in ("model", "model_quantized"))
    assert str(ROOT).encode() not in float32.read_bytes()  # stack traces would contain local paths
    operators = Counter(node.op_type for node in onnx.load(int8).graph.node)
    assert operators["MatMulInteger"] >= 12 and int8.stat().st_size < float32.stat().st_size
    ids = np.arange(5, 29).reshape(3, 8)
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    embeddings, int8_embeddings = (load_graph(path).run(["sentence_embedding"], inputs)[0] for path in (float32, int8))
    assert 0.99 < (embeddings * int8_embeddings).sum(-1).mean() < 0.999999


def test_int8_summary_names_runtime_and_agreement(sentence_encoder):
    encoder = sentence_encoder / "out/onnx/model.onnx"
    batches = make_text_batches(
        ["the first text", "a second text"], sentence_encoder / "out", BERT.make_config(), NAMES
    )
    assert [batch["input_ids"].shape[0] for batch in batches] == [2] and list(batches[0]) == NAMES
    assert compare_encoders(encoder, encoder, batches, 1) == ("cosine similarity", pytest.approx(1.0, abs=1e-6))
    export = Int8Export(["onnx/model_quantized.onnx"], "ONNX Runtime", "equal tokens", 0.98, "8 texts")
    assert export.summary() == [
        "int8 graphs for ONNX Runtime: onnx/model_quantized.onnx",
        "  equal tokens with the float32 graphs on 8 texts: 98.0%",
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("head", ["BertForSequenceClassification", "WhisperForAudioClassification"])
def test_classifiers_are_quantized(head, tmp_path):
    row = next(row for row in ROWS.values() if head in row.heads)
    row.make_model(head).save_pretrained(tmp_path / "model")
    int8 = export_onnx(tmp_path / "model", tmp_path / "out", quantization="int8").int8
    assert (int8.files, int8.measure, int8.inputs) == (
        ["onnx/model_quantized.onnx"],
        "equal predictions",
        "random inputs",
    )
    assert int8.agreement >= 0.9


# This code cannot import the package. It compares the int8 graph with the float32 graph.
GRAPHS_ELSEWHERE = WITHOUT_PACKAGE + textwrap.dedent(
    """
    import json, sys
    import numpy, onnxruntime, transformers

    folder, given = sys.argv[1], dict(numpy.load(sys.argv[2]))
    graphs = (onnxruntime.InferenceSession(f"{folder}/onnx/{name}.onnx") for name in ("model", "model_quantized"))
    float32, int8 = (graph.run(["logits"], given)[0][given["attention_mask"] == 1] for graph in graphs)
    cosine = (int8 * float32).sum() / numpy.linalg.norm(int8) / numpy.linalg.norm(float32)
    print(json.dumps([type(transformers.AutoConfig.from_pretrained(folder)).__name__, float(cosine)]))
    """
)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["eurobert", "modernbert", "nomic_bert"])
@torch.no_grad()
def test_converted_encoder_with_rotary_positions_is_quantized(name, tmp_path):
    head = next((head for head in ROWS[name].heads if head.endswith("MaskedLM")), "") if name in ROWS else ""
    plain = ROWS[name].make_upstream_model(head, initializer_range=0.2) if head else make_eurobert(60)
    model = hf_attn_variants.convert(plain, 2, method="mean").eval()
    model.save_pretrained(tmp_path / "model")
    arguments = ["export", tmp_path / "model", "--to", "onnx", "--quantization", "int8"]
    assert cli.main([*map(str, arguments), "--output_dir", str(tmp_path / "out")]) == 0
    graph = load_graph(tmp_path / "out/onnx/model.onnx")
    batch, names = BERT.make_batch("BertModel"), [item.name for item in graph.get_inputs()]
    given = {name: batch.get(name, torch.zeros_like(batch["input_ids"])).numpy() for name in names}
    real = batch["attention_mask"].bool()
    expected = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[real]
    result = torch.from_numpy(graph.run(["logits"], given)[0])[real]
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
    np.savez(tmp_path / "inputs.npz", **given)
    printed = run_elsewhere("-c", GRAPHS_ELSEWHERE, tmp_path / "out", tmp_path / "inputs.npz", cwd=tmp_path)
    config, cosine = json.loads(printed.splitlines()[-1])
    assert config == type(plain.config).__name__ and 0.98 < cosine < 0.999999


def test_int8_decoders_keep_embeddings_and_sensitive_layers_in_float32(tmp_path):
    make_generating_model("t5", "gqa", num_layers=1).save_pretrained(tmp_path / "model")
    written = export_onnx(tmp_path / "model", tmp_path / "out", quantization="int8")
    files = [f"onnx/{name}_quantized.onnx" for name in DECODER_FILES]
    assert written.int8.files == files and written.int8.measure == "equal tokens" and written.int8.agreement > 0.5
    float32, int8 = (
        onnx.load(tmp_path / f"out/onnx/decoder_model{suffix}.onnx").graph.node for suffix in ("", "_quantized")
    )
    sensitive = {node.name for node in float32 if any(".wo'" in item.value for item in node.metadata_props)}
    assert sensitive and sensitive <= {node.name for node in int8 if node.op_type == "MatMul"}
    assert sum(node.op_type == "MatMulInteger" for node in int8) > 8
    assert not any(node.op_type == "Gather" and "quantized" in node.input[0] for node in int8)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["bert", "t5"])
def test_large_graphs_have_data_files_for_transformers_js(kind, tmp_path, monkeypatch):
    """Check the names, because ONNX Runtime itself would also load files with other names."""
    monkeypatch.setattr(onnx_decoder, "MAX_GRAPH_BYTES", 1)
    model = BERT.make_model("BertModel", "gqa") if kind == "bert" else make_generating_model("t5", "gqa", num_layers=1)
    model.save_pretrained(tmp_path / "model")
    export = export_onnx(tmp_path / "model", tmp_path / "out", quantization="int8")
    graphs = {path.name for path in (tmp_path / "out/onnx").glob("*.onnx")}
    assert len(graphs) == (2 if kind == "bert" else 8) and export.int8.agreement > 0.5
    files = {path.name for path in (tmp_path / "out/onnx").iterdir()}
    assert files == graphs | {f"{name}_data" for name in graphs}
    for name in graphs:
        locations = {
            item.value
            for tensor in onnx.load(tmp_path / "out/onnx" / name, load_external_data=False).graph.initializer
            for item in tensor.external_data
            if item.key == "location"
        }
        assert locations == {f"{name}_data"}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["transformers.js_config"] == {"use_external_data_format": dict.fromkeys(sorted(graphs), True)}


@pytest.mark.thorough
def test_static_int8_graph_runs_in_openvino(sentence_encoder):
    pytest.importorskip("nncf")
    pytest.importorskip("openvino")
    out = sentence_encoder / "static"
    written = export_onnx(
        sentence_encoder / "model", out, quantization="int8", calibration_file=sentence_encoder / "texts.txt"
    )
    assert written.int8.files == ["onnx/model_openvino_int8.onnx"] and written.int8.runtime == "OpenVINO"
    assert written.int8.measure == "cosine similarity" and written.int8.agreement > 0.95
    operators = Counter(node.op_type for node in onnx.load(out / written.int8.files[0]).graph.node)
    assert operators["QuantizeLinear"] > 10


def test_calibration_file_without_nncf_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("nncf", "openvino") else name)
    with pytest.raises(ValueError, match="pip install nncf openvino"):
        export_onnx("model", tmp_path / "out", quantization="int8", calibration_file="texts.txt")


def test_calibration_texts_are_split_and_limited(tmp_path):
    (tmp_path / "texts.txt").write_text("".join(f"text {number}\n" for number in range(500)))
    texts = read_comparison_texts(tmp_path / "texts.txt", None)
    assert texts.calibration == [f"text {number}" for number in range(300)]
    assert texts.validation == [f"text {number}" for number in range(450, 500)]
    (tmp_path / "other.txt").write_text("one text\n")
    assert read_comparison_texts(tmp_path / "texts.txt", tmp_path / "other.txt").validation == ["one text"]
    assert read_comparison_texts(None, None) == ([], [])
    with pytest.raises(ValueError, match=r"other\.txt"):
        read_comparison_texts(tmp_path / "other.txt", None)
    with pytest.raises(ValueError, match=r"table\.csv"):
        read_comparison_texts(tmp_path / "table.csv", None)


@pytest.mark.parametrize(
    "row, head, options",
    [
        (BERT, "BertForMaskedLM", {"pooling": "mean"}),
        (T5, "T5ForConditionalGeneration", {"pooling": "cls"}),
        (BERT, "BertForMultipleChoice", {"quantization": "int8", "validation_file": "texts.txt"}),
        (ROWS["whisper"], "WhisperForAudioClassification", {"quantization": "int8", "validation_file": "texts.txt"}),
    ],
)
def test_options_for_other_models_raise(row, head, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("a text\n")
    row.make_model(head).save_pretrained("model")
    with pytest.raises(ValueError, match=f"`{list(options)[-1]}`.*{head}"):
        export_onnx("model", "out", **options)
    assert not Path("out").exists()
