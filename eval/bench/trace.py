"""Traces: one JSON line a round, to study where a method loses its time or its tokens.

A round keeps distributions and logits; they are worked out when the answer is complete, off the clock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from draftsmith.eval.bench.measuring import prompt_seed
from draftsmith.eval.bench.results import BASELINE, Row
from draftsmith.eval.bench.runner import EngineRunner, make_runners
from draftsmith.eval.clock import Stopwatch, Timed, wall_time
from draftsmith.eval.settings import BenchConfig
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.stop import DraftView, PredictorStop, SlotConfidenceStop, StopPolicy
from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.decoding.verify import Verdict, verify
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import LabeledMethod
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.checkpoint import checkpoint_of
from draftsmith.modules.pretrained.files import append, write_json, write_text
from draftsmith.modules.sampling import Sampler
from draftsmith.modules.types import SamplingParams

TRACE, TEXTS = "trace.jsonl", "texts.json"  # of a run of `eval bench`


@dataclass(frozen=True)
class TracedRound:
    """Round with the seconds of its target call and of its draft.

    views: what the stop policy saw. predicted: probabilities of acceptance of the first of these tokens.
    """

    done: Round
    target_s: float
    draft_s: float
    views: Sequence[DraftView] = ()
    predicted: Sequence[float] = ()

    def line(self, params: SamplingParams) -> dict[str, Any]:
        """Return the round as JSON values."""
        done, tree = self.done, self.done.tree
        line: dict[str, Any] = {"emitted": done.tokens, "target_s": self.target_s}
        if tree is None or done.verdict is None or done.step is None:
            return {**line, "prefill": True}
        line |= {
            "drafted": list(tree.tokens),
            "parents": list(tree.parents),
            "accepted": list(done.verdict.path),
            "next_token": done.verdict.next_token,
            **asdict(done.step),
            "draft_s": self.draft_s,
        }
        if tree.tokens:
            line["accept_prob"] = node_accept_probs(tree, done.verdict, done.logits, params)
        if tree.draft_prob is not None:
            line["q"] = [float(own[token]) for own, token in zip(tree.draft_prob, tree.tokens, strict=True)]
        if tree.values is not None:
            line["value"] = list(tree.values)
        if self.views:
            line["entropy"] = [view.entropy for view in self.views]
            if tree.draft_prob is None:
                line["q"] = [view.prob for view in self.views]
        if self.predicted:
            line["head"] = list(self.predicted)
        return line


def predicted(stop: StopPolicy, count: int) -> Sequence[float]:
    """Return the probabilities of acceptance of the first of `count` drafted tokens, by the policy that drafted
    them."""
    if isinstance(stop, SlotConfidenceStop):
        return stop.probs[:count]
    if not count or not isinstance(stop, PredictorStop):
        return ()
    # A late predictor speaks of the token before: its first prediction is of none.
    return stop.probs[int(stop.predictor.late) :]


def traced(runner: EngineRunner, prompt: Sequence[int], max_new_tokens: int, seed: int) -> list[TracedRound]:
    """Decode an answer and return its rounds. runner: with a session of its target's."""
    target_watch, draft_watch = Stopwatch(wall_time), Stopwatch(wall_time)
    chains = runner.drafter if isinstance(runner.drafter, ChainDrafter) else None
    rounds, views = list[TracedRound](), list[DraftView]()

    def on_round(done: Round) -> None:
        # On a GPU logits are valid until the next call only.
        if done.logits is not None and done.logits.is_cuda:
            done = replace(done, logits=done.logits.clone())
        of_head = () if chains is None else predicted(chains.stop, len(views))
        rounds.append(TracedRound(done, target_watch.take(), draft_watch.take(), tuple(views), tuple(of_head)))
        views.clear()

    session: Any = Timed(runner.session, target_watch, "extend")
    drafter: Any = None if runner.drafter is None else Timed(runner.drafter, draft_watch, "propose")
    if chains is not None:
        chains.on_token = views.append
    try:
        replace(runner, session=session, drafter=drafter, on_round=on_round)(prompt, max_new_tokens, seed)
        return rounds
    finally:
        if chains is not None:
            chains.on_token = None


