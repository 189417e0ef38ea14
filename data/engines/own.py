"""Response generation with our own decoder, many prompts at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.engines.served_target import ServedLM
from draftsmith.data.store.shards import row_generator
from draftsmith.data.text.turns import AnswerSettings, PendingTurn, TargetTurn
from draftsmith.modules.decoding.plain import PromptAnswer, RowPool
from draftsmith.modules.finite import name_nonfinite
from draftsmith.modules.sampling import Source, TorchSource
from draftsmith.modules.targets.base import CausalLM, check_ids
from draftsmith.modules.types import InputError, SamplingParams


class RowUniforms(TorchSource):
    """Random source of one row, drawing the numbers of `row_uniforms`, one per token."""

    def __init__(self, stage: str, seed: int, row: int):
        self._numbers, self._uniforms = row_generator(stage, seed, row), []

    def _fill(self) -> None:
        # The list is a stack: new numbers go below those that are left, in reverse.
        self._uniforms = [*self._numbers.random(self.BLOCK).tolist()[::-1], *self._uniforms]


def length_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Group row numbers into batches of similar length, longest first so that running out of memory shows at once."""
    # Rows of equal length keep their order, so that every run makes the same batches.
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def generate_rows(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    batch_size: int,
    sources: Callable[[int], Source] | None = None,
    eos_ids: Sequence[int] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yield (prompt number, response tokens) as responses finish.

    A response ends with an end token, after `max_new_tokens`, or at the end of the context. The longest prompts are
    read first, and a finished row makes room for the next prompt.

    prompts: each shorter than the context. sources: prompt number -> random source; greedy decoding needs none.
    eos_ids: end tokens; None takes the target's, () never ends.

    Raises:
        NonFinite: a model returned NaN or infinity for the prompt `row`.
    """
    assert params.greedy or sources is not None, "sampling needs a random source per row"
    longest = min(max(map(len, prompts)) + max_new_tokens, lm.info.max_position)
    waiting = (
        PromptAnswer(lm.info, prompts[i], max_new_tokens, sources(i) if sources else TorchSource(0), eos_ids, i)
        for i in sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    )
    for row in RowPool(lm, params, min(batch_size, len(prompts)), longest).run(waiting):
        yield row.number, row.tokens


def generate_all(lm: CausalLM, prompts: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
    """Return the responses of `generate_rows` in the order of the prompts; a target behind a server gives its own."""
    if isinstance(lm, ServedLM):
        params, max_new_tokens, *_ = args
        return lm.answers(prompts, params, max_new_tokens)
    responses = dict(generate_rows(lm, prompts, *args, **kwargs))
    return [responses[i] for i in range(len(prompts))]


def check_lengths(rows: Sequence[dict[str, Any]], first: int, context: int) -> None:
    """Raise InputError if a row is longer than the context. first: number of the first row."""
    for number, row in enumerate(rows, first):
        if (length := len(row["input_ids"])) > context:
            remedy = "Make shorter ones: data responses --max-new-tokens, data prompts --max-length."
            raise InputError(f"row {number}", f"{length} tokens", f"at most {context}, the context", remedy)


def pad_right(rows: Sequence[Sequence[int]], lm: CausalLM) -> Tensor:
    """Pad rows with zeros to token ids [B, T] on the model's device.

    Causal attention keeps the padding from changing anything in front of it.
    """
    for row in rows:
        check_ids(row, lm.info.vocab_size)
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=lm.device)


def set_threads(num_threads: int) -> None:
    """Set torch's CPU threads; 0 keeps its default."""
    if num_threads:
        torch.set_num_threads(num_threads)


class OwnEngine:
    """Our own decoder, `batch_size` turns at a time.

    Attributes:
        identity: of the target. context: longest sequence.
    """

    def __init__(self, settings: AnswerSettings, lm: CausalLM, batch_size: int):
        """lm: the target."""
        self.settings, self.lm, self._batch_size = settings, lm, batch_size
        self.context, self.identity = lm.info.max_position, {"target": lm.info.identity}
        if batch_size > 1 and lm.session(2, 1).most_rows == 1:
            reason = getattr(lm, "no_trees", "") or "its rows cannot be read together"
            log_note(f"answers one prompt at a time, whatever --batch-size says: {reason}")

    def answers(self, turns: Sequence[PendingTurn]) -> Iterator[tuple[int, TargetTurn]]:
        """Yield (number in `turns`, response) as responses finish."""
        settings = self.settings
        ends = () if settings.ignore_eos else self.lm.info.eos_ids
        # Turn 1 uses the same stream as a prompt without later turns.
        stages = ["responses" if turn.number == 1 else f"responses/turn-{turn.number}" for turn in turns]

        with name_nonfinite([turn.id for turn in turns]):
            answers = generate_rows(
                self.lm,
                [turn.prompt_ids for turn in turns],
                settings.params,
                settings.max_new_tokens,
                self._batch_size,
                lambda i: RowUniforms(stages[i], settings.seed, turns[i].row),
                ends,
            )
            for i, tokens in answers:
                yield i, TargetTurn(tokens, ended=tokens[-1] in ends)
