"""Bytes that one part of a step takes in a rank's memory: what autograd saves, the loss, and a frozen model's forward.

Pure functions of shapes. They follow modules/heads, modules/losses.py and modules/lean.py, and
tests/train/planning/memory_test.py compares them with what torch saves when these run.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftsmith.modules.acceptance.head import AcceptanceHeadConfig
from draftsmith.modules.layers import LlamaConfig
from draftsmith.modules.losses import CHUNK_ELEMENTS

FLOAT32, BFLOAT16, INT64 = 4, 2, 8


@dataclass(frozen=True)
class PartShape:
    """What a rank computes at once.

    tokens: of its documents, padding included where a batch has some. slots: of attention, which lays documents side by
    side, so that it pads in any case; longest: of a document. loss_tokens: those that the loss counts. packed: the
    documents lie end to end.
    """

    tokens: int
    slots: int
    longest: int
    loss_tokens: int
    packed: bool = False


def heads_of(config: LlamaConfig) -> tuple[int, int]:
    """Width of the queries, and of the keys."""
    return config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim


def eagle_saved(config: LlamaConfig, part: PartShape, passes: int = 1, autocast: bool = False) -> int:
    """Saved by `EagleHead.unroll` for its backward pass; the last pass' output, which the loss holds, included."""
    size, inner = config.hidden_size, config.intermediate_size
    queries, keys = heads_of(config)
    width = BFLOAT16 if autocast else FLOAT32
    rows, slots = part.tokens, part.slots
    # A norm in another type than float32 keeps its input wide, and every projection after it casts its own input.
    norm = 2 * FLOAT32 * size + FLOAT32 if not autocast else (FLOAT32 + BFLOAT16) * size + FLOAT32
    mlp = norm + 4 * width * inner + (2 if autocast else 1) * width * size
    first = width * size  # no norm: the projections read the fusion layer's output
    later = norm + (3 if autocast else 1) * width * size
    # Of a packed batch, attention's input and output are copies of the flat rows'.
    output = width * queries
    per_row = first + (config.num_layers - 1) * later + config.num_layers * (mlp + (output if part.packed else 0))
    per_slot = config.num_layers * (width * (2 * queries + 2 * keys) + FLOAT32 * config.num_heads)
    total = rows * (2 * width * size + per_row) + slots * per_slot
    for step in range(1, passes):
        # In the place of the pass' own keys and values, those of all passes so far; and the mask over them.
        gathered = config.num_layers * slots * 2 * keys * width * step
        mask = config.num_layers * part.longest**2 * (step + 1) * width
        total += rows * (2 * width * size + per_row) + slots * per_slot + gathered + mask
    tables = rows * 2 * config.head_dim * width
    # Where each token of a packed batch lies in attention, and the other way round.
    places = INT64 * (rows + slots) if part.packed else 0
    casts = BFLOAT16 * eagle_matrices(config) if autocast else 0
    return total + tables + places + casts + passes * rows * size * FLOAT32


def eagle_matrices(config: LlamaConfig) -> int:
    """Elements of an EAGLE head's matrices."""
    size = config.hidden_size
    queries, keys = heads_of(config)
    layer = 2 * size * queries + 2 * size * keys + 3 * size * config.intermediate_size
    return 2 * size * size + config.num_layers * layer


def eagle_inputs(config: LlamaConfig, part: PartShape, computed: int = 0) -> int:
    """What `EagleHead.loss` holds beside it: both sides of the pairing, features with their noise, embeddings.

    computed: bytes of an element of features that the target has made for this batch; 0 where they come with it.
    """
    pair = 2 * (computed or BFLOAT16) + computed
    return part.tokens * config.hidden_size * (pair + 3 * FLOAT32)


def widest_backward(config: LlamaConfig, part: PartShape, autocast: bool = False) -> int:
    """Temporaries of the MLP's backward pass: gradients of its three inner tensors, and of its input."""
    width = BFLOAT16 if autocast else FLOAT32
    return part.tokens * width * (3 * config.intermediate_size + 3 * config.hidden_size)


def eagle_loss_bytes(config: LlamaConfig, part: PartShape, passes: int = 1, logit_bytes: int = FLOAT32) -> int:
    """Of `drafters.eagle.head.eagle_loss`: rows of the mask with their gradients, and three blocks of logits at a time.

    logit_bytes: of the frozen lm_head's own output, which is widened where it is not float32.
    """
    size = config.hidden_size
    chunk = min(max(1, CHUNK_ELEMENTS // config.vocab_size), part.loss_tokens) * config.vocab_size
    blocks = chunk * (3 * FLOAT32 + (logit_bytes if logit_bytes != FLOAT32 else 0))
    rows = part.loss_tokens * size * FLOAT32
    # Wanted, its float32 copy and the distance; of each pass its rows and their gradient.
    return blocks + rows * (3 + 3 * passes)


def acceptance_saved(head: AcceptanceHeadConfig, judged: int) -> int:
    """Saved by an acceptance head for the tokens it judges, always float32: all that is read side by side and the
    numbers among it, each block's input and what its SiLU reads, and the last state."""
    joined = head.input_size if head.joins else 0
    return judged * FLOAT32 * (joined + len(head.features) + head.inner_size * (2 * head.num_blocks + 1))


def acceptance_inputs(head: AcceptanceHeadConfig, judged: int, width: int) -> int:
    """Of the tokens it judges: state, embedding and numbers, and the state before it was picked from among all.

    width: bytes of an element of a state.
    """
    return judged * (width * (head.input_size - len(head.features) + head.hidden_size) + FLOAT32 * len(head.features))


def frozen_forward(config: LlamaConfig, part: PartShape, width: int) -> int:
    """Most that a frozen model's forward over padded sequences takes, its result included (modules/lean.py).

    width: bytes of an element. In the MLP: rows, their norm, both halves and their product; attention's tensors are
    still there.
    """
    queries, keys = heads_of(config)
    per_token = 2 * config.hidden_size + 3 * config.intermediate_size + 2 * queries + 2 * keys
    return part.tokens * per_token * width


def batch_bytes(hidden_size: int, part: PartShape, parts: int = 1) -> int:
    """Collated parts of a step, and the samples that the last of them is made of. hidden_size: of stored features; 0
    where there are none."""
    per_token = hidden_size * BFLOAT16 + 2 * INT64 + 2
    return (parts + 1) * part.tokens * per_token


def lean_frozen(config: LlamaConfig, num_params: int, stored: int, width: int) -> tuple[int, int]:
    """Bytes of a lean frozen model as it stays, and most while it is read (`data.models.load_lm`), on a CPU.

    num_params: with tied weights counted once. stored, width: bytes of an element in the checkpoint and in memory. The
    checkpoint is mapped: in its own type it stays so, beside the fused copies of what it holds in parts; in another it
    is read beside the whole model.
    """
    queries, keys = heads_of(config)
    fused = config.num_layers * config.hidden_size * (queries + 2 * keys + 2 * config.intermediate_size)
    tables = 4 * config.max_position * config.head_dim * width
    model = num_params * width + tables
    if stored == width:
        return model + fused * width, model + fused * width
    return model, model + num_params * stored
