"""Traces: one JSON line a round, for reports and for studying where a method loses its time or its tokens.

What a line holds is collected while decoding and worked out between prompts, off the clock: a traced run keeps
references to distributions and logits, and the arithmetic on them comes later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.data.models.loading import load_tokenizer
from draftsmith.data.store.files import append, make_directory, write_json, write_text
from draftsmith.data.store.reading import read_lines
from draftsmith.eval.bench.hf_baseline import HFAssisted, HFGenerate
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.runner import EngineRunner, RunnerSettings, engine_runners
from draftsmith.eval.cost.clock import Stopwatch, wall_time
from draftsmith.modules.acceptance.policies import PredictorStop
from draftsmith.modules.decoding.confidence import draft_distribution
from draftsmith.modules.decoding.loop import Generation, Round
from draftsmith.modules.decoding.protocols import Drafter, DraftTree, DraftView, StopPolicy, Verdict
from draftsmith.modules.decoding.stop import Around, entropy
from draftsmith.modules.drafters.methods import Models, Named
from draftsmith.modules.drafters.row_drafter import RowDrafter
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.targets.base import CausalLM, Session
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


def place_of(label: str, temperature: float, prompt: BenchPrompt) -> dict[str, Any]:
    """What a line says of its place in the run."""
    own = {"prompt": prompt.number, "id": prompt.id, "task": prompt.task, "turn": prompt.turn}
    return {"method": label, "temperature": temperature, **own}


class TracedRunner:
    """An `EngineRunner` whose answers are traced. place: what every line begins with (`place_of`)."""

    def __init__(self, place: Mapping[str, Any], runner: EngineRunner, file: TraceFile):
        self._place, self._runner, self._file = dict(place), runner, file

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]) -> list[Generation]:
        return [self._answer(prompt, max_new_tokens, seed) for prompt, seed in zip(prompts, seeds, strict=True)]

    def _answer(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        runner, target_watch, draft_watch = self._runner, Stopwatch(wall_time), Stopwatch(wall_time)
        drafter = None if runner.drafter is None else _TimedDrafter(runner.drafter, draft_watch)
        chains = runner.drafter if isinstance(runner.drafter, RowDrafter) else None
        stop = None if chains is None else chains.wrap_stops(_WatchedStop)[0]
        rounds = _Rounds(self._place, runner.params, target_watch, draft_watch, stop, self._file)

        def on_round(done: Round) -> None:
            rounds(done)
            if runner.on_round is not None:
                runner.on_round(done)

        target: Any = _TimedTarget(runner.target, target_watch)
        try:
            traced = replace(runner, target=target, drafter=drafter, on_round=on_round, session=None)
            return traced([prompt], max_new_tokens, [seed])[0]
        finally:
            if chains is not None:
                chains.wrap_stops(lambda around: around.policy)


class _Rounds:
    """`on_round`: one line a round."""

    def __init__(
        self,
        place: Mapping[str, Any],
        params: SamplingParams,
        target_watch: Stopwatch,
        draft_watch: Stopwatch,
        stop: _WatchedStop | None,
        file: TraceFile,
    ):
        self._place, self._params = place, params
        self._target, self._drafter, self._stop, self._file = target_watch, draft_watch, stop, file
        self._number = 0

    def __call__(self, done: Round) -> None:
        target_s, draft_s = self._target.take(), self._drafter.take()
        views, predicted = self._stop.take() if self._stop is not None else ([], [])
        place, number, params = self._place, self._number, self._params
        self._number += 1
        # On CUDA scores are good until the next call only.
        logits = done.logits.clone() if done.logits is not None and done.logits.is_cuda else done.logits

        def line() -> dict[str, Any]:
            found: dict[str, Any] = {**place, "round": number, "emitted": done.tokens, "target_s": target_s}
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
                found["q"] = [
                    float(distribution[token]) for distribution, token in zip(tree.draft_prob, tree.tokens, strict=True)
                ]
            if tree.values is not None:
                found["value"] = list(tree.values)
            return found | _looked_at(views, predicted, tree.draft_prob)

        self._file.add(line)


def _looked_at(views: Sequence[DraftView], predicted: Sequence[float], distributions: Tensor | None) -> dict[str, Any]:
    """What the stop policy could see of each drafted token. predicted: what it said of the first of them."""
    if not views:
        return {}
    own = [draft_distribution(view) for view in views]
    found: dict[str, Any] = {"entropy": [entropy(distribution) for distribution in own]}
    if distributions is None:
        found["q"] = [float(distribution[view.token]) for distribution, view in zip(own, views, strict=True)]
    if predicted:
        found["head"] = list(predicted)
    return found


def accept_probs(
    tree: DraftTree, verdict: Verdict, logits: Tensor | None, params: SamplingParams
) -> list[float | None]:
    """The chance that the target had of accepting each drafted node that it verified.

    Verified are the children of the root and of accepted nodes. A drawn token: min(1, p/q). One that was chosen (top-k
    children, lookups): p, since it is accepted where the target's own draw is it. Greedy: 1 or 0. A chain's list ends
    with the first rejected token; in a tree's, nodes that were not verified are None. logits: [N+1, V] of the target.
    """
    walked = {-1, *verdict.path}
    verified = [parent in walked for parent in tree.parents]
    count = sum(verified) if tree.is_chain else len(verified)
    if params.greedy:
        return [float(node in verdict.path) if verified[node] else None for node in range(count)]
    assert logits is not None
    rows = sorted({tree.parents[node] + 1 for node in range(count) if verified[node]})
    distributions = dict(zip(rows, probabilities(logits[rows], params), strict=True))
    found: list[float | None] = []
    for node, token in enumerate(tree.tokens[:count]):
        if not verified[node]:
            found.append(None)
            continue
        p = float(distributions[tree.parents[node] + 1][token])
        q = 1.0 if tree.draft_prob is None else float(tree.draft_prob[node, token])
        found.append(min(1.0, p / q))
    return found


class _TimedTarget:
    """A target whose sessions' forwards are timed."""

    def __init__(self, lm: CausalLM, watch: Stopwatch):
        self._lm, self._watch = lm, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def session(self, *args: Any, **how: Any) -> Any:
        return _TimedSession(self._lm.session(*args, **how), self._watch)


