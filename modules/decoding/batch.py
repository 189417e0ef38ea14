"""Generating many answers together: what makes training data, not a speculative method."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draftsmith.modules.sampling import RowSources, probabilities
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


@torch.inference_mode()
def generate_batch(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    rows: Sequence[int],
    params: SamplingParams,
    max_new_tokens: int,
    seed: int,
    eos_ids: Sequence[int] | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Answers [B] to prompts [B], end token included where it came within `max_new_tokens` and the context.

    rows: a number for each prompt; its draws come from the stream (seed, row), so an answer does not depend on which
        prompts share the batch (but for float rounding, which another batch shape may change).
    eos_ids: None takes the model's own. on_tokens(n): n more tokens have been generated.
    """
    ends = torch.tensor(sorted(lm.info.eos_ids if eos_ids is None else eos_ids), device=lm.device, dtype=torch.long)
    room = [min(max_new_tokens, lm.info.max_position - len(prompt)) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    alive = list(range(len(prompts)))
    source = RowSources(seed, list(rows))
    session, logits = lm.batch_session(prompts, max(len(p) + r for p, r in zip(prompts, room, strict=True)))
    while True:
        tokens = logits.argmax(-1) if params.greedy else source.draw(probabilities(logits, params))
        for row, token in zip(alive, tokens.tolist(), strict=True):
            answers[row].append(token)
        if on_tokens is not None:
            on_tokens(len(alive))
        ended = torch.isin(tokens, ends).tolist()
        going = [i for i, row in enumerate(alive) if not ended[i] and len(answers[row]) < room[row]]
        if not going:
            return answers
        if len(going) < len(alive):
            # Finished rows leave at once: the batch shrinks instead of computing padding.
            index = torch.tensor(going, device=lm.device)
            session.select(index)
            source.select(going)
            tokens, alive = tokens[index], [alive[i] for i in going]
        logits = session.step(tokens)
