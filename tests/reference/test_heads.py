"""Compare the papers' formulas with independent computations: torch's attention, explicit loops, and each other."""

import ast
import importlib
import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from hf_attn_variants.reference import heads, talking_heads

B, N, M_LEN, D, K_DIM, V_DIM, H = 2, 3, 5, 12, 4, 3, 4
SCALE = 1 / math.sqrt(K_DIM)
DYNAMIC = ("x2l", "m2l", "x2w", "m2w")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def draw_normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def close(actual, expected, tolerance=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def make_inputs():
    return draw_normal(B, N, D), draw_normal(B, M_LEN, D)


def make_weights(h_k=H, kv=H, h_v=H, d=D):
    """P_q, P_k, P_v and P_o of a size for which the softmax is neither uniform nor one-hot."""
    return (
        draw_normal(h_k, d, K_DIM) / 2,
        draw_normal(kv, d, K_DIM) / 2,
        draw_normal(min(kv, h_v), d, V_DIM),
        draw_normal(h_v, d, V_DIM),
    )


def make_causal_mask(n):
    return torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)


def compute_with_sdpa(X, M, P_q, P_k, P_v, P_o, mask=None, scale=SCALE):
    """Return multi-head attention by torch's kernel with flat 2-d projections."""
    h, d, k = P_q.shape
    v = P_v.shape[2]

    def heads(T, P, size):
        flat = P.permute(1, 0, 2).reshape(d, -1)  # [d, h * size]
        return (T @ flat).view(T.shape[0], T.shape[1], h, size).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        heads(X, P_q, k), heads(M, P_k, k), heads(M, P_v, v), attn_mask=mask, scale=scale
    )
    return out.transpose(1, 2).flatten(2) @ P_o.permute(0, 2, 1).reshape(h * v, d)


@pytest.mark.parametrize("name", ["heads", "linear", "patterns", "scores", "talking_heads"])
def test_formulas_import_only_torch(name):
    module = importlib.import_module(f"hf_attn_variants.reference.{name}")
    nodes = [*ast.walk(ast.parse(inspect.getsource(module)))]
    siblings = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 1}
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level != 1}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert siblings <= {"heads", "talking_heads"}
    assert imported <= {"collections.abc", "functools", "math", "torch", "typing"}


def test_masked_softmax_equals_torch_where_torch_is_defined():
    logits = draw_normal(3, 4, 7) * 30
    logits[..., 2] = -torch.inf
    close(heads.masked_softmax(logits), torch.softmax(logits, -1))


def test_masked_softmax_handles_fully_masked_rows():
    logits = draw_normal(4, 5).requires_grad_()
    infinite = heads.masked_softmax(logits + torch.full((4, 1), -torch.inf))
    assert torch.equal(infinite, torch.zeros_like(infinite))
    infinite.sum().backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    close(heads.masked_softmax(logits + torch.finfo(torch.float64).min), torch.full((4, 5), 0.2, dtype=torch.float64))


def test_dot_product_attention_equals_a_hand_computation():
    q, K, V = draw_normal(K_DIM), draw_normal(M_LEN, K_DIM), draw_normal(M_LEN, V_DIM)
    scores = [math.exp(SCALE * sum(q[c] * K[row, c] for c in range(K_DIM))) for row in range(M_LEN)]
    expected = sum(score / sum(scores) * V[row] for row, score in enumerate(scores))
    close(heads.dot_product_attention(q, K, V, scale=SCALE), expected)


def test_multihead_equals_torch():
    X, M = make_inputs()
    P = make_weights()
    mask = draw_normal(B, H, N, M_LEN)
    close(heads.multihead_attention(X, M, *P, mask=mask, scale=SCALE), compute_with_sdpa(X, M, *P, mask=mask))


def test_multihead_equals_nn_multihead_attention():
    X, M = make_inputs()
    layer = torch.nn.MultiheadAttention(D, H, bias=False, batch_first=True, dtype=torch.float64)
    size = D // H
    P_q, P_k, P_v = (W.view(H, size, D).transpose(1, 2) for W in layer.in_proj_weight.chunk(3))
    P_o = layer.out_proj.weight.view(D, H, size).transpose(0, 1)
    close(heads.multihead_attention(X, M, P_q, P_k, P_v, P_o, scale=size**-0.5), layer(X, M, M)[0])


