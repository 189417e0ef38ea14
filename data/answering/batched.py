"""Many answers at once: what one prompt at a time wastes is the reading of the weights, once for every token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.modules.decoding.loop import Setup, generate, session_capacity
from draftsmith.modules.finite import NonFinite
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM, check_ids
from draftsmith.modules.types import InputError, SamplingParams


def row_uniforms(stage: str, seed: int, row: int, count: int) -> np.ndarray:
    """`count` uniforms in [0, 1), float64, of this row alone: they do not depend on which rows share its batch.

    stage: part of the stream's name. Two stages must not share a stream: labels drawn with the uniforms that drew the
    text would agree with it far too often.
    """
    name = hashlib.sha256(f"{stage}/{seed}/{row}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(name[:16], "little"))).random(count)


class OwnUniforms(TorchSource):
    """The uniforms of one row, as `row_uniforms` gives them, one a token."""

    def __init__(self, uniforms: Sequence[float]):
        self._uniforms = list(reversed(uniforms))

    def _fill(self) -> None:
        raise AssertionError("more draws than tokens")


def answer(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    uniforms: Sequence[Sequence[float]] | None,
    eos_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """The target's answers, each up to and including an end token, `max_new_tokens`, or the end of the context.

    prompts: each shorter than the context. uniforms: of each row, one for every token; None when greedy. eos_ids: end
    tokens; None takes the target's, () never ends.

    Raises:
        NonFinite: the target's logits, of the prompt `row`.
    """
    sources = [OwnUniforms(own) for own in uniforms or [()] * len(prompts)]
    # No fixed shapes: each would be captured anew for every batch.
    capacity = session_capacity(max(map(len, prompts)), max_new_tokens, 0)
    setup = Setup(session=lm.session(len(prompts), min(capacity, lm.info.max_position + 1), static=False), max_nodes=0)
    made = generate(lm, None, prompts, params, max_new_tokens, sources, eos_ids, setup)
    return [generation.tokens for generation in made]


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Row numbers in batches of like length, longest first, so that running out of memory shows at once."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def answer_all(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
    uniforms: Callable[[int], np.ndarray] | None = None,
    advance: Callable[[Sequence[int]], None] = lambda numbers: None,
    eos_ids: Sequence[int] | None = None,
) -> list[list[int]]:
    """`answer`, in batches of like length; the answers come in the order of `prompts`.

    uniforms: number of a prompt -> its [max_new_tokens] uniforms; greedy decoding needs none.
    advance: called with the numbers of the prompts that a batch finished. eos_ids: as of `answer`.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    for batch in by_length([len(prompt) for prompt in prompts], batch_size):
        drawn = None
        if not params.greedy:
            assert uniforms is not None, "sampling draws with the rows' own uniforms"
            drawn = [uniforms(i).tolist() for i in batch]
        try:
            made = answer(lm, [prompts[i] for i in batch], params, max_new_tokens, drawn, eos_ids)
        except NonFinite as error:
            error.row = batch[error.row or 0]
            raise
        for i, tokens in zip(batch, made, strict=True):
            answers[i] = tokens
        advance(batch)
    return answers


def check_lengths(rows: Sequence[dict[str, Any]], first: int, context: int) -> None:
    """Raises InputError where a response, the `first`-th and the ones that follow, is longer than the context."""
    for offset, row in enumerate(rows):
        if len(row["input_ids"]) > context:
            expected = f"at most {context}, the shorter context of target and draft"
            found = f"{len(row['input_ids'])} tokens"
            remedy = "Make shorter responses: data responses --max-new-tokens, data prompts --max-length."
            raise InputError(f"response {first + offset}", found, expected, remedy)


def pad_right(rows: Sequence[Sequence[int]], lm: CausalLM) -> Tensor:
    """[B, T] int64 for a model to read, zeros behind the shorter rows: attention is causal, so they are seen by nothing
    that counts.

    Raises:
        InputError: a token that the model does not have.
    """
    for row in rows:
        check_ids(row, lm.info.vocab_size)
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=lm.device)


def set_threads(num_threads: int) -> None:
    """CPU threads of torch; 0 leaves torch's own choice."""
    if num_threads:
        torch.set_num_threads(num_threads)
