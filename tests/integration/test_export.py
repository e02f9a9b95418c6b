"""torch.export and ONNX: an exported model gives, at other sizes than it was exported with, what the model gives.

Exporting takes the paths that are made of torch's own operators: none of this package's may stand in a graph.
"""

from collections import Counter

import onnxruntime
import pytest
import torch
from architectures import ALBERT, BERT, T5, token_ids
from torch.export import Dim

BASES = {"bert": "BertModel", "albert": "AlbertModel", "t5": "T5EncoderModel"}
CASES = [
    *((BERT, variant) for variant in ("mha", "gqa", "mqa", "talking")),
    *((architecture, variant) for architecture in (ALBERT, T5) for variant in ("gqa", "talking")),
]
EVERY_CASE = pytest.mark.parametrize(
    "architecture, variant", CASES, ids=[f"{architecture.name}-{variant}" for architecture, variant in CASES]
)
SLOW = [pytest.mark.slow]
# Batch and length that a graph is exported with, and others that it must serve.
EXPORTED, OTHERS = (2, 7), [(1, 5), (9, 12)]

# Each ONNX export takes ten seconds: by default, a grouped and an expanded one, talking heads, and T5's bias.
QUICK = [("bert", "mqa", 18), ("bert", "gqa", 23), ("bert", "talking", 23), ("t5", "gqa", 23)]
ONNX_CASES = [
    pytest.param(architecture, variant, opset, marks=[] if (architecture.name, variant, opset) in QUICK else SLOW)
    for architecture, variant, opset in [*((*case, opset) for case in CASES for opset in (18, 23)), (BERT, "gqa", 20)]
]
ONNX_IDS = [f"{case.values[0].name}-{case.values[1]}-opset{case.values[2]}" for case in ONNX_CASES]


def sentences(batch, length):
    torch.manual_seed(batch)
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - 2 :] = 0
    return {"input_ids": token_ids(batch, length), "attention_mask": mask}


def any_size():
    sizes = {0: Dim("batch"), 1: Dim("length", min=2, max=32)}
    return {"input_ids": sizes, "attention_mask": sizes}


@EVERY_CASE
@torch.no_grad()
def test_torch_export_with_any_batch_and_length(architecture, variant):
    model = architecture.model(BASES[architecture.name], variant)
    program = torch.export.export(model, (), kwargs=sentences(*EXPORTED), dynamic_shapes=any_size())
    namespaces = {node.target.namespace for node in program.graph.nodes if hasattr(node.target, "namespace")}
    assert namespaces == {"aten"}
    for size in OTHERS:
        inputs = sentences(*size)
        found = program.module()(**inputs).last_hidden_state
        torch.testing.assert_close(found, model(**inputs).last_hidden_state, atol=1e-5, rtol=0)


def onnx_session(program):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    serialized = program.model_proto.SerializeToString()
    return onnxruntime.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("architecture, variant, opset", ONNX_CASES, ids=ONNX_IDS)
@torch.no_grad()
def test_onnx_with_any_batch_and_length(architecture, variant, opset):
    model = architecture.model(BASES[architecture.name], variant)
    inputs = sentences(*EXPORTED)
    options = {"opset_version": opset, "dynamo": True, "verbose": False}
    program = torch.onnx.export(model, (), kwargs=inputs, dynamic_shapes=any_size(), **options)
    operators = Counter(node.op_type for node in program.model.graph)
    # Opset 23 has an operator for grouped attention: one a layer, and nothing is repeated. Talking heads need two
    # matrix products more between the softmax and its neighbours.
    assert operators["Attention"] == (2 if opset == 23 and variant != "talking" else 0)
    session = onnx_session(program)
    for size in OTHERS:
        inputs = sentences(*size)
        found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0]
        expected = model(**inputs).last_hidden_state
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=0)