@pytest.mark.parametrize("G", [1, 2, 4])
def test_grouped_query_equals_multihead_with_repeated_heads(G):
    X, M = make_inputs()
    P_q, P_k, P_v, P_o = make_weights(kv=G)
    mask = draw_normal(B, H, N, M_LEN)
    expected = compute_with_sdpa(
        X, M, P_q, heads.repeat_kv_heads(P_k, H), heads.repeat_kv_heads(P_v, H), P_o, mask=mask
    )
    close(heads.grouped_query_attention(X, M, P_q, P_k, P_v, P_o, mask=mask, scale=SCALE), expected)
    if G == 1:
        close(heads.multiquery_attention(X, M, P_q, P_k[0], P_v[0], P_o, mask=mask, scale=SCALE), expected)


def test_consecutive_query_heads_share_a_head():
    """Check g = 2: query heads 0 and 1 use head 0, 2 and 3 use head 1; other orders give other results."""
    X, M = make_inputs()
    P_q, P_k, P_v, P_o = make_weights(kv=2)
    Y = heads.grouped_query_attention(X, M, P_q, P_k, P_v, P_o)
    in_order, interleaved = [0, 0, 1, 1], [0, 1, 0, 1]
    close(heads.multihead_attention(X, M, P_q, P_k[in_order], P_v[in_order], P_o), Y)
    assert (heads.multihead_attention(X, M, P_q, P_k[interleaved], P_v[interleaved], P_o) - Y).abs().max() > 0.1


@pytest.mark.parametrize(
    ("batched", "incremental", "kv", "cache"),
    [
        (heads.multihead_attention, heads.multihead_attention_incremental, H, (B, H)),
        (heads.grouped_query_attention, heads.grouped_query_attention_incremental, 2, (B, 2)),
        (heads.multiquery_attention, heads.multiquery_attention_incremental, 1, (B,)),
    ],
)
def test_incremental_equals_batched_with_a_causal_mask(batched, incremental, kv, cache):
    X = draw_normal(B, 6, D)
    P_q, P_k, P_v, P_o = make_weights(kv=kv)
    if batched is heads.multiquery_attention:
        P_k, P_v = P_k[0], P_v[0]
    Y = batched(X, X, P_q, P_k, P_v, P_o, mask=make_causal_mask(6), scale=SCALE)
    K, V = draw_normal(*cache, 0, K_DIM), draw_normal(*cache, 0, V_DIM)
    for step in range(6):
        y, new_K, new_V = incremental(X[:, step], K, V, P_q, P_k, P_v, P_o, scale=SCALE)
        close(y, Y[:, step])
        assert new_K.shape == (*cache, step + 1, K_DIM) and new_V.shape == (*cache, step + 1, V_DIM)
        assert torch.equal(new_K[..., :step, :], K) and torch.equal(new_V[..., :step, :], V)
        K, V = new_K, new_V


def make_talking_heads_weights(h_k=2, h=4, h_v=3):
    queries_and_keys = (draw_normal(h_k, D, K_DIM) / 2 for _ in range(2))
    values_and_outputs = (draw_normal(h_v, D, V_DIM) for _ in range(2))
    return (*queries_and_keys, *values_and_outputs), draw_normal(h_k, h), draw_normal(h, h_v)


def make_dynamic_weights(h_k=2, h=4, h_v=3, names=DYNAMIC):
    shapes = {"x2l": (D, h_k, h), "m2l": (D, h_k, h), "x2w": (D, h, h_v), "m2w": (D, h, h_v)}
    return {f"P_{name}": draw_normal(*shapes[name]) / D for name in names}


def mix_at(P, kind, x, memory, dynamic):
    """Return P_l ("l") or P_w ("w") at one query position and one key position."""
    terms = [(x, f"P_x2{kind}"), (memory, f"P_m2{kind}")]
    return P + sum(torch.tensordot(state, dynamic[name], 1) for state, name in terms if name in dynamic)


def compute_with_loops(X, M, P, P_l, P_w, term=None, dynamic=None, scale=SCALE):
    """Return Y, computed with Python loops over every position and head."""
    P_q, P_k, P_v, P_o = P
    Y = torch.zeros_like(X)
    for b in range(X.shape[0]):
        for n, x in enumerate(X[b]):
            scores = torch.stack([scale * (M[b] @ P_k[i]) @ (x @ P_q[i]) for i in range(len(P_q))])  # [h_k, m]
            W = torch.empty(P_l.shape[1], M.shape[1], dtype=X.dtype)
            for m, memory in enumerate(M[b]):
                W[:, m] = mix_at(P_l, "l", x, memory, dynamic or {}).T @ scores[:, m]
            if term is not None:
                W = W + term[b, :, n]
            W = torch.softmax(W, -1)
            for m, memory in enumerate(M[b]):
                for j, amount in enumerate(mix_at(P_w, "w", x, memory, dynamic or {}).T @ W[:, m]):
                    Y[b, n] += amount * P_o[j] @ (memory @ P_v[j])
    return Y


