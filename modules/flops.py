"""Model FLOPs, the numerator of MFU: floating-point operations that a model's arithmetic needs.

Matrix products only, with 2 for a multiply-add (norms, rotations and softmax are below a percent). The algorithm's
needs are counted, not a kernel's: causal attention is the half below the diagonal, padding is nothing, and recomputing
in the backward pass is free (PaLM, appendix B). Lengths are of documents that do not see each other, so a packed batch
counts like its documents.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.modules.layers import LlamaConfig

# Passes of a trained product: the forward, and as many FLOPs each for the gradients of weights and of inputs.
TRAINED = 3
# A product whose inputs come from data or frozen models needs no gradient of them.
TRAINED_FIRST = 2
# A frozen product passes the gradient on to its inputs.
FROZEN_PASSING = 2

# Peak TFLOP/s of dense products by the vendors' data sheets: bf16, TF32, float32. The first name found in the device's
# name counts, so longer names stand before shorter ones. (Lightning's table gives some devices with sparsity and some
# without their tensor cores.)
PEAK_TFLOPS = {
    "B200": (2250.0, 1125.0, 75.0),
    "GH200": (989.5, 494.7, 67.0),
    "H200": (989.5, 494.7, 67.0),
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100 NVL": (835.5, 417.5, 60.0),
    "H100": (989.5, 494.7, 67.0),
    "H20": (148.0, 74.0, 44.0),
    "A100": (312.0, 156.0, 19.5),
    "A10G": (70.0, 35.0, 31.2),
    "A10": (125.0, 62.5, 31.2),
    "A40": (149.7, 74.8, 37.4),
    "RTX A6000": (154.8, 77.4, 38.7),
    "L40S": (362.0, 183.0, 91.6),
    "L40": (181.0, 90.5, 90.5),
    "L4": (121.0, 60.0, 30.3),
    "RTX 6000 Ada": (364.2, 182.1, 91.1),
    "RTX 5090": (209.5, 104.8, 104.8),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 35.6, 35.6),
}


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


def layer_matrices(config: LlamaConfig, rows: int) -> float:
    """Count the projections and the MLP of ONE layer."""
    size = config.hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = linear(size, queries + 2 * keys, rows) + linear(queries, size, rows)
    return projections + 3 * linear(size, config.intermediate_size, rows)


def layers_forward(config: LlamaConfig, lengths: Sequence[int]) -> float:
    """Count all decoder layers over documents, without embedding and lm_head: a target's features."""
    pairs = causal_pairs(lengths, config.sliding_window)
    return config.num_layers * (layer_matrices(config, sum(lengths)) + attention(config, pairs))


def lm_head_forward(config: LlamaConfig, rows: int) -> float:
    """Count the logits of `rows` hidden states."""
    return linear(config.hidden_size, config.vocab_size, rows)
