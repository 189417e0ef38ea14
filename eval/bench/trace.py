"""Traces: one JSON line a round, for reports and for studying where a method loses its time or its tokens.

What a line holds is collected while decoding and worked out between prompts, off the clock: a traced run keeps
references to laws and logits, and the arithmetic on them comes later.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.models.naming import naming
from draftsmith.data.store.files import append, make_directory, write_text
from draftsmith.eval.bench.measure import BenchPrompt, EngineRunner
from draftsmith.eval.cost.clocks import synchronised
from draftsmith.modules.acceptance.policies import JudgedStop
from draftsmith.modules.decoding.confidence import draft_law
from draftsmith.modules.decoding.loop import Generation, Round, generate_one
from draftsmith.modules.decoding.protocols import DraftTree, DraftView, Verdict
from draftsmith.modules.decoding.stop import entropy
from draftsmith.modules.sampling import TorchSource, probabilities
from draftsmith.modules.types import SamplingParams

TRACE, TEXTS = "trace.jsonl", "texts.json"  # of a run of `eval bench`


class TraceFile:
    """Rounds of any number of runners, appended to one JSON-lines file by `flush`."""

    def __init__(self, path: Path):
        self.path = path
        self._pending: list[Callable[[], dict[str, Any]]] = []
        make_directory(path.parent)
        write_text(path, "")

    def add(self, line: Callable[[], dict[str, Any]]) -> None:
        self._pending.append(line)

    def flush(self) -> None:
        """Work out and write what was collected."""
        append(self.path, "".join(json.dumps(line()) + "\n" for line in self._pending))
        self._pending = []


def about(label: str, temperature: float, prompt: BenchPrompt) -> dict[str, Any]:
    """What a line says of where it belongs."""
    own = {"prompt": prompt.number, "id": prompt.id, "task": prompt.task, "turn": prompt.turn}
    return {"method": label, "temperature": temperature, **own}


class TracedRunner:
    """An `EngineRunner` whose answers are traced. about: what every line begins with."""

    def __init__(self, about: Mapping[str, Any], runner: EngineRunner, file: TraceFile):
        self._about, self._runner, self._file = dict(about), runner, file

    def __call__(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        runner = self._runner
        target, drafter = _TimedTarget(runner.target), None
        stop = None
        if runner.drafter is not None:
            drafter = _TimedDrafter(runner.drafter)
            stop = _watch_stop(runner.drafter)
        rounds = _Rounds(self._about, runner.params, target, drafter, stop, self._file)

        def on_round(done: Round) -> None:
            rounds(done)
            if runner.on_round is not None:
                runner.on_round(done)

        try:
            source = TorchSource(seed)
            with naming(paths=runner.paths):
                return generate_one(
                    target, drafter, prompt, runner.params, max_new_tokens, source, runner.eos_ids, on_round=on_round
                )
        finally:
            if stop is not None:
                stop.restore()


class _Rounds:
    """`on_round`: one line a round."""

    def __init__(
        self, about: Mapping[str, Any], params: SamplingParams, target: Any, drafter: Any, stop: Any, file: TraceFile
    ):
        self._base, self._params = about, params
        self._target, self._drafter, self._stop, self._file = target, drafter, stop, file
        self._number = 0

    def __call__(self, done: Round) -> None:
        target_s = self._target.take()
        draft_s = self._drafter.take() if self._drafter is not None else 0.0
        views, judged = self._stop.take() if self._stop is not None else ([], [])
        base, number, params = self._base, self._number, self._params
        self._number += 1
        # On CUDA scores are good until the next call only.
        logits = done.logits.clone() if done.logits is not None and done.logits.is_cuda else done.logits

        def line() -> dict[str, Any]:
            found: dict[str, Any] = {**base, "round": number, "emitted": done.tokens, "target_s": target_s}
            if done.tree is None or done.verdict is None or done.step is None:
                return {**found, "prefill": True}
            tree = done.tree
            found |= {
                "drafted": list(tree.tokens),
                "parents": list(tree.parents),
                "accepted": list(done.verdict.path),
                "next_token": done.verdict.next_token,
                "num_drafted": done.step.num_drafted,
                "num_accepted": done.step.num_accepted,
                "num_emitted": done.step.num_emitted,
                "draft_calls": done.step.draft_calls,
                "draft_s": draft_s,
            }
            if tree.tokens:
                found["accept_prob"] = accept_probs(tree, done.verdict, logits, params)
            if tree.last_unread:
                found["beside"] = "the drafter's calls of this round could run beside the target's"
            if tree.draft_prob is not None:
                found["q"] = [float(law[token]) for law, token in zip(tree.draft_prob, tree.tokens, strict=True)]
            if tree.values is not None:
                found["value"] = list(tree.values)
            return found | _looked_at(views, judged, tree.draft_prob)

        self._file.add(line)


def _looked_at(views: Sequence[DraftView], judged: Sequence[float], laws: Tensor | None) -> dict[str, Any]:
    """What the stop policy could see of each drafted token. judged: what it said of the first of them."""
    if not views:
        return {}
    own = [draft_law(view) for view in views]
    found: dict[str, Any] = {"entropy": [entropy(law) for law in own]}
    if laws is None:
        found["q"] = [float(law[view.token]) for law, view in zip(own, views, strict=True)]
    if judged:
        found["head"] = list(judged)
    return found


def accept_probs(
    tree: DraftTree, verdict: Verdict, logits: Tensor | None, params: SamplingParams
) -> list[float | None]:
    """The chance that the target had of accepting each drafted node that it judged.

    Judged are the children of the root and of accepted nodes. A drawn token: min(1, p/q). One that was chosen (top-k
    children, lookups): p, since it is accepted where the target's own draw is it. Greedy: 1 or 0. A chain's list ends
    with the first rejected token; in a tree's, nodes that were not judged are None. logits: [N+1, V] of the target.
    """
    walked = {-1, *verdict.path}
    judged = [parent in walked for parent in tree.parents]
    count = sum(judged) if tree.is_chain else len(judged)
    if params.greedy:
        return [float(node in verdict.path) if judged[node] else None for node in range(count)]
    assert logits is not None
    rows = sorted({tree.parents[node] + 1 for node in range(count) if judged[node]})
    laws = dict(zip(rows, probabilities(logits[rows], params), strict=True))
    found: list[float | None] = []
    for node, token in enumerate(tree.tokens[:count]):
        if not judged[node]:
            found.append(None)
            continue
        p = float(laws[tree.parents[node] + 1][token])
        q = 1.0 if tree.draft_prob is None else float(tree.draft_prob[node, token])
        found.append(min(1.0, p / q))
    return found


class _Clock:
    """Seconds since the last `take`, summed over calls."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._now = synchronised if torch.cuda.is_initialized() else time.perf_counter

    def timed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        started = self._now()
        result = call(*args, **kwargs)
        self._seconds += self._now() - started
        return result

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _TimedTarget(_Clock):
    """A target whose sessions' forwards are timed."""

    def __init__(self, lm: Any):
        super().__init__()
        self._lm = lm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def session(self, *args: Any, **kwargs: Any) -> Any:
        return _TimedSession(self, self._lm.session(*args, **kwargs))