def test_talking_heads_with_identity_projections_equals_multihead():
    X, M = make_inputs()
    P, eye, mask = make_weights(), torch.eye(H, dtype=torch.float64), draw_normal(B, H, N, M_LEN)
    expected = compute_with_sdpa(X, M, *P, mask=mask)
    for projections in ({}, {"P_l": eye}, {"P_w": eye}, {"P_l": eye, "P_w": eye}):
        close(talking_heads.talking_heads_attention(X, M, *P, **projections, mask=mask, scale=SCALE), expected)


def test_talking_heads_equals_loops_with_bias_and_mask_after_the_logits_projection():
    X, M = make_inputs()
    P, P_l, P_w = make_talking_heads_weights()
    bias, mask = draw_normal(1, 4, N, M_LEN), torch.zeros(B, 1, 1, M_LEN, dtype=torch.float64)
    mask[0, ..., -1] = -torch.inf  # if added before the projection, this would become NaN or change its sign
    Y = talking_heads.talking_heads_attention(X, M, *P, P_l=P_l, P_w=P_w, bias=bias, mask=mask, scale=SCALE)
    close(Y, compute_with_loops(X, M, P, P_l, P_w, term=bias + mask))


@pytest.mark.parametrize("which", ["logits", "weights"])
def test_omitted_projection_equals_the_identity(which):
    X, M = make_inputs()
    eye = torch.eye(4, dtype=torch.float64)
    if which == "logits":  # 2 query and key heads, 4 softmax and value heads
        P, P_l, _ = make_talking_heads_weights(h_k=2, h=4, h_v=4)
        alone, both = {"P_l": P_l}, {"P_l": P_l, "P_w": eye}
    else:  # 4 query, key and softmax heads, 3 value heads
        P, _, P_w = make_talking_heads_weights(h_k=4, h=4, h_v=3)
        alone, both = {"P_w": P_w}, {"P_l": eye, "P_w": P_w}
    Y = talking_heads.talking_heads_attention(X, M, *P, **alone, scale=SCALE)
    close(Y, talking_heads.talking_heads_attention(X, M, *P, **both, scale=SCALE))
    close(Y, compute_with_loops(X, M, P, both["P_l"], both["P_w"]))


@pytest.mark.parametrize("names", [*((name,) for name in DYNAMIC), DYNAMIC])
def test_dynamic_projections_equal_a_hand_computation(names):
    X, M = make_inputs()
    P, P_l, P_w = make_talking_heads_weights()
    static = talking_heads.talking_heads_attention(X, M, *P, P_l=P_l, P_w=P_w, scale=SCALE)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in make_dynamic_weights(names=names).items()}
    close(talking_heads.talking_heads_attention(X, M, *P, P_l=P_l, P_w=P_w, scale=SCALE, **zeros), static)
    dynamic = make_dynamic_weights(names=names)
    Y = talking_heads.talking_heads_attention(X, M, *P, P_l=P_l, P_w=P_w, scale=SCALE, **dynamic)
    assert (Y - static).abs().max() > 1e-3
    close(Y, compute_with_loops(X, M, P, P_l, P_w, dynamic=dynamic))


def test_general_bilinear_attention_equals_loops():
    X, M = make_inputs()
    B_l, B_v, mask = draw_normal(H, D, D) / D, draw_normal(H, D, D), draw_normal(B, H, N, M_LEN)
    Y = talking_heads.bilinear_attention(X, M, B_l, B_v, mask=mask)
    for b in range(B):
        for n in range(N):
            per_head = [
                torch.softmax(torch.stack([X[b, n] @ B_l[h] @ memory for memory in M[b]]) + mask[b, h, n], 0)
                @ torch.stack([memory @ B_v[h] for memory in M[b]])
                for h in range(H)
            ]
            close(Y[b, n], sum(per_head))


