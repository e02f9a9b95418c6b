"""Merges the two ONNX decoder graphs of an encoder-decoder model into one graph, as expected by transformers.js.

    use_cache_branch ──► If ──┬─ false: the first call, which fills the caches
                              └─ true:  a decoding step, which reads the caches and one token

Both branches share the weights, so that the merged file is about as large as one of the two files.
"""

import hashlib
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

BRANCH_INPUT = "use_cache_branch"
# Larger graphs store their weights in a second file, because a protobuf message must be smaller than 2 GB.
MAX_GRAPH_BYTES = 1_500_000_000
# The weights of both branches by a digest of their type, shape and content.
Weights = dict[bytes, TensorProto]


def merge_decoders(first_path: Path, step_path: Path, merged_path: Path) -> None:
    """Merge the graphs of a decoder's first call and of a decoding step, with the new input `use_cache_branch`.

    The merged graph has the inputs and outputs of both graphs. In the first call, the cache inputs are ignored and
    may have any shape. A decoding step returns the cross-attention cache unchanged.

    Args:
        first_path: The file with the graph of the first call, `decoder_model.onnx`.
        step_path: The file with the graph of a decoding step, `decoder_with_past_model.onnx`.
        merged_path: The file to write.
    """
    first, step = onnx.load(first_path), onnx.load(step_path)
    weights: Weights = {}
    outputs = list(first.graph.output)
    branches = {
        "else_branch": _make_branch(first.graph, "first", outputs, weights),
        "then_branch": _make_branch(step.graph, "step", outputs, weights),
    }
    inputs = {value.name: value for graph in (step.graph, first.graph) for value in graph.input}
    cache_names = [name for name in inputs if name.startswith("past_key_values")]
    inputs |= {name: _make_dynamic_value_info(inputs[name], name) for name in cache_names}
    flag = helper.make_tensor_value_info(BRANCH_INPUT, TensorProto.BOOL, [1])
    graph = helper.make_graph(
        [helper.make_node("If", [BRANCH_INPUT], [output.name for output in outputs], **branches)],
        "decoder",
        [*inputs.values(), flag],
        [_make_dynamic_value_info(output, output.name) for output in outputs],
        initializer=list(weights.values()),
    )
    opsets = {opset.domain: opset for model in (first, step) for opset in model.opset_import}
    merged = helper.make_model(graph, opset_imports=list(opsets.values()), ir_version=first.ir_version)
    save_graph(merged, merged_path)


def save_graph(model: ModelProto, path: Path) -> None:
    """Save a graph, with the weights in a second file if it is large."""
    size = sum(len(weight.raw_data) for weight in model.graph.initializer)
    onnx.save_model(model, path, save_as_external_data=size > MAX_GRAPH_BYTES, location=get_data_path(path).name)


def get_data_path(path: Path) -> Path:
    """Return the file with the weights of a large graph. transformers.js and Optimum require this name."""
    return path.with_name(f"{path.name}_data")


def _make_branch(graph: GraphProto, prefix: str, outputs: list[ValueInfoProto], weights: Weights) -> GraphProto:
    """Return a graph as a branch of an `If` operator, and move its weights to `weights`.

    Args:
        graph: The graph.
        prefix: A prefix for the names of intermediate values, which must be unique in the file.
        outputs: The outputs of the operator. A decoding step does not compute the cross-attention caches, so the
            corresponding inputs are returned instead.
        weights: The weights of the file.
    """
    names = {value.name: value.name for value in graph.input}
    for tensor in graph.initializer:
        name, tensor.name = tensor.name, ""
        digest = hashlib.sha256(tensor.SerializeToString()).digest()
        weight = weights.setdefault(digest, tensor)
        weight.name = weight.name or f"weight_{len(weights)}"
        names[name] = weight.name
    nodes = [_rename_values(node, prefix, names) for node in graph.node]
    for output in outputs:
        if output.name not in {value.name for value in graph.output}:
            cache = output.name.replace("present", "past_key_values")
            nodes.append(helper.make_node("Identity", [cache], [f"{prefix}/{output.name}"]))
    return helper.make_graph(
        nodes, prefix, [], [_make_dynamic_value_info(output, f"{prefix}/{output.name}") for output in outputs]
    )


def _make_dynamic_value_info(value: ValueInfoProto, name: str) -> ValueInfoProto:
    """Return a copy of a value description with the given name and variable sizes for all dimensions."""
    tensor = value.type.tensor_type
    sizes = [f"{value.name}_{number}" for number in range(len(tensor.shape.dim))]
    return helper.make_tensor_value_info(name, tensor.elem_type, sizes)


def _rename_values(node: NodeProto, prefix: str, names: dict[str, str]) -> NodeProto:
    """Return an operator with renamed inputs and outputs.

    Inputs that are in `names` are renamed as specified there. For all other inputs and outputs, the prefix is added.
    """
    renamed = NodeProto()
    renamed.CopyFrom(node)
    renamed.name = f"{prefix}/{node.name}"
    # Optional inputs and outputs that are not used have empty names.
    renamed.input[:] = [name and names.get(name, f"{prefix}/{name}") for name in node.input]
    renamed.output[:] = [name and f"{prefix}/{name}" for name in node.output]
    return renamed
