"""Traces: one JSON line a round, to study where a method loses its time or its tokens.

A round keeps distributions and logits; they are worked out when the answer is complete, off the clock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from draftsmith.eval.bench.measuring import prompt_seed
from draftsmith.eval.bench.results import BASELINE, Row
from draftsmith.eval.bench.runner import BASELINES, EngineRunner, make_runners
from draftsmith.eval.clock import Stopwatch, Timed, wall_time
from draftsmith.modules.acceptance.policies import PredictorStop
from draftsmith.modules.decoding.confidence import draft_distribution
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.protocols import DraftTree, DraftView, StopPolicy, Verdict
from draftsmith.modules.decoding.stop import Around, entropy
from draftsmith.modules.decoding.verify import verify
from draftsmith.modules.drafters.block.drafter import ConfidenceCut
from draftsmith.modules.drafters.methods import Models, Named
from draftsmith.modules.drafters.row_drafter import RowDrafter
from draftsmith.modules.pretrained.files import append, write_json, write_text
from draftsmith.modules.pretrained.tokenizers import load_tokenizer
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
            "num_drafted": done.step.num_drafted,
            "num_accepted": done.step.num_accepted,
            "num_emitted": done.step.num_emitted,
            "draft_calls": done.step.draft_calls,
            "draft_s": self.draft_s,
        }
        if tree.tokens:
            line["accept_prob"] = node_accept_probs(tree, done.verdict, done.logits, params)
        if tree.last_unread:
            line["beside"] = "the drafter's calls of this round could run beside the target's"
        if tree.draft_prob is not None:
            line["q"] = [float(own[token]) for own, token in zip(tree.draft_prob, tree.tokens, strict=True)]
        if tree.values is not None:
            line["value"] = list(tree.values)
        if self.views:
            distributions = [draft_distribution(view) for view in self.views]
            line["entropy"] = [entropy(distribution) for distribution in distributions]
            if tree.draft_prob is None:
                line["q"] = [float(own[view.token]) for own, view in zip(distributions, self.views, strict=True)]
                # As llama.cpp's --spec-draft-p-min reads them: the greedy token's share of the ten most probable.
                line["q_top10"] = [
                    q / float(own.topk(min(10, len(own))).values.sum())
                    for q, own in zip(line["q"], distributions, strict=True)
                ]
        if self.predicted:
            line["head"] = list(self.predicted)
        return line


class WatchedStop(Around):
    """Stop policy that records what it saw in a round."""

    def __init__(self, policy: StopPolicy):
        super().__init__(policy)
        self._views: list[DraftView] = []

    def should_stop(self, view: DraftView) -> bool:
        self._views.append(view)
        return super().should_stop(view)

    def take(self) -> tuple[list[DraftView], list[float]]:
        """Return the views of this round, and its predictor's probabilities of the first tokens."""
        views, self._views = self._views, []
        policy = self.innermost
        if isinstance(policy, ConfidenceCut):
            return views, policy.probs[: len(views)]
        if not views or not isinstance(policy, PredictorStop):
            return views, []
        # A late predictor speaks of the token before: its first word is of none.
        return views, policy.probs[int(policy.predictor.late) :]


def traced(runner: EngineRunner, prompt: Sequence[int], max_new_tokens: int, seed: int) -> list[TracedRound]:
    """Decode an answer and return its rounds. runner: with a session of its target's."""
    target_watch, draft_watch = Stopwatch(wall_time), Stopwatch(wall_time)
    chains = runner.drafter if isinstance(runner.drafter, RowDrafter) else None
    stop = None if chains is None else chains.wrap_stops(WatchedStop)[0]
    rounds: list[TracedRound] = []

    def on_round(done: Round) -> None:
        # On a GPU logits are valid until the next call only.
        if done.logits is not None and done.logits.is_cuda:
            done = replace(done, logits=done.logits.clone())
        rounds.append(TracedRound(done, target_watch.take(), draft_watch.take(), *(stop.take() if stop else ())))

    session: Any = Timed(runner.session, target_watch, "prefill", "extend")
    drafter: Any = None if runner.drafter is None else Timed(runner.drafter, draft_watch, "propose")
    try:
        replace(runner, session=session, drafter=drafter, on_round=on_round)([prompt], max_new_tokens, [seed])
        return rounds
    finally:
        if chains is not None:
            chains.wrap_stops(lambda around: around.policy)