@pytest.mark.parametrize("rank", [7, D])
def test_latent_attention_equals_multihead_attention_to_the_latent(rank):
    X, M = make_inputs()
    (P_q, _, _, P_o), (_, P_k, P_v, _), A = make_weights(), make_weights(d=rank), draw_normal(D, rank)
    mask = draw_normal(B, H, N, M_LEN)
    Y = heads.latent_attention(X, M, A, P_q, P_k, P_v, P_o, mask=mask)
    close(Y, heads.multihead_attention(X, M, P_q, A @ P_k, A @ P_v, P_o, mask=mask))
    if rank == D:  # the latent can be the unchanged input
        projections, eye = (P_q, A @ P_k, A @ P_v, P_o), torch.eye(D, dtype=torch.float64)
        close(heads.latent_attention(X, M, eye, *projections, mask=mask), Y)


@pytest.mark.parametrize("projection_names", [("P_l", "P_w"), ("P_l",), ("P_w",), ()])
def test_talking_heads_equals_low_rank_bilinear_attention(projection_names):
    X, M = make_inputs()
    h_k, h_v = (2 if "P_l" in projection_names else 4), (3 if "P_w" in projection_names else 4)
    P, P_l, P_w = make_talking_heads_weights(h_k=h_k, h=4, h_v=h_v)
    projections = {name: tensor for name, tensor in (("P_l", P_l), ("P_w", P_w)) if name in projection_names}
    mask = draw_normal(B, 4, N, M_LEN)
    B_l, B_v = talking_heads.bilinear_forms(*P, **projections, scale=SCALE)
    expected = talking_heads.talking_heads_attention(X, M, *P, **projections, mask=mask, scale=SCALE)
    close(talking_heads.bilinear_attention(X, M, B_l, B_v, mask=mask), expected)
    # Each form has up to h_k times the rank of a head. All forms together span at most h_k dimensions.
    head_rank = (h_k if "P_l" in projection_names else 1) * K_DIM
    assert torch.linalg.matrix_rank(B_l).tolist() == [min(D, head_rank)] * 4
    assert torch.linalg.matrix_rank(B_l.flatten(1)) == h_k
    assert torch.linalg.matrix_rank(B_v.flatten(1)) == h_v


