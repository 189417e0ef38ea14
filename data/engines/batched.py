"""Many answers at once: what one prompt at a time wastes is the reading of the weights, once for every token."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.modules.decoding.loop import PLAIN, RowPool, Setup, asked
from draftsmith.modules.decoding.protocols import Drafter
from draftsmith.modules.sampling import Source, TorchSource
from draftsmith.modules.targets.base import CausalLM, check_ids
from draftsmith.modules.types import InputError, SamplingParams


def row_uniforms(stage: str, seed: int, row: int, count: int) -> np.ndarray:
    """`count` uniforms in [0, 1), float64, of this row alone: they do not depend on which rows share its batch.

    stage: part of the stream's name. Two stages must not share a stream: labels drawn with the uniforms that drew the
    text would agree with it far too often.
    """
    return _own_generator(stage, seed, row).random(count)


def _own_generator(stage: str, seed: int, row: int) -> np.random.Generator:
    name = hashlib.sha256(f"{stage}/{seed}/{row}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(name[:16], "little")))


class OwnUniforms(TorchSource):
    """The uniforms of one row, as `row_uniforms` gives them: without a drafter one a token."""

    def __init__(self, stage: str, seed: int, row: int):
        self._numbers, self._uniforms = _own_generator(stage, seed, row), []

    def _fill(self) -> None:
        self._uniforms = [*self._numbers.random(self.BLOCK).tolist()[::-1], *self._uniforms]


def by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Row numbers in batches of like length, longest first, so that running out of memory shows at once."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def answers(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
    sources: Callable[[int], Source] | None = None,
    eos_ids: Sequence[int] | None = None,
    drafter: Callable[[int], Drafter | None] = lambda capacity: None,
) -> Iterator[tuple[int, list[int]]]:
    """The target's answers, each up to and including an end token, `max_new_tokens`, or the end of the context, with
    the numbers of their prompts, as they are complete. The longest prompts come first, so that running out of memory
    shows at once; a row that is done makes room for the next one.

    prompts: each shorter than the context. sources: number of a prompt -> its random numbers; greedy decoding needs
    none. eos_ids: end tokens; None takes the target's, () never ends. drafter: makes what drafts for `batch_size` rows
    of so many tokens at most.

    Raises:
        NonFinite: a model's numbers, of the prompt `row`.
    """
    assert params.greedy or sources is not None, "sampling draws with the rows' own uniforms"
    longest = min(max(map(len, prompts)) + max_new_tokens, lm.info.max_position)
    what = drafter(longest + PLAIN.max_nodes + 1)
    capture, nodes = ((), 0) if what is None else (what.capture, PLAIN.max_nodes)
    rows = min(batch_size, len(prompts))
    setup = Setup(session=lm.session(rows, longest + nodes + 1, capture), max_nodes=nodes)
    waiting = (
        asked(lm.info, prompts[i], max_new_tokens, sources(i) if sources else TorchSource(0), eos_ids, i)
        for i in sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    )
    for row in RowPool(lm, what, params, rows, longest, setup).run(waiting):
        yield row.number, row.tokens


def answer_all(lm: CausalLM, prompts: Sequence[Sequence[int]], *how: Any, **more: Any) -> list[list[int]]:
    """`answers`, in the order of the prompts."""
    found = dict(answers(lm, prompts, *how, **more))
    return [found[i] for i in range(len(prompts))]


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
