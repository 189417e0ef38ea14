"""Sampling test: draw answers of a method until a bias of the requested size would have been detected."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.data.settings import DraftSettings, Sampling, check_not_negative, check_positive
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.lossless.answers import PlacedAnswer, PlacedRunner, answer_seed, ends_as_asked
from draftsmith.eval.lossless.evidence import BetGrowth, DecidedTokens, Evidence, growth_of_biases
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.decoding.loop import room_for
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import InputError, SamplingParams, at_least, between

CELLS = 2**21  # entries of [N, V] that are tested at once
POWER_CELLS, POWER_TOKENS = 2**23, 512  # most entries and tokens that the number of tokens is computed from
FIRST_TOKENS = 1024  # sampled before that number is computed
# A token of probability 0 may still be possible: a logit, or the mass kept by top-p, that differs by rounding would
# keep it.
TIED_LOGIT = {torch.float32: 1e-3, torch.float64: 1e-6}
TIED_MASS = 1e-4


@dataclass(frozen=True)
class LosslessConfig(DraftSettings, PromptChoice, AnswerLength, Sampling, Running):
    """Certify that decoding methods keep the target's output. The exit code is 1 if one does not.

    Attributes:
        target: model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts.
        output: directory that receives lossless.json.
        methods: name:setting=value, separated by commas, as in `draftsmith eval bench`.
        mid: model between draft and target.
        acceptance: acceptance head directory.
        limit: number of prompts in the greedy test.
        max_new_tokens: longest answer of the greedy test.
        sampled_prompts: number of prompts in the sampling test, from the start; 0 skips the test.
        sampled_tokens: longest answer of the sampling test.
        bias: size of the bias to detect: mean total variation distance over emitted tokens between the sampled
            distribution and the target's.
        power: probability of detecting it; bias, power and alpha determine how many answers are sampled.
        alpha: highest probability that the sampling tests, all together, fail lossless methods.
        temperature: temperature of the sampling test.
        batch_size: prompts that are answered together, in rows.
        max_gap: largest allowed logit gap to the best token in the greedy test, if the dtype is not float32.
        dtype: float32, bfloat16 or float16. engine: lean (Llama family), hf (any transformers model, one prompt
            at a time), or auto.
    """

    target: str
    prompts: str
    output: Path
    methods: str = "spec:k=5"
    mid: str | None = None
    acceptance: str | None = None
    limit: int = 20
    max_new_tokens: int = field(default=64, kw_only=True)
    sampled_prompts: int = 4
    sampled_tokens: int = 32
    bias: float = 0.015
    power: float = 0.9
    alpha: float = 1e-3
    temperature: float = field(default=1.0, kw_only=True)
    batch_size: int = 8
    max_gap: float = 0.5
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "limit", "max_new_tokens", "batch_size", "num_threads")
        check_not_negative(self, "sampled_prompts")
        at_least("sampled_tokens", self.sampled_tokens, 2)  # the first one is the prefill's
        for name in ("alpha", "bias", "power"):
            between(name, getattr(self, name), 0, 1)
        if not self.max_gap >= 0:
            raise InputError("max_gap", self.max_gap, "0 or more", "Correct it.")
        if self.sampling.greedy:
            raise InputError("temperature", self.temperature, "more than 0", "The greedy test is always made.")


@dataclass
class SamplingTest:
    """Sampling test of one method in one loop.

    The test may stop as soon as the method has failed (see `evidence`).

    Attributes:
        level: highest probability that a lossless method fails.
        log: receives the number of tokens and the expected seconds before they are spent.
    """

    label: str
    runner: PlacedRunner
    prompts: Sequence[BenchPrompt]
    config: LosslessConfig
    level: float
    log: Callable[[str], None] = print
    evidence: Evidence = field(default_factory=Evidence)
    answers: int = 0
    tokens: int = 0
    wrong_ends: int = 0
    seconds: float = 0.0
    _previous: dict[int, list[int]] = field(default_factory=dict)  # prompt number -> its last answer

    def run(self) -> dict[str, Any]:
        """Sample until the test is decided and return its row of the result."""
        config, first = self.config, list[DecidedTokens]()
        while self.tokens < FIRST_TOKENS and not self.failed:
            first += self._sample()
        growths = {} if self.failed else self._growths(first)
        needed = (min(bet.tokens_needed(config.power, self.level) for bet in bets) for bets in growths.values())
        wanted = max(needed, default=0.0)
        if not self.failed:
            total = max(self.tokens, math.ceil(wanted))
            self.log(
                f"{self.label}, {self.runner.loop} loop: {total:,} tokens in "
                f"{math.ceil(total * self.answers / self.tokens):,} answers find a bias of TV {config.bias:g} with "
                f"probability {config.power:g}; about {self.seconds * (total / self.tokens - 1):.0f} s more"
            )
        while self.tokens < wanted and not self.failed:
            self._sample()

        chances = [max(bet.chance(self.tokens, self.level) for bet in bets) for bets in growths.values()]
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "p_value": self.evidence.p_value,
            "level": self.level,
            "strongest_bet": self.evidence.strongest,
            "impossible": self.evidence.impossible,
            "wrong_ends": self.wrong_ends,
            "bias": config.bias,
            "found_with": min(chances, default=None),
            "passed": not self.failed,
        }

    @property
    def failed(self) -> bool:
        return self.wrong_ends > 0 or not self.evidence.p_value > self.level

    def _growths(self, sample: list[DecidedTokens]) -> dict[str, list[BetGrowth]]:
        """Compute the growth of the bets from tokens spread evenly over a sample."""
        columns = zip(*(vars(part).values() for part in sample), strict=True)
        tokens = DecidedTokens(*(torch.cat(parts) for parts in columns))
        count = min(POWER_TOKENS, max(1, POWER_CELLS // tokens.target.shape[1]), len(tokens.token))
        index = torch.linspace(0, len(tokens.token) - 1, count).long().to(tokens.token.device)
        return growth_of_biases(tokens.take(index), self.config.bias)

    def _sample(self) -> list[DecidedTokens]:
        """Sample one group of answers, bet on their tokens, and return them."""
        started = time.perf_counter()
        config, target = self.config, self.runner.target
        numbers = range(self.answers, self.answers + config.batch_size)
        places = [number % len(self.prompts) for number in numbers]
        ids = [self.prompts[place].prompt_ids for place in places]
        seeds = [
            answer_seed(config.seed, self.label, self.runner.loop, self.prompts[place].id, number)
            for place, number in zip(places, numbers, strict=True)
        ]
        answers = self.runner(ids, config.sampling, config.sampled_tokens, seeds)
        self.answers += len(answers)

        decided = []
        for place, prompt, answer in zip(places, ids, answers, strict=True):
            limit = room_for(prompt, config.sampled_tokens, target.info)
            self.wrong_ends += not ends_as_asked(answer.tokens, self.runner.ends, limit)
            if not answer.tokens:
                continue
            tokens = self._decided(prompt, answer, self._previous.get(place, []))
            self._previous[place] = answer.tokens
            self.tokens += len(answer.tokens)
            rows = max(1, CELLS // tokens.target.shape[1])
            for start in range(0, len(tokens.token), rows):
                self.evidence.add(tokens.take(slice(start, start + rows)))
            decided.append(tokens)
        self.seconds += time.perf_counter() - started
        return decided

    @torch.inference_mode()
    def _decided(self, prompt: Sequence[int], answer: PlacedAnswer, previous: list[int]) -> DecidedTokens:
        """Read an answer's tokens under the target in one forward.

        Tokens of probability 0 are counted as impossible unless rounding explains them, and left out.
        """
        lm = self.runner.target
        ids = torch.tensor([[*prompt, *answer.tokens]], device=lm.device)
        logits = lm.lm_head(lm.features(ids)[0, len(prompt) - 1 : -1])  # [N, V]
        target = probabilities(logits, self.config.sampling).double()
        token = ids[0, len(prompt) :]
        draft, children = torch.zeros_like(target), torch.zeros_like(target, dtype=torch.bool)
        for row, place in enumerate(answer.places):
            if place.distribution is not None:
                draft[row] = place.distribution
            children[row, list(place.children)] = True
        first = torch.tensor([place.first for place in answer.places], device=lm.device)
        equal = [answer.tokens[:i] == previous[:i] and i < len(previous) for i in range(len(answer.tokens))]
        copied = torch.tensor([previous[i] if same else -1 for i, same in enumerate(equal)], device=lm.device)
        tokens = DecidedTokens(token, target, draft, children, first, copied)

        emittable = target.gather(1, token[:, None])[:, 0] > 0
        if bool(emittable.all()):
            return tokens
        self.evidence.impossible += int((~self._possible_by_rounding(logits, token) & ~emittable).sum())
        return tokens.take(emittable)

    def _possible_by_rounding(self, logits: Tensor, token: Tensor) -> Tensor:
        """Return [N] bool: a slightly larger logit, or top_p, would keep the token."""
        params, tied = self.config.sampling, TIED_LOGIT.get(self.runner.target.dtype, self.config.max_gap)
        wider = SamplingParams(params.temperature, params.top_k, min(1.0, params.top_p + TIED_MASS))
        raised = logits.float() + tied * F.one_hot(token, logits.shape[1])
        return probabilities(raised, wider).gather(1, token[:, None])[:, 0] > 0
