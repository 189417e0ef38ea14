"""How many floating-point operations a model's arithmetic needs: model FLOPs, the numerator of MFU.

Matrix products only, a multiply-add counting 2 (norms, rotations and softmax are below a percent). Counted is what the
algorithm needs, not what a kernel does: causal attention is the half below the diagonal, padding is nothing, and
recomputing in the backward pass is free (PaLM, appendix B). Lengths are those of documents that do not see each other,
so a packed batch counts as its documents do.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.modules.layers import LlamaConfig

# Forward, then the gradients of weights and of inputs: as many each as the forward.
TRAINED = 3
# What gets its input from data or frozen models needs no gradient of it.
TRAINED_FIRST = 2
# A frozen product that passes the gradient on.
FROZEN_PASSING = 2


def linear(in_size: int, out_size: int, rows: int) -> float:
    """[rows, in_size] times [in_size, out_size]."""
    return 2.0 * in_size * out_size * rows


def causal_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """(query, key) pairs of causal attention over documents of these lengths; window: most keys a query sees."""
    pairs = 0
    for length in lengths:
        near = min(length, window or length)
        pairs += near * (near + 1) // 2 + (length - near) * near
    return pairs


def attention(config: LlamaConfig, pairs: int) -> float:
    """Scores and weighted values of ONE layer."""
    return 4.0 * config.num_heads * config.head_dim * pairs


def layer_matrices(config: LlamaConfig, rows: int) -> float:
    """Query, key, value and output projections and the MLP of ONE layer."""
    size = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = linear(size, queries + 2 * keys, rows) + linear(queries, size, rows)
    return projections + 3 * linear(size, config.intermediate_size, rows)


def layers_forward(config: LlamaConfig, lengths: Sequence[int]) -> float:
    """All `num_layers` decoder layers over documents: a target's features. Without embedding and lm_head."""
    pairs = causal_pairs(lengths, config.sliding_window)
    return config.num_layers * (layer_matrices(config, sum(lengths)) + attention(config, pairs))


def lm_head_forward(config: LlamaConfig, rows: int) -> float:
    """Logits of `rows` hidden states."""
    return linear(config.hidden_size, config.vocab_size, rows)


def parameters_forward(num_parameters: int, tokens: int) -> float:
    """A model of unknown make: each parameter used once for each token. Without attention."""
    return 2.0 * num_parameters * tokens