class _TimedSession:
    def __init__(self, session: Session, watch: Stopwatch):
        self._session, self.extend = session, watch.timed(session.extend)
        self.reset, self.keep, self.select = session.reset, session.keep, session.select
        self.capture, self.static = session.capture, session.static

    @property
    def lengths(self) -> Sequence[int]:
        return self._session.lengths


class _TimedDrafter:
    """A drafter whose proposals are timed."""

    def __init__(self, drafter: Drafter, watch: Stopwatch):
        self.capture, self.propose = drafter.capture, watch.timed(drafter.propose)
        self.start, self.advance, self.select = drafter.start, drafter.advance, drafter.select


class _WatchedStop(Around):
    """A stop policy that remembers what it was shown in this round."""

    def __init__(self, policy: StopPolicy):
        super().__init__(policy)
        self._views: list[DraftView] = []

    def should_stop(self, view: DraftView) -> bool:
        self._views.append(view)
        return super().should_stop(view)

    def take(self) -> tuple[list[DraftView], list[float]]:
        """What was shown in this round, and of the first tokens the probabilities that they are accepted, by a
        predictor's word: a late one says nothing of a round's last token, and 1 before it has one to speak of."""
        views, self._views = self._views, []
        policy = self.innermost
        if not views or not isinstance(policy, PredictorStop):
            return views, []
        return views, policy.probs[int(policy.predictor.late) :]


def first_of_each_task(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The baseline's rows that hold the first `count` questions of each task, in all their turns."""
    numbers: dict[str, list[int]] = {}
    for row in rows:
        seen = numbers.setdefault(row["task"], [])
        if row["prompt"] not in seen and len(seen) < count:
            seen.append(row["prompt"])
    return [row for row in rows if row["prompt"] in numbers[row["task"]]]


def trace_prompts(
    directory: Path,
    rows: Sequence[Mapping[str, Any]],
    named: Sequence[Named],
    models: Models,
    how: RunnerSettings,
    max_new_tokens: int,
    seeds: Callable[[Sequence[BenchPrompt]], Sequence[int]],
) -> None:
    """One more run of every method of this engine on the prompts of these rows, off the clock: trace.jsonl.

    rows: of the baseline, with prompt_ids.
    """
    engine: dict[float, dict[str, EngineRunner]] = {params.temperature: {} for params in how.modes}
    for item in named:
        if not isinstance(item.method, HFGenerate | HFAssisted):
            for runner in engine_runners(item.method, models, how):
                engine[runner.params.temperature][item.label] = runner
    file = TraceFile(directory / TRACE)
    for row in rows:
        prompt = BenchPrompt(row["id"], list(row["prompt_ids"]), row["task"], turn=row["turn"], number=row["prompt"])
        for label, runner in engine[row["temperature"]].items():
            traced = TracedRunner(place_of(label, row["temperature"], prompt), runner, file)
            traced([prompt.prompt_ids], max_new_tokens, seeds([prompt]))
            file.flush()


def write_texts(directory: Path, target: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """texts.json, what trace.jsonl reads like: `tokens`, the text of every token in it by its id, and `prompts`, one
    for each of the traced rows by its number and turn, "0/1"."""
    tokenizer = load_tokenizer(target)
    ids: set[int] = set()
    for found in read_lines(directory / TRACE, {"emitted": [int], "drafted?": [int]}):
        ids |= {*found["emitted"], *found.get("drafted", ())}
    tokens = {str(i): tokenizer.decode([i]) for i in sorted(ids)}
    prompts = {f"{row['prompt']}/{row['turn']}": tokenizer.decode(row["prompt_ids"]) for row in rows}
    write_json(directory / TEXTS, {"tokens": tokens, "prompts": prompts})
