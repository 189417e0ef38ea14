"""How many floating-point operations a model's arithmetic needs: model FLOPs, the numerator of MFU.

Matrix products only, a multiply-add counting 2 (norms, rotations and softmax are below a percent). Counted is what the
algorithm needs, not what a kernel does: causal attention is the half below the diagonal, padding is nothing, and
recomputing in the backward pass is free (PaLM, appendix B). Lengths are those of documents that do not see each other,
so a packed batch counts as its documents do.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftsmith.modules.acceptance.head import AcceptanceHeadConfig
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


def rollouts_forward(config: LlamaConfig, texts: Sequence[int], starts: Sequence[int], levels: int) -> float:
    """All decoder layers over texts of these lengths and over drafts of `levels` tokens that hang off them: a draft
    sees the text up to its start, and itself."""
    window = config.sliding_window or max(starts, default=0) + levels
    pairs = sum(min(start + level, window) for start in starts for level in range(1, levels + 1))
    drafts = config.num_layers * (layer_matrices(config, len(starts) * levels) + attention(config, pairs))
    return layers_forward(config, texts) + drafts


def lm_head_forward(config: LlamaConfig, rows: int) -> float:
    """Logits of `rows` hidden states."""
    return linear(config.hidden_size, config.vocab_size, rows)


def fusion_forward(config: LlamaConfig, rows: int) -> float:
    """The EAGLE head's layer that joins embedding and feature."""
    return linear(2 * config.hidden_size, config.hidden_size, rows)


def eagle_forward(config: LlamaConfig, lengths: Sequence[int]) -> float:
    """One pass of an EAGLE head whose layers are `config`'s; lengths: rows of each document, which are its tokens less
    2 in training (`drafters.eagle.shift`). A later pass of `EagleHead.unroll` costs the same: as many keys a query."""
    return fusion_forward(config, sum(lengths)) + layers_forward(config, lengths)


def acceptance_forward(head: AcceptanceHeadConfig, rows: int) -> float:
    """An acceptance head; tied blocks compute as much as others."""
    size = head.inner_size
    read = linear(head.input_size, size, rows) if head.joins else 0.0
    return read + head.num_blocks * linear(size, size, rows) + linear(size, 1, rows) + _direct(head, rows)


def _direct(head: AcceptanceHeadConfig, rows: int) -> float:
    """Numbers that go straight to the logit."""
    return linear(len(head.features), 1, rows)


def eagle_training(config: LlamaConfig, lengths: Sequence[int], loss_tokens: int, passes: int = 1) -> float:
    """Forward and backward of an EAGLE head and its loss, from features that are there.

    lengths: rows of each document as in `eagle_forward`. loss_tokens: rows whose logits are made; the target's once,
    the head's in each of the unrolled `passes`.
    """
    rows = sum(lengths)
    head = passes * TRAINED * eagle_forward(config, lengths)
    head -= (TRAINED - TRAINED_FIRST) * fusion_forward(config, rows)  # the first pass reads data only
    return head + (1 + passes * FROZEN_PASSING) * lm_head_forward(config, loss_tokens)


def acceptance_training(head: AcceptanceHeadConfig, rows: int) -> float:
    """Forward and backward of an acceptance head over `rows` tokens whose inputs are there."""
    wide = head.num_blocks or head.joins
    first = linear(head.input_size, head.inner_size if wide else 1, rows) + _direct(head, rows)
    return TRAINED * acceptance_forward(head, rows) - (TRAINED - TRAINED_FIRST) * first


def parameters_forward(num_parameters: int, tokens: int) -> float:
    """A model of unknown make: each parameter used once for each token. Without attention."""
    return 2.0 * num_parameters * tokens
