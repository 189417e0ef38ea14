"""The sampling half: answers of a method are drawn until a bias of the size asked for would have been found.

A first sample says which distributions p and q meet on these prompts, and so how many tokens the power asked for
takes; it counts like all others. The test may stop as soon as it fails (`evidence.Evidence` says why).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.lossless.answers import PlacedAnswer, PlacedRunner, answer_seed, ends_as_asked
from draftsmith.eval.lossless.evidence import Decided, Evidence
from draftsmith.eval.lossless.power import Growth, Power, power_of
from draftsmith.eval.lossless.settings import LosslessConfig
from draftsmith.modules.decoding.loop import room_for
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import SamplingParams

CELLS = 2**21  # of [N, V] that are looked at in one go
POWER_CELLS = 2**24  # of the tokens that the power is computed from
POWER_TOKENS = 512
FIRST_TOKENS = 1024  # emitted before the power is computed
# Where a token's probability is 0 by the reference's reading: it is possible after all if a logit, or a mass of top-p,
# that differs by a reading's rounding would keep it.
TIED_LOGIT = {torch.float32: 1e-3, torch.float64: 1e-6}
TIED_MASS = 1e-4


@dataclass
class SamplingTest:
    """One method, run in one way. level: the probability to fail a lossless method, at most. `say` is told what the
    test will cost, before it costs it."""

    label: str
    runner: PlacedRunner
    prompts: Sequence[BenchPrompt]
    config: LosslessConfig
    level: float
    say: Callable[[str], None] = print
    evidence: Evidence = field(default_factory=Evidence)
    answers: int = 0
    tokens: int = 0
    wrong_ends: int = 0
    seconds: float = 0.0
    _before: dict[int, list[int]] = field(default_factory=dict)
    _kept: list[Decided] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Sample and decide; the result's row."""
        while self.tokens < FIRST_TOKENS and not self.failed:
            self._sample(keep=True)
        if self.failed:
            return self._row(None)
        power = self._power()
        wanted = power.needed(self.config.power, self.level)
        self._announce(wanted)
        while self.tokens < wanted and not self.failed:
            self._sample()
        return self._row(power)

    @property
    def failed(self) -> bool:
        return self.wrong_ends > 0 or not self.evidence.p_value > self.level

    def _announce(self, wanted: float) -> None:
        tokens = max(self.tokens, math.ceil(wanted))
        more = self.seconds * (tokens / self.tokens - 1)
        answers = math.ceil(tokens * self.answers / self.tokens)
        self.say(
            f"{self.label}, {self.runner.loop} loop: {tokens:,} tokens in {answers:,} answers find a bias of TV "
            f"{self.config.bias:g} with probability {self.config.power:g}; about {more:.0f} s more"
        )

    def _sample(self, keep: bool = False) -> None:
        """One group of answers, and what it is evidence of."""
        began = time.perf_counter()
        config, target = self.config, self.runner.target
        numbers = range(self.answers, self.answers + config.batch_size)
        which = [number % len(self.prompts) for number in numbers]
        prompts = [self.prompts[i] for i in which]
        seeds = [
            answer_seed(config.seed, self.label, self.runner.loop, prompt.id, number)
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        ids = [prompt.prompt_ids for prompt in prompts]
        made = self.runner(ids, config.sampling, config.sampled_tokens, seeds)
        self.answers += len(made)
        for prompt, answer in zip(ids, made, strict=True):
            most = room_for(prompt, config.sampled_tokens, target.info)
            self.wrong_ends += not ends_as_asked(answer.tokens, self.runner.ends, most)
        for row, (place, answer) in enumerate(zip(which, made, strict=True)):
            if not answer.tokens:
                continue
            found = self._decided(ids[row], answer, self._before.get(place, []))
            self._before[place] = answer.tokens
            self.tokens += len(answer.tokens)
            rows = max(1, CELLS // found.target.shape[1])
            for start in range(0, len(found.token), rows):
                self.evidence.add(rows_of(found, slice(start, start + rows)))
            if keep:
                self._kept.append(found)
        self.seconds += time.perf_counter() - began

    @torch.inference_mode()
    def _decided(self, prompt: Sequence[int], answer: PlacedAnswer, before: list[int]) -> Decided:
        """The answer's tokens with the target's own distributions, read in one go; those of probability 0 are
        counted, and left out."""
        lm = self.runner.target
        ids = torch.tensor([[*prompt, *answer.tokens]], device=lm.device)
        logits = lm.lm_head(lm.features(ids)[0, len(prompt) - 1 : -1])
        target = probabilities(logits, self.config.sampling).double()
        token = ids[0, len(prompt) :]
        draft, children = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.bool)
        for row, place in enumerate(answer.places):
            if place.distribution is not None:
                draft[row] = place.distribution
            children[row, list(place.children)] = True
        first = torch.tensor([place.first for place in answer.places], device=lm.device)
        same = [answer.tokens[:i] == before[:i] and i < len(before) for i in range(len(answer.tokens))]
        copied = torch.tensor([before[i] if known else -1 for i, known in enumerate(same)], device=lm.device)
        found = Decided(token, target, draft, children, first, copied)
        chance = target.gather(1, token[:, None])[:, 0]
        if bool((chance > 0).all()):
            return found
        self.evidence.impossible += int((~self._possible(logits, token) & ~(chance > 0)).sum())
        return rows_of(found, chance > 0)

    def _possible(self, logits: Tensor, token: Tensor) -> Tensor:
        """[N] bool: the token would be kept if its logit were a little larger, or top_p."""
        params, tied = self.config.sampling, TIED_LOGIT.get(self.runner.target.dtype, self.config.max_gap)
        wider = SamplingParams(params.temperature, params.top_k, min(1.0, params.top_p + TIED_MASS))
        raised = logits.float() + tied * F.one_hot(token, logits.shape[1])
        return probabilities(raised, wider).gather(1, token[:, None])[:, 0] > 0

    def _power(self) -> Power:
        """The power, from tokens spread evenly over the first sample."""
        columns = zip(*(vars(each).values() for each in self._kept), strict=True)
        found = Decided(*(torch.cat(parts) for parts in columns))
        self._kept = []
        count = min(POWER_TOKENS, max(1, POWER_CELLS // found.target.shape[1]), len(found.token))
        index = torch.linspace(0, len(found.token) - 1, count).long().to(found.token.device)
        return power_of(rows_of(found, index), self.config.bias, torch.Generator().manual_seed(self.config.seed))

    def _row(self, power: Power | None) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "p_value": self.evidence.p_value,
            "level": self.level,
            "strongest_bet": self.evidence.strongest,
            "impossible": self.evidence.impossible,
            "wrong_ends": self.wrong_ends,
            "finds": None if power is None else self._finds(power),
            "passed": not self.failed,
        }

    def _finds(self, power: Power) -> dict[str, Any]:
        """What tests of this many tokens find, and with which probability; None where these prompts cannot have so
        large a bias."""

        def found(growths: Mapping[str, Growth]) -> dict[str, dict[str, float]]:
            chances = {name: each.chance(self.tokens, self.level) for name, each in growths.items()}
            return {name: {"tv": growths[name].tv, "found_with": chance} for name, chance in chances.items()}

        return {
            "bias": self.config.bias,
            "with_probability": min((each["found_with"] for each in found(power.large).values()), default=None),
            "biases": found(power.biases),
            "defects": found(power.defects),
        }


def rows_of(found: Decided, rows: Any) -> Decided:
    return Decided(*(part[rows] for part in vars(found).values()))
