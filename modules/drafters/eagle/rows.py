"""An EAGLE head drafts a chain for each of several sequences (`eagle.py` for one)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.chains import BatchOutcome, Chains, draft_chains, reset_policies, to_device
from draftsmith.modules.decoding.protocols import StopPolicy
from draftsmith.modules.drafters.eagle.net import EagleNet
from draftsmith.modules.graphs import Graphed
from draftsmith.modules.lean import LeanStack
from draftsmith.modules.lean_rows import RowsStack
from draftsmith.modules.packed import LeanLinear
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams


class BatchEagle:
    """Every round begins with one forward over what the last one emitted, with TRUE target features, padded to one
    width; a row's draft starts at its last valid input. Inputs drafted on the head's own features are written over by
    the next round's (EAGLE, section 4.3). A row that may draft no more in one round never does again.
    """

    model = "eagle"

    def __init__(
        self,
        head: EagleNet,
        target: CausalLM,
        stops: Sequence[StopPolicy],
        capacity: int,
        static: bool | None = None,
    ):
        """stops: one policy for each row. capacity: most tokens a row may reach. static: fixed shapes; None takes them
        on CUDA only."""
        self._target, self.stops = target, list(stops)
        self._fc = LeanLinear(head.fc.weight, head.fc.bias, target.packed)
        layers: list = list(head.layers)
        self._stack = LeanStack(layers, head.config.llama, target.dtype, target.device, pack=target.packed)
        self._positions = min(capacity, head.config.llama.max_position)
        self._rows = RowsStack(self._stack, len(stops), self._positions)
        self._static = target.device.type == "cuda" if static is None else static
        self._forward = Graphed(self._read)
        self.max_drafted = max(stop.max_drafted for stop in stops)
        self._stops: list[StopPolicy] = []
        self._tokens: list[list[int]] = []  # each row's, committed
        self._read_rows: list[int] = []  # inputs of each row that the head has read with true features
        self._num_drafted: list[int] = []

    def start(self, prompts: Sequence[Sequence[int]], features: Sequence[Tensor], first_tokens: Sequence[int]) -> None:
        self._stops = reset_policies(self.stops, len(prompts))
        for row, prompt in enumerate(prompts):
            if 1 < len(prompt) <= self._positions:  # a longer one leaves no room for drafts
                ids = to_device(prompt[1:], self._target.device)
                self._stack.chain(self._fuse(ids, features[row][:-1]), self._rows.fresh(row))
        self._tokens = [[*prompt, token] for prompt, token in zip(prompts, first_tokens, strict=True)]
        self._read_rows = [len(prompt) - 1 for prompt in prompts]
        # The inputs of the next round: ids [B, n], features [B, n, H], of which each row's first `_num_new` are valid.
        self._ids = to_device(first_tokens, self._target.device)[:, None]
        self._features = torch.stack([own[-1:] for own in features])
        self._num_new = [1] * len(prompts)
        self._num_drafted = [0] * len(prompts)

    def propose(self, limits: Sequence[int], params: SamplingParams, uniforms: Tensor) -> Chains | None:
        ends = [read + new for read, new in zip(self._read_rows, self._num_new, strict=True)]
        limits = [min(limit, self._positions - end + 1) for limit, end in zip(limits, ends, strict=True)]
        self._num_drafted = [0] * len(limits)
        if max(limits) < 1:
            return None
        device = self._target.device
        starts = to_device(self._read_rows, device)
        last = to_device(self._num_new, device) - 1
        longest, width = max(ends), max(self._read_rows) + self._ids.shape[1]
        logits, hidden = self._extend(self._ids, self._features, starts, last, width)
        starts, first = starts + last + 1, torch.zeros_like(last)

        def step(j: int, tokens: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal hidden
            logits, hidden = self._extend(tokens[:, None], hidden[:, None], starts + j, first, longest + 1 + j)
            return logits, hidden

        chains = draft_chains(logits, hidden, step, self._stops, limits, params, uniforms, self._tokens)
        self._num_drafted = chains.num_drafted
        return chains

    def _extend(self, ids: Tensor, features: Tensor, starts: Tensor, last: Tensor, end: int) -> tuple[Tensor, Tensor]:
        span = self._rows.span(end, self._static)
        logits, hidden = self._forward(ids, features, starts, last, static=(span,))
        return logits, hidden

    def _read(self, ids: Tensor, features: Tensor, starts: Tensor, last: Tensor, span: int) -> tuple[Tensor, Tensor]:
        """Inputs (x_{t+1}, f_t), ids [B, n] and features [B, n, H], fed after starts [B] others: logits [B, V] and
        hidden [B, H] of input last[b]."""
        hidden = self._rows.forward(self._fuse(ids, features), starts, span)
        hidden = hidden[torch.arange(len(last), device=last.device), last]
        return self._target.lm_head(hidden), hidden

    def _fuse(self, ids: Tensor, features: Tensor) -> Tensor:
        return self._fc(torch.cat([self._target.embed(ids), features], -1))

    def advance(self, outcome: BatchOutcome) -> None:
        self._ids, self._features = outcome.tokens, outcome.features
        for row, emitted in enumerate(outcome.emitted):
            self._tokens[row] += emitted
            self._read_rows[row] += self._num_new[row]
            self._num_new[row] = len(emitted)
            if not outcome.done[row]:
                self._stops[row].observe(self._num_drafted[row], len(emitted) - 1)

    def select(self, rows: Tensor) -> None:
        self._rows.select(rows)
        kept = rows.tolist()
        self._ids, self._features = self._ids[rows], self._features[rows]
        self._stops = [self._stops[row] for row in kept]
        self._tokens = [self._tokens[row] for row in kept]
        self._read_rows = [self._read_rows[row] for row in kept]
        self._num_new = [self._num_new[row] for row in kept]