@pytest.mark.parametrize(("h", "kv"), [(4, 4), (4, 2), (4, 1)])
def test_core_equals_torch_with_grouped_heads(h, kv):
    query, key, value = draw_normal(B, h, N, 4), draw_normal(B, kv, M_LEN, 4), draw_normal(B, kv, M_LEN, 3)
    mask = draw_normal(B, h, N, M_LEN)
    output, used = talking_heads.attention_core(query, key, value, scale=0.3, mask=mask)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)
    close(output, expected)
    assert used.shape == (B, h, N, M_LEN)
    close(used.sum(-1), torch.ones(B, h, N, dtype=torch.float64))
    close(used @ value.repeat_interleave(h // kv, dim=1), output)


@pytest.mark.parametrize("names", [(), ("x2l",), ("m2w",), DYNAMIC])
def test_core_equals_the_formula_of_talking_heads(names):
    """Check the forward pass and gradients, with separate head counts."""
    X, M = make_inputs()
    P, P_l, P_w = make_talking_heads_weights()
    P_q, P_k, P_v, P_o = P
    dynamic, bias, mask = make_dynamic_weights(names=names), draw_normal(1, 4, N, M_LEN), make_causal_mask(M_LEN)[-N:]
    leaves = [X, M, *P, P_l, P_w, *dynamic.values(), bias]
    for leaf in leaves:
        leaf.requires_grad_()
    query, key, value = X[:, None] @ P_q, M[:, None] @ P_k, M[:, None] @ P_v
    matrices = {
        name.removeprefix("P_"): torch.tensordot(X if "x2" in name else M, tensor, 1)
        for name, tensor in dynamic.items()
    }
    output, _ = talking_heads.attention_core(
        query, key, value, scale=SCALE, P_l=P_l, P_w=P_w, bias=bias, mask=mask, **matrices
    )  # [b, h_v, n, v]
    Y = (output @ P_o.transpose(1, 2)).sum(1)
    expected = talking_heads.talking_heads_attention(
        X, M, *P, P_l=P_l, P_w=P_w, bias=bias, mask=mask, scale=SCALE, **dynamic
    )
    close(Y, expected)
    upstream = draw_normal(*Y.shape)
    actual_grads = torch.autograd.grad(Y, leaves, upstream)
    for actual, expected_gradient in zip(actual_grads, torch.autograd.grad(expected, leaves, upstream), strict=True):
        assert expected_gradient.abs().max() > 1e-6
        close(actual, expected_gradient)


def test_core_supports_grouped_talking_heads():
    """Check k that divides h_k and h_v, with unequal numbers of key and value heads."""
    P_l, P_w = draw_normal(4, 3), draw_normal(3, 6)
    query, key, value = draw_normal(B, 4, N, 4), draw_normal(B, 2, M_LEN, 4), draw_normal(B, 3, M_LEN, 5)
    output, used = talking_heads.attention_core(query, key, value, scale=0.5, P_l=P_l, P_w=P_w)
    repeated = talking_heads.attention_core(
        query, key[:, [0, 0, 1, 1]], value[:, [0, 0, 1, 1, 2, 2]], scale=0.5, P_l=P_l, P_w=P_w
    )
    assert output.shape == (B, 6, N, 5) and used.shape == (B, 6, N, M_LEN)
    close(output, repeated[0])
    close(used, repeated[1])


def test_core_handles_fully_masked_rows():
    query, key, value = draw_normal(B, H, N, 4), draw_normal(B, H, M_LEN, 4), draw_normal(B, H, M_LEN, 3)
    mask = torch.zeros(B, 1, N, M_LEN, dtype=torch.float64)
    mask[0, :, 1] = -torch.inf
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output, used = talking_heads.attention_core(query, key, value, scale=0.5, mask=mask)
    assert torch.equal(output[0, :, 1], torch.zeros(H, 3, dtype=torch.float64)) and not used[0, :, 1].any()
    close(output, F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.5))
    grads = torch.autograd.grad(output.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads) and not grads[0][0, :, 1].any()
    P_w = draw_normal(H, 2)
    mixed, _ = talking_heads.attention_core(query, key, value[:, :2], scale=0.5, P_w=P_w, mask=mask)
    assert not mixed[0, :, 1].any() and mixed[0, :, 0].all()

    uniform, _ = talking_heads.attention_core(
        query, key, value, scale=0.5, mask=mask.clamp(min=torch.finfo(torch.float64).min)
    )
    close(uniform[0, :, 1], value[0].mean(1))


@pytest.mark.parametrize("names", [(), DYNAMIC])
def test_core_gradients_pass_gradcheck(names):
    def leaf(*shape):
        return draw_normal(*shape).requires_grad_()

    tensors = {"query": leaf(1, 2, 2, 2), "key": leaf(1, 1, 3, 2), "value": leaf(1, 1, 3, 2)}
    tensors |= {"P_l": leaf(2, 3), "P_w": leaf(3, 2), "bias": leaf(1, 3, 2, 3)}
    shapes = {"x2l": (1, 2, 2, 3), "m2l": (1, 3, 2, 3), "x2w": (1, 2, 3, 2), "m2w": (1, 3, 3, 2)}
    tensors |= {name: leaf(*shapes[name]) for name in names}
    mask = torch.zeros(2, 3, dtype=torch.float64)
    mask[0, 1], mask[1] = -torch.inf, -torch.inf

    def run(*values):
        return talking_heads.attention_core(**dict(zip(tensors, values, strict=True)), scale=0.7, mask=mask)

    assert torch.autograd.gradcheck(run, tuple(tensors.values()))


def test_invalid_formula_inputs_raise_an_error():
    X, M = make_inputs()
    query, key = draw_normal(B, 4, N, 4), draw_normal(B, 3, M_LEN, 4)
    with pytest.raises(ValueError, match="key/value heads"):
        talking_heads.attention_core(query, key, key, scale=1.0)
    with pytest.raises(ValueError, match="key/value heads"):
        heads.repeat_kv_heads(draw_normal(3, D, K_DIM), 4)
    with pytest.raises(ValueError, match="boolean"):
        heads.multihead_attention(X, M, *make_weights(), mask=torch.ones(N, M_LEN, dtype=torch.bool))
    with pytest.raises(ValueError, match="P_l or P_w"):
        talking_heads.attention_core(query, query, query, scale=1.0, x2l=draw_normal(B, N, 4, 4))
    with pytest.raises(ValueError, match="P_l or P_w"):
        talking_heads.talking_heads_attention(X, M, *make_weights(), P_x2w=draw_normal(D, H, H))
    with pytest.raises(ValueError, match=r"4 rows.*got 3"):
        talking_heads.attention_core(query, query, query, scale=1.0, P_l=draw_normal(3, 4))