def node_accept_probs(
    tree: DraftTree, verdict: Verdict, logits: Tensor | None, params: SamplingParams
) -> list[float | None]:
    """Return the probability that the target accepts each drafted node that it verified.

    Verified are the children of the root and of accepted nodes; of drawn children those up to the accepted one. A drawn
    token: min(1, p/q), with p and q as recursive rejection leaves them after its rejected siblings. One that was chosen
    (top-k children, lookups): p, since it is accepted where the target's own draw is it. Greedy: 1 or 0. A chain's
    list ends with the first rejected token; in a tree's, nodes that were not verified are None.

    logits: [N+1, V] of the target.
    """
    if params.greedy:
        reached = {-1, *verdict.path}
        probs = {i: float(i in verdict.path) for i, parent in enumerate(tree.parents) if parent in reached}
    else:
        assert logits is not None
        source = _Replay(tree, verdict)
        verify(tree, logits, Sampler(params, source), ahead=False)
        probs = source.probs
    return [probs.get(node) for node in range(len(probs) if tree.is_chain else len(tree.tokens))]


class _Replay:
    """Source that decides as a verdict did, and records the probability of each decision about a node.

    probs: node -> probability of its acceptance.
    """

    def __init__(self, tree: DraftTree, verdict: Verdict):
        self._tree, self._verdict, self._parent = tree, verdict, -1
        self.probs: dict[int, float] = {}

    def accept(self, prob: float) -> bool:
        node = next(node for node in self._children() if node not in self.probs)
        self.probs[node] = prob
        accepted = node in self._verdict.path
        self._parent = node if accepted else self._parent
        return accepted

    def draw(self, probs: Tensor) -> int:
        children = self._children()
        if self._tree.draft_prob is None and self._tree.drawn is None:
            # Of equal siblings the first is accepted.
            first = {self._tree.tokens[node]: node for node in reversed(children)}
            self.probs |= dict.fromkeys(children, 0.0) | {node: float(probs[token]) for token, node in first.items()}
        node = next((node for node in children if node in self._verdict.path), None)
        if node is None:
            return self._verdict.next_token
        self._parent = node
        return self._tree.tokens[node]

    def _children(self) -> list[int]:
        return [node for node, parent in enumerate(self._tree.parents) if parent == self._parent]


def write_traces(config: BenchConfig, rows: Sequence[Row], named: Sequence[LabeledMethod], models: Models) -> None:
    """Answer the first prompts of each task once more, off the clock, and write trace.jsonl and texts.json.

    texts.json holds `tokens`, the text of every token in the trace by its id, and `prompts`, their text by number and
    turn, "0/1".
    """
    # The first questions of each task, with all their turns.
    baseline = [row for row in rows if row["method"] == BASELINE and row["error"] is None]
    numbers: dict[str, list[int]] = {}
    for row in baseline:
        own = numbers.setdefault(row["task"], [])
        if row["prompt"] not in own and len(own) < config.traces:
            own.append(row["prompt"])
    baseline = [row for row in baseline if row["prompt"] in numbers[row["task"]]]

    # Fresh runners: methods that learn begin anew.
    runners = make_runners(named, models, config.modes)
    ids: set[int] = set()
    write_text(config.output / TRACE, "")
    for row in baseline:
        place = {"prompt": row["prompt"], "id": row["id"], "task": row["task"], "turn": row["turn"]}
        for label, runner in runners[row["temperature"]].items():
            seed = prompt_seed(config.seed, row["prompt"], row["turn"])
            rounds = traced(runner, row["prompt_ids"], config.max_new_tokens, seed)
            where = {"method": label, "temperature": row["temperature"], **place}
            lines = [{**where, "round": number, **done.line(runner.params)} for number, done in enumerate(rounds)]
            append(config.output / TRACE, "".join(json.dumps(line) + "\n" for line in lines))
            for done in (traced_round.done for traced_round in rounds):
                ids.update(done.tokens, done.tree.tokens if done.tree else ())
    tokenizer = checkpoint_of(models.target).tokenizer
    tokens = {str(token): tokenizer.decode([token]) for token in sorted(ids)}
    prompts = {f"{row['prompt']}/{row['turn']}": tokenizer.decode(row["prompt_ids"]) for row in baseline}
    write_json(config.output / TEXTS, {"tokens": tokens, "prompts": prompts})
