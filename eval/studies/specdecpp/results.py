"""What the SpecDec++ study found: figures, and the numbers that documents quote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.eval.replay.rollouts import ChainRollouts
from draftsmith.eval.report.figures import Figure, plain
from draftsmith.eval.studies.forward_times import (
    Floats,
    ForwardTimes,
    Row,
    bench_rows,
    explained,
    fit_forward_times,
    gain_interval,
    ratio_interval,
    theory_rows,
)
from draftsmith.eval.studies.keeping import keep
from draftsmith.eval.studies.specdecpp.figures import (
    PAPER_GAIN,
    kl_figures,
    rate_charts,
    regression_figures,
    throughput_table,
)
from draftsmith.eval.studies.specdecpp.kl import constant_kl, kl_rows, read_labels
from draftsmith.eval.studies.specdecpp.study import BEST_HEAD, BEST_K, Choice, Study, theorem_h
from draftsmith.eval.studies.specdecpp.sweep import Rule, Setting, published_head, replayed
from draftsmith.modules.decoding.trace import pool

ORACLE, KNOWN = "greedy oracle (lemma 2.1)", "true p/q, h by theorem 3.1"


@dataclass(frozen=True)
class Found:
    """All that was measured. rollouts: by split. settings: the sweep on the reported split. dev_rows: of the
    bench on the dev prompts, which `times` are fitted to. clock: of the benches, cpu or wall. runs: benches on the
    reported prompts. labels: `train` and `eval` artefacts that exist."""

    rollouts: Mapping[str, ChainRollouts]
    settings: Sequence[Setting]
    choice: Choice
    times: ForwardTimes
    dev_rows: Sequence[Row]
    clock: str
    runs: Sequence[Path]
    labels: Mapping[str, Path]


def write_results(study: Study, found: Found) -> dict[str, Any]:
    """results.json of the study, whose tables are printed."""
    config, draft, times = study.config, study.models.draft, found.times
    assert draft is not None
    throughput = throughput_rows(study, found)
    by_run = {run.name: bench_rows(run) for run in found.runs}
    rows = drafting([row for own in by_run.values() for row in own])
    fits = fits_of(found, by_run)
    theory = [
        {"run": name, **row, "difference_dev": dev["difference"]}
        for name, own in by_run.items()
        for row, dev in zip(
            theory_rows(own, fits[name], found.clock), theory_rows(own, times, found.clock), strict=True
        )
    ]
    sets = {name: read_labels(path, draft, config.seed, config.label_prompts) for name, path in found.labels.items()}
    best_head = found.choice.settings[BEST_HEAD]
    weights = {name: head.config.w_rej for name, head in study.heads.items()}
    figures: list[Figure] = [
        throughput_table(throughput),
        *rate_charts(found.settings, best_head, published_head(study.heads), times, weights),
        *kl_figures(kl_rows(study.heads, sets), constant_kl(sets["eval"])),
        *regression_figures(fits, theory, time_points(rows, times, found.clock)),
    ]
    numbers = {
        "t_draft_ms": times.t_draft * 1e3,
        "t_target_ms": times.t_target * 1e3,
        "c": times.t_draft / times.t_target,
        "theorem_h": theorem_h(times),
        "r2": times.r2,
        "r2_test": explained(rows, times, found.clock),
        "largest_theory_error": max(abs(row["difference"]) for row in theory if row["method"] != "ar"),
        "largest_theory_error_dev": max(abs(row["difference_dev"]) for row in theory if row["method"] != "ar"),
        **{f"{row['role']}: {key}": row[key] for row in throughput for key in ("rule", "head", *GAINS)},
    }
    prompts = study.prompts[config.split]
    shown = ("specdecpp-throughput", "specdecpp-kl", "specdecpp-forward-times", "specdecpp-theory")
    return keep("specdecpp", config, study.models, prompts, figures, numbers, shown)


def drafting(rows: Sequence[Row]) -> list[Row]:
    """Without ar, whose target calls read one row: what the times are fitted to."""
    return [row for row in rows if row["method"] != "ar"]


def fits_of(found: Found, by_run: Mapping[str, Sequence[Row]]) -> dict[str, ForwardTimes]:
    """Times of the dev bench, of its methods with and without a head alone, and of each bench on the reported
    prompts."""
    dev = drafting(found.dev_rows)
    parts = {
        "dev, fixed K only": [row for row in dev if row["method"].startswith("spec:")],
        "dev, specdec++ only": [row for row in dev if row["method"].startswith("specdec++")],
        **{name: drafting(rows) for name, rows in by_run.items()},
    }
    fits = {name: fit_forward_times(rows, found.clock) for name, rows in parts.items()}
    return {"dev, all drafting methods": found.times, **fits}


GAINS = ("gain_theory", "gain_theory_ci", "gain_measured", "gain_measured_ci")


def throughput_rows(study: Study, found: Found) -> list[dict[str, Any]]:
    """One row for each chosen setting, and the oracle: cost model on both splits, measured where it was decoded."""
    config = study.config
    h = theorem_h(found.times)
    known = {} if h is None else {KNOWN: Rule(known=True, h=h)}
    rules = {**found.choice.settings, **known, ORACLE: Rule()}
    dev, test = (
        {rule: prompt_seconds(study, own, rule, found.times) for rule in rules.values()}
        for own in (found.rollouts[config.dev_split], found.rollouts[config.split])
    )
    fixed = rules[BEST_K]
    rows = []
    for role, rule in rules.items():
        row = {
            "role": role,
            "head": rule.head,
            "rule": rule.label,
            "dev_theory": _rate(dev[rule]),
            "test_theory": _rate(test[rule]),
            "paper": PAPER_GAIN if role == BEST_HEAD else None,
            **measured_columns(study, rule, fixed, found.runs, found.clock),
        }
        if rule != fixed:
            row["gain_theory"] = _rate(test[rule]) / _rate(test[fixed]) - 1
            row["gain_theory_ci"] = interval(ratio_interval(test[rule], test[fixed], config.seed))
        rows.append(plain({**dict.fromkeys(GAINS), **row}))
    return rows


def prompt_seconds(study: Study, rollouts: ChainRollouts, rule: Rule, times: ForwardTimes) -> Floats:
    """[prompts, 2]: tokens, and their seconds by the cost model."""
    totals = [pool([trace]) for trace in replayed(rollouts, rule, study.grid, study.heads)]
    return np.array([(t.num_tokens, times.seconds(t.num_draft_tokens, t.num_target_calls)) for t in totals])


def _rate(prompts: Floats) -> float:
    """Tokens/s: a ratio of sums."""
    tokens, seconds = prompts.sum(0)
    return float(tokens / seconds)


def measured_columns(study: Study, rule: Rule, fixed: Rule, runs: Sequence[Path], clock: str) -> dict[str, Any]:
    """Throughput of a rule in the first bench run that decoded with it (and its head), over `ar` and over the best
    fixed K of the same run. Nothing for what no decoder can run."""
    config = study.config
    if not rule.can_run:
        return {}
    method, baseline = (r.method(config.min_drafted, config.max_drafted) for r in (rule, fixed))
    run = next(run for run in runs if rule.head is None or run.name == run_name(config.split, rule.head))
    rows = bench_rows(run)
    rates = {row["method"]: row["measured"] for row in theory_rows(rows, ForwardTimes(1.0, 1.0, 0.0, 0), clock)}
    columns: dict[str, Any] = {"measured": rates[method], "speedup": rates[method] / rates["ar"]}
    if rule != fixed:
        columns["gain_measured"] = rates[method] / rates[baseline] - 1
        columns["gain_measured_ci"] = interval(gain_interval(rows, method, baseline, clock, config.seed))
    return columns


def run_name(split: str, head: str | None) -> str:
    """Of the bench run that loads this head."""
    return f"{split}-{head}"


def interval(ends: Sequence[float] | None) -> str | None:
    """Ends of an interval of relative gains, as a table shows them."""
    return None if ends is None else " to ".join(f"{end:+.1%}" for end in ends)


def time_points(rows: Sequence[Mapping[str, Any]], times: ForwardTimes, clock: str) -> list[dict[str, Any]]:
    """Predicted and measured seconds of every row."""
    return [
        plain(
            {
                "method": row["method"],
                "id": row["id"],
                "predicted": times.seconds(row["num_draft_tokens"], row["num_target_calls"]),
                "measured": row[f"{clock}_s"],
            }
        )
        for row in rows
    ]
