"""The attention formulas from the papers as plain torch functions, which serve as an executable specification.

Each module contains a group of mechanisms. The functions compute in the dtype of their inputs (use float64 for
comparisons), and they share no code with the models. Names and einsum strings use the symbols from the papers:

    b  batch           h  (softmax) heads              k  size of a query and key vector   X    input of the queries
    n  query length    i  query and key heads, h_k     v  size of a value vector           M    input of keys, values
    m  key length      j  value heads, h_v             G  key/value heads ("groups")       P_*  parameters
    d  model width     (i = j = h except in talking heads)   g  query heads in a group, h / G

Weights have the same layout as in arXiv 1911.02150: P_q and P_k [h, d, k], P_v and P_o [h, d, v]. `scale` is the
factor of the logits. It is 1 by default, because the papers fold 1 / sqrt(k) into P_q. `mask` is added to the logits
and is broadcast to [b, h, n, m]. It may include a position bias. `padding` [b, m] is True for a token and False for
padding. Queries do not attend to padding. The output of a query that attends to no key is 0.
"""
