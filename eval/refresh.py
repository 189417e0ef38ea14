"""`draftsmith refresh`: a head before and after it was trained on for a changed target, and whether that was worth it.

What runs it is launch/refresh.py; here is what is asked, and what two runs of the bench say.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftsmith.data.settings import check_not_negative, check_positive, comma_numbers
from draftsmith.data.store.manifest import Manifest
from draftsmith.data.store.shards import Rows
from draftsmith.data.tables import Column, Table, interval
from draftsmith.data.text.answers import answer_mask, spans
from draftsmith.eval.bench.compare import Bench, check_comparable, paired
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import BASELINE, Row, totals_of
from draftsmith.eval.bench.summary import MeasuredResamples, speedup, tokens_per_s
from draftsmith.eval.bench.tables import mode
from draftsmith.eval.bootstrap import Floats
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.types import InputError

Verdict = Literal["worse", "worth it", "not worth it", "cannot tell"]
# Of several temperatures: the first of these that one of them gives.
DECIDING: tuple[Verdict, ...] = ("worse", "worth it", "cannot tell", "not worth it")
# A bootstrap over fewer is surer than it should be.
LEAST_PROMPTS = 20


@dataclass(frozen=True)
class RefreshConfig(PromptChoice, AnswerLength, Running):
    """Trains a head on for a target that has changed (fine-tuned, merged, quantised), measures it before and after on
    the same held-out prompts, and says whether it was worth it.

    Attributes:
        head: Directory of a trained drafter, ours or an imported one.
        target: The changed target: directory, hub id or embedded:target. Its width, vocabulary and tokenizer are those
            of the one that the head was trained for.
        data: What the changed target answered: `data responses` made with it, or `data features` made of that.
        prompts: Prompts to measure on, as of `eval bench`. Those that `data` answers too are left out.
        output: Directory that receives old (the head as it was, recorded as one of this target), before and after (runs
            of the bench), training, and last refresh.json. A run that was interrupted goes on there.
        limit: Measure on the first so many prompts; 0 takes all.
        temperatures: To measure at, separated by commas; 0 is greedy.
        k: Drafted tokens a round.
        worth: The smallest gain of tau that is worth another head, as a share of it.
        recipe: YAML file of settings of the training, in the place of the shipped configs/refresh.yaml.
        max_steps: Optimizer steps of the training; 0 leaves it to the recipe.
    """

    head: Path
    target: str
    data: Path
    prompts: str
    output: Path
    limit: int = 0
    temperatures: str = "0,1"
    k: int = 5
    worth: float = 0.02
    recipe: Path | None = None
    max_steps: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "k", "max_new_tokens", "num_threads")
        check_not_negative(self, "limit", "max_steps")
        comma_numbers("temperatures", self.temperatures, float)
        if not 0 <= self.worth < 1:
            raise InputError("worth", self.worth, "a share in [0, 1)", "Pass 0.02 for two per cent of tau.")


def also_in(data: Path, prompts: Iterable[BenchPrompt]) -> set[int]:
    """Numbers of the prompts that begin a row of the data: those are not held out of a training on it.

    Raises:
        InputError: all of them do.
    """
    asked: dict[tuple[int, ...], set[int]] = {}
    for prompt in prompts:
        asked.setdefault(tuple(prompt.prompt_ids), set()).add(prompt.number)
    manifest, found = Manifest.read(data), set[int]()
    there = {spec.name for spec in manifest.fields}
    columns: list[str] = [name for name in ("input_ids", "loss_mask", "prompt_length") if name in there]
    for row in Rows(data, manifest, columns).iterate():
        start = next(iter(spans(answer_mask(row))), (0, 0))[0]
        found |= asked.get(tuple(row["input_ids"][:start]), set())
    if len(found) == sum(map(len, asked.values())):
        expected = f"prompts that {data} does not answer"
        raise InputError("prompts", f"{len(found)}, all of which are in the data", expected, "Pass held-out ones.")
    return found


def verdict_of(gain: Sequence[float] | None, prompts: int, worth: float) -> Verdict:
    """What the 95 % interval of tau after by tau before says. worth: the smallest gain that counts."""
    low, high = gain if gain is not None and prompts >= LEAST_PROMPTS else (-math.inf, math.inf)
    if high < 1:
        return "worse"
    if high < 1 + worth:
        return "not worth it"
    return "worth it" if low > 1 + worth else "cannot tell"


def overall(verdicts: Collection[Verdict]) -> Verdict:
    """One for all temperatures: no head that is worse at one of them is recommended."""
    return next(verdict for verdict in DECIDING if verdict in verdicts)


def prompts_needed(value: float, gain: Sequence[float] | None, prompts: int, worth: float) -> int | None:
    """Prompts from which an interval around the same value would tell, as it narrows with their square root."""
    if gain is None:
        return None
    distance = max(abs(value - 1 - worth), 1e-3)  # to where the interval must end
    return max(LEAST_PROMPTS, math.ceil(prompts * ((gain[1] - gain[0]) / 2 / distance) ** 2))


def with_depths(row: Row, depths: int) -> Row:
    """A row with `tried_D` and `kept_D`: how often the D-th token of a draft was there behind D-1 accepted ones, and
    was accepted."""
    rounds, counts = row["rounds"], {}
    for depth in range(1, depths + 1):
        reached = [step for step in rounds if step["num_drafted"] >= depth and step["num_accepted"] >= depth - 1]
        counts[f"tried_{depth}"] = len(reached)
        counts[f"kept_{depth}"] = sum(step["num_accepted"] >= depth for step in reached)
    return {**row, **counts}


def gains(before: Bench, after: Bench, method: str, config: RefreshConfig, seen: Collection[int]) -> list[Row]:
    """What was gained at each temperature, as refresh.json has it. seen: numbers of the prompts that do not count.

    Raises:
        InputError: the runs are not of the same work, or no prompt was measured in both.
    """
    check_comparable(before, after)
    found = []
    for temperature in before.methods:
        pairs = {}
        for name in (method, BASELINE):
            both = ([row for row in bench.methods[temperature][name] if row["prompt"] not in seen]
                    for bench in (before, after))  # fmt: skip
            pairs[name] = paired(*both)
        found.append({"temperature": temperature, **gain_of(pairs[method], pairs[BASELINE], before.meta, config)})
    return found


def gain_of(
    rows: tuple[list[Row], list[Row]], base: tuple[list[Row], list[Row]], meta: Mapping[str, Any], config: RefreshConfig
) -> Row:
    """One temperature: tau, its gain, and acceptance by depth where the tokens before were accepted. The bootstrap
    draws the same prompts for both. rows, base: of the head and of `ar`, before and after."""
    drafted, clock = (step["num_drafted"] for own in rows for row in own for step in row["rounds"]), meta["clock"]
    depths = max(drafted, default=0)
    first, second = ([with_depths(row, depths) for row in own] for own in rows)
    drawn, taus = MeasuredResamples(first, config.seed), [totals_of(own).tau for own in (first, second)]
    gain, prompts = drawn.interval(lambda: drawn.tau(second) / drawn.tau(first)), len({row["prompt"] for row in first})
    return {
        "prompts": prompts,
        **{f"tau_{name}": tau for name, tau in zip(("before", "after"), taus, strict=True)},
        "tau_before_ci95": drawn.interval(lambda: drawn.tau(first)),
        "tau_after_ci95": drawn.interval(lambda: drawn.tau(second)),
        "gain": taus[1] / taus[0],
        "gain_ci95": gain,
        "speedup_before": speedup(rows[0], base[0], clock),
        "speedup_after": speedup(rows[1], base[1], clock),
        "ar_tokens_per_s": tokens_per_s(base[1], clock),
        "accepted": [accepted_at(depth, first, second, drawn) for depth in range(1, depths + 1)],
        "verdict": verdict_of(gain, prompts, config.worth),
        "prompts_needed": prompts_needed(taus[1] / taus[0], gain, prompts, config.worth),
    }


def accepted_at(depth: int, first: Sequence[Row], second: Sequence[Row], drawn: MeasuredResamples) -> Row:
    """How often the token at this depth was accepted, where those before were; None where there was none. first,
    second: of `with_depths`."""
    names = f"kept_{depth}", f"tried_{depth}"
    kept, tried = ([sum(row[name] for row in own) for own in (first, second)] for name in names)
    shares = [part / whole if whole else None for part, whole in zip(kept, tried, strict=True)]

    def difference() -> Floats:
        return drawn.ratio(second, *names) - drawn.ratio(first, *names)

    ends = None if None in shares else drawn.interval(difference)
    return {"depth": depth, "before": shares[0], "after": shares[1], "difference_ci95": ends}


def paid_after(found: Row, cost_s: float) -> float | None:
    """Tokens to decode, as they were here, until the time that a training took is saved; None where nothing is."""
    saved = (1 / found["speedup_before"] - 1 / found["speedup_after"]) / found["ar_tokens_per_s"]
    return cost_s / saved if saved > 0 else None


def tables_of(found: Sequence[Row], method: str) -> list[Table]:
    """Tau at each temperature, and acceptance by depth."""
    shown = [
        {**row, "mode": mode(row["temperature"]), **{f"{name}_ci": interval(row[f"{name}_ci95"], form)
         for name, form in (("tau_before", ".2f"), ("tau_after", ".2f"), ("gain", ".2f"))}}
        for row in found
    ]  # fmt: skip
    columns = [Column("mode", "")]
    for key, title, form in (
        ("tau_before", "tau before", ".2f"),
        ("tau_after", "tau after", ".2f"),
        ("gain", "gain", ".2fx"),
    ):
        columns += [Column(key, title, form), Column(f"{key}_ci", "95 % CI", below=True)]
    columns += [Column("speedup_before", "speed-up", ".2fx"), Column("speedup_after", "after", ".2fx")]
    columns.append(Column("verdict", ""))
    note = f"{method}, {found[0]['prompts']} held-out prompts; 95 % bootstrap intervals over prompts, paired."
    depths = [
        {"mode": mode(row["temperature"]), **part, "difference_ci": interval(part["difference_ci95"], "+.3f", " to ")}
        for row in found
        for part in row["accepted"]
    ]
    by_depth = [Column("mode", ""), Column("depth", "token of a draft", "d"), Column("before", "before", ".3f"),
                Column("after", "after", ".3f"), Column("difference_ci", "difference, 95 % CI")]  # fmt: skip
    return [
        Table("refresh", "Before and after", columns, shown, note),
        Table("accepted", "Accepted, where the tokens before were", by_depth, depths),
    ]


def verdict_line(verdict: Verdict, found: Sequence[Row], worth: float) -> str:
    """The verdict in a sentence."""
    prompts = found[0]["prompts"]
    if verdict == "worth it":
        return "Worth it: take the head that was trained on."
    if verdict == "worse":
        return "It got worse: keep the head as it was."
    if verdict == "not worth it":
        return f"Not worth it: tau gains less than {worth:.1%}. Keep the head as it was."
    needed = [row["prompts_needed"] for row in found if row["verdict"] == "cannot tell"]
    more = "" if None in needed else f"; about {max(needed):,} would tell"
    return f"Cannot tell with so few prompts ({prompts}{more}). Until then keep the head as it was."
