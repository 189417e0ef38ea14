"""Traces: one JSON line a round, to study where a method loses its time or its tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from draftsmith.eval.bench.measuring import prompt_seed
from draftsmith.eval.bench.results import BASELINE, Row
from draftsmith.eval.bench.runner import EngineRunner, make_runners
from draftsmith.eval.clock import Stopwatch, Timed, wall_time
from draftsmith.eval.settings import BenchConfig
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.drafters.method import Models
from draftsmith.modules.drafters.method_names import LabeledMethod
from draftsmith.modules.pretrained.checkpoint import checkpoint_of
from draftsmith.modules.pretrained.files import append, write_json, write_text

TRACE, TEXTS = "trace.jsonl", "texts.json"  # of a run of `eval bench`


@dataclass(frozen=True)
class TracedRound:
    """Round with the seconds of its target call and of its draft."""

    done: Round
    target_s: float
    draft_s: float

    def line(self) -> dict[str, Any]:
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
        if tree.draft_prob is not None:
            line["q"] = [float(own[token]) for own, token in zip(tree.draft_prob, tree.tokens, strict=True)]
        return line


def traced(runner: EngineRunner, prompt: Sequence[int], max_new_tokens: int, seed: int) -> list[TracedRound]:
    """Decode an answer and return its rounds. runner: with a session of its target's."""
    target_watch, draft_watch = Stopwatch(wall_time), Stopwatch(wall_time)
    rounds = list[TracedRound]()

    def on_round(done: Round) -> None:
        rounds.append(TracedRound(replace(done, logits=None), target_watch.take(), draft_watch.take()))

    session: Any = Timed(runner.session, target_watch, "extend")
    drafter: Any = None if runner.drafter is None else Timed(runner.drafter, draft_watch, "propose")
    replace(runner, session=session, drafter=drafter, on_round=on_round)(prompt, max_new_tokens, seed)
    return rounds


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
            lines = [{**where, "round": number, **done.line()} for number, done in enumerate(rounds)]
            append(config.output / TRACE, "".join(json.dumps(line) + "\n" for line in lines))
            for done in (traced_round.done for traced_round in rounds):
                ids.update(done.tokens, done.tree.tokens if done.tree else ())
    tokenizer = checkpoint_of(models.target).tokenizer
    tokens = {str(token): tokenizer.decode([token]) for token in sorted(ids)}
    prompts = {f"{row['prompt']}/{row['turn']}": tokenizer.decode(row["prompt_ids"]) for row in baseline}
    write_json(config.output / TEXTS, {"tokens": tokens, "prompts": prompts})