def node_accept_probs(
    tree: DraftTree, verdict: Verdict, logits: Tensor | None, params: SamplingParams
) -> list[float | None]:
    """Return the probability that the target accepts each drafted node that it verified.

    Verified are the children of the root and of accepted nodes; of drawn children those up to the accepted one. A drawn
    token: min(1, p/q), with p and q as recursive rejection leaves them after its rejected siblings. One that was chosen
    (top-k children, lookups): p, since it is accepted where the target's own draw is it. Greedy and typical acceptance:
    1 or 0. A chain's list ends with the first rejected token; in a tree's, nodes that were not verified are None.

    logits: [N+1, V] of the target.
    """
    if params.greedy or tree.typical is not None:
        reached = {-1, *verdict.path}
        probs = {i: float(i in verdict.path) for i, parent in enumerate(tree.parents) if parent in reached}
    else:
        assert logits is not None
        source = _Replay(tree, verdict)
        verify([tree], logits[None], params, [source], ahead=False)
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
            assert self._verdict.next_token is not None
            return self._verdict.next_token
        self._parent = node
        return self._tree.tokens[node]

    def _children(self) -> list[int]:
        return [node for node, parent in enumerate(self._tree.parents) if parent == self._parent]


def write_traces(
    directory: Path,
    rows: Sequence[Row],
    count: int,
    named: Sequence[Named],
    models: Models,
    modes: Sequence[SamplingParams],
    max_new_tokens: int,
    seed: int,
) -> None:
    """Answer the first `count` prompts of each task once more, off the clock, and write trace.jsonl and texts.json.

    texts.json holds `tokens`, the text of every token in the trace by its id, and `prompts`, their text by number and
    turn, "0/1".

    rows: of the run. seed: of the run.
    """
    # The first questions of each task, with all their turns.
    baseline = [row for row in rows if row["method"] == BASELINE and row["error"] is None]
    numbers: dict[str, list[int]] = {}
    for row in baseline:
        own = numbers.setdefault(row["task"], [])
        if row["prompt"] not in own and len(own) < count:
            own.append(row["prompt"])
    baseline = [row for row in baseline if row["prompt"] in numbers[row["task"]]]

    # Fresh runners: methods that learn begin anew, and transformers' own have no rounds to trace.
    runners: Any = make_runners([item for item in named if type(item.method) not in BASELINES.values()], models, modes)
    ids: set[int] = set()
    write_text(directory / TRACE, "")
    for row in baseline:
        place = {"prompt": row["prompt"], "id": row["id"], "task": row["task"], "turn": row["turn"]}
        for label, runner in runners[row["temperature"]].items():
            rounds = traced(runner, row["prompt_ids"], max_new_tokens, prompt_seed(seed, row["prompt"], row["turn"]))
            where = {"method": label, "temperature": row["temperature"], **place}
            lines = [{**where, "round": number, **done.line(runner.params)} for number, done in enumerate(rounds)]
            append(directory / TRACE, "".join(json.dumps(line) + "\n" for line in lines))
            for done in (traced_round.done for traced_round in rounds):
                ids.update(done.tokens, done.tree.tokens if done.tree else ())
    tokenizer = load_tokenizer(models.paths["target"])
    tokens = {str(token): tokenizer.decode([token]) for token in sorted(ids)}
    prompts = {f"{row['prompt']}/{row['turn']}": tokenizer.decode(row["prompt_ids"]) for row in baseline}
    write_json(directory / TEXTS, {"tokens": tokens, "prompts": prompts})