class _TimedSession:
    def __init__(self, clock: _Clock, session: Any):
        self._clock, self._session = clock, session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def extend(self, *args: Any, **kwargs: Any) -> Any:
        return self._clock.timed(self._session.extend, *args, **kwargs)


class _TimedDrafter(_Clock):
    """A drafter whose proposals are timed."""

    def __init__(self, drafter: Any):
        super().__init__()
        self._drafter = drafter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, *args: Any) -> Any:
        return self.timed(self._drafter.propose, *args)


class _WatchedStop:
    """A stop policy that remembers what it was shown in this round."""

    def __init__(self, drafter: Any):
        self._drafter, self.policy = drafter, drafter.stops[0]
        drafter.stops[0] = self
        self._views: list[DraftView] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def should_stop(self, view: DraftView) -> bool:
        self._views.append(view)
        return self.policy.should_stop(view)

    def restore(self) -> None:
        self._drafter.stops[0] = self.policy

    def take(self) -> tuple[list[DraftView], list[float]]:
        """What was shown in this round, and of the first tokens the probabilities that they are accepted, by a judge's
        word: a late one says nothing of a round's last token, and 1 before it has one to judge."""
        views, self._views = self._views, []
        if not views or not isinstance(self.policy, JudgedStop):
            return views, []
        return views, self.policy.probs[int(self.policy.judge.late) :]


def _watch_stop(drafter: Any) -> _WatchedStop | None:
    """Put a watcher in place of the drafter's stop policy, where it drafts a chain by one."""
    return _WatchedStop(drafter) if hasattr(drafter, "stops") else None
