"""Model FLOPs, the numerator of MFU: floating-point operations that a model's arithmetic needs.

Matrix products only, with 2 for a multiply-add (norms, rotations and softmax are below a percent). The algorithm's
needs are counted, not a kernel's: causal attention is the half below the diagonal, padding is nothing, and recomputing
in the backward pass is free (PaLM, appendix B). Lengths are of documents that do not see each other, so a packed batch
counts like its documents.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from draftsmith.modules.llama_config import LlamaConfig

# Passes of a trained product: the forward, and as many FLOPs each for the gradients of weights and of inputs.
TRAINED = 3
# A product whose inputs come from data or frozen models needs no gradient of them.
TRAINED_FIRST = 2
# A frozen product passes the gradient on to its inputs.
FROZEN_PASSING = 2


def linear(in_size: int, out_size: int, rows: int) -> float:
    """Count [rows, in_size] times [in_size, out_size]."""
    return 2.0 * in_size * out_size * rows


def causal_pairs(lengths: Sequence[int], window: int | None = None) -> int:
    """Count (query, key) pairs of causal attention over documents; window: most keys a query sees."""
    pairs = 0
    for length in lengths:
        near = min(length, window or length)
        pairs += near * (near + 1) // 2 + (length - near) * near
    return pairs


def attention(config: LlamaConfig, pairs: int) -> float:
    """Count scores and weighted values of ONE layer."""
    return 4.0 * config.num_heads * config.head_dim * pairs


def matrices(module: nn.Module, rows: float, chosen: int = 1) -> float:
    """Count `rows` positions through all matrices of a module but embeddings, whose rows are only looked up.

    Of stacked experts [E, .., ..] each position meets `chosen`.
    """
    parts = [part for part in module.modules() if not isinstance(part, nn.Embedding)]
    weights = [weight for part in parts for weight in part.parameters(recurse=False) if weight.dim() > 1]
    return 2.0 * rows * sum(w.numel() * chosen // len(w) if w.dim() == 3 else w.numel() for w in weights)


def layers_forward(config: LlamaConfig, lengths: Sequence[int]) -> float:
    """Count all decoder layers over documents, without embedding and lm_head: a target's features."""
    size, rows, pairs = config.hidden_size, sum(lengths), causal_pairs(lengths, config.sliding_window)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = linear(size, queries + 2 * keys, rows) + linear(queries, size, rows)
    mlp = 3 * linear(size, config.intermediate_size, rows)
    return config.num_layers * (projections + mlp + attention(config, pairs))
