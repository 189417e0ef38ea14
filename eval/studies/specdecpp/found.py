"""What the SpecDec++ study found: tables, the paper's numbers beside ours, and the numbers that documents quote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.data.console import Column, Table, format_interval, json_values
from draftsmith.eval.bootstrap import Floats
from draftsmith.eval.replay.rollouts import ChainRollouts
from draftsmith.eval.report.tables import drawn_data
from draftsmith.eval.studies import common
from draftsmith.eval.studies.forward_times import (
    ForwardTimes,
    Row,
    explained,
    fit_forward_times,
    gain_interval,
    ratio_interval,
    theory_rows,
)
from draftsmith.eval.studies.specdecpp.kl import constant_kl, kl_rows, read_labels
from draftsmith.eval.studies.specdecpp.study import BEST_HEAD, BEST_K, LoadedStudy, theorem_h
from draftsmith.eval.studies.specdecpp.sweep import LengthRule, Setting, front, published_head
from draftsmith.modules.decoding.trace import pool

# Huang et al. 2024, table of KL: w_rej = 6, by depth 0..4.
PAPER_EVAL_KL = {(6.0, depth): kl for depth, kl in enumerate((0.637, 0.596, 0.589, 0.582, 0.575))}
# Section 4: gain of SpecDec++ over the best fixed K with llama-2-chat 7B for 70B: Alpaca +7.2 %, HumanEval +11.1 %,
# GSM8K +9.4 %.
PAPER_GAIN = "+7.2 to +11.1 %"
PAPER_R2, PAPER_THEORY_ERROR = ">= 0.98", "within 6.2 %"
ORACLE, KNOWN = "greedy oracle (lemma 2.1)", "true p/q, h by theorem 3.1"
GAINS = ("gain_theory", "gain_theory_ci", "gain_measured", "gain_measured_ci")


@dataclass(frozen=True)
class Measurements:
    """All that was measured. rollouts: by split. settings: the sweep on the reported split. chosen: on the dev prompts,
    by what they are called in tables. times: fitted to `dev_rows`, of the bench on the dev prompts. clock: of the
    benches, cpu or wall. runs: rows of the benches on the reported prompts, by `run_name`. labels: `train` and `eval`
    artefacts that exist."""

    rollouts: Mapping[str, ChainRollouts]
    settings: Sequence[Setting]
    chosen: Mapping[str, LengthRule]
    times: ForwardTimes
    dev_rows: Sequence[Row]
    clock: str
    runs: Mapping[str, Sequence[Row]]
    labels: Mapping[str, Path]


def write_study_results(study: LoadedStudy, found: Measurements) -> Path:
    """results.json of the study, whose tables are printed."""
    config, draft, times, clock = study.config, study.models.draft, found.times, found.clock
    assert draft is not None
    throughput = throughput_rows(study, found)
    rows = drafting([row for own in found.runs.values() for row in own])
    fits = fits_of(found)
    theory = [
        {"run": name, **row, "difference_dev": dev["difference"]}
        for name, own in found.runs.items()
        for row, dev in zip(theory_rows(own, fits[name], clock), theory_rows(own, times, clock), strict=True)
    ]
    points = [
        {
            "method": row["method"], "id": row["id"], "measured": row[f"{clock}_s"],
            "predicted": times.seconds(row["num_draft_tokens"], row["num_target_calls"]),
        }
        for row in rows
    ]  # fmt: skip
    sets = {name: read_labels(path, draft, config.seed, config.label_prompts) for name, path in found.labels.items()}
    tables = [
        throughput_table(throughput),
        *rate_tables(study, found),
        *kl_tables(kl_rows(study.heads, sets), constant_kl(sets["eval"][1])),
        *regression_tables(fits, theory),
        drawn_data("specdecpp-time-fit", points),
    ]
    errors = {key: max(abs(row[key]) for row in drafting(theory)) for key in ("difference", "difference_dev")}
    numbers = {
        "t_draft_ms": times.t_draft * 1e3,
        "t_target_ms": times.t_target * 1e3,
        "c": times.t_draft / times.t_target,
        "theorem_h": theorem_h(times),
        "r2": times.r2,
        "r2_test": explained(rows, times, clock),
        "largest_theory_error": errors["difference"],
        "largest_theory_error_dev": errors["difference_dev"],
        **{f"{row['role']}: {key}": row[key] for row in throughput for key in ("rule", "head", *GAINS)},
    }
    context = common.StudyContext(study.models, study.prompts[config.split])
    return common.write_results("specdecpp", config, context, tables, numbers)


def drafting(rows: Sequence[Row]) -> list[Row]:
    """The methods without ar, whose target calls read one row: what the times are fitted to."""
    return [row for row in rows if row["method"] != "ar"]


def fits_of(found: Measurements) -> dict[str, ForwardTimes]:
    """Times of the dev bench, of its methods with and without a head alone, and of each bench on the reported
    prompts."""
    parts = {
        "dev, fixed K only": [row for row in found.dev_rows if row["method"].startswith("spec:")],
        "dev, specdec++ only": [row for row in found.dev_rows if row["method"].startswith("specdec++")],
        **{name: drafting(rows) for name, rows in found.runs.items()},
    }
    fits = {name: fit_forward_times(rows, found.clock) for name, rows in parts.items()}
    return {"dev, all drafting methods": found.times, **fits}


def throughput_rows(study: LoadedStudy, found: Measurements) -> list[dict[str, Any]]:
    """One row for each chosen setting, and the oracle: cost model on both splits, measured where it was decoded."""
    config = study.config
    h = theorem_h(found.times)
    known = {} if h is None else {KNOWN: LengthRule(known=True, h=h)}
    rules = {**found.chosen, **known, ORACLE: LengthRule()}
    dev, test = (
        {rule: prompt_seconds(study, own, rule, found.times) for rule in rules.values()}
        for own in (found.rollouts[config.dev_split], found.rollouts[config.split])
    )
    fixed = rules[BEST_K]
    rows = []
    for role, rule in rules.items():
        row = dict.fromkeys(GAINS) | {
            "role": role,
            "head": rule.head,
            "rule": rule.label,
            "dev_theory": _rate(dev[rule]),
            "test_theory": _rate(test[rule]),
            "paper": PAPER_GAIN if role == BEST_HEAD else None,
        }
        if rule.can_run:
            row |= measured_columns(study, rule, fixed, found)
        if rule != fixed:
            row["gain_theory"] = _rate(test[rule]) / _rate(test[fixed]) - 1
            row["gain_theory_ci"] = gains(ratio_interval(test[rule], test[fixed], config.seed))
        rows.append(json_values(row))
    return rows


def prompt_seconds(study: LoadedStudy, rollouts: ChainRollouts, rule: LengthRule, times: ForwardTimes) -> Floats:
    """[prompts, 2]: tokens, and their seconds by the cost model."""
    totals = [pool([trace]) for trace in study.replayed(rollouts, rule)]
    return np.array([(t.num_tokens, times.seconds(t.num_draft_tokens, t.num_target_calls)) for t in totals])


def _rate(prompts: Floats) -> float:
    """Tokens/s: a ratio of sums."""
    tokens, seconds = prompts.sum(0)
    return float(tokens / seconds)


def measured_columns(study: LoadedStudy, rule: LengthRule, fixed: LengthRule, found: Measurements) -> dict[str, Any]:
    """Throughput of a rule in the first bench that decoded with it (and its head), over `ar` and over the best fixed K
    of the same bench."""
    config = study.config
    method, baseline = (r.method(config.min_drafted, config.max_drafted) for r in (rule, fixed))
    own = [rows for name, rows in found.runs.items() if rule.head is None or name == run_name(config.split, rule.head)]
    rates = {
        name: _rate(np.array([(row["tokens"], row[f"{found.clock}_s"]) for row in own[0] if row["method"] == name]))
        for name in ("ar", method, baseline)
    }
    columns: dict[str, Any] = {"measured": rates[method], "speedup": rates[method] / rates["ar"]}
    if rule != fixed:
        columns["gain_measured"] = rates[method] / rates[baseline] - 1
        columns["gain_measured_ci"] = gains(gain_interval(own[0], method, baseline, found.clock, config.seed))
    return columns


def run_name(split: str, head: str | None) -> str:
    """Name of the bench run that loads this head."""
    return f"{split}-{head}"


def gains(ends: Sequence[float] | None) -> str | None:
    """An interval of relative gains."""
    return format_interval(ends, "+.1%", " to ") or None


def throughput_table(rows: Sequence[Row]) -> Table:
    """Tables 1 and 3: the chosen settings, by the cost model on both splits and measured."""
    columns = [
        Column("role", "setting"), Column("head", "head"),
        Column("rule", "rule"), Column("dev_theory", "cost model, dev (tok/s)", ".1f"),
        Column("test_theory", "cost model, test (tok/s)", ".1f"), Column("gain_theory", "over best K", "+.1%"),
        Column("gain_theory_ci", "95 % interval"), Column("measured", "measured (tok/s)", ".1f"),
        Column("speedup", "over ar", ".2fx"), Column("gain_measured", "over best K", "+.1%"),
        Column("gain_measured_ci", "95 % interval"), Column("paper", "paper, over best K"),
    ]  # fmt: skip
    note = (
        "Settings are the fastest by the cost model on the dev prompts. Cost model: counts replayed from rollouts, "
        "times fitted to a bench on the dev prompts. Measured: real decoding on the test prompts, one thread, "
        "interleaved with the fixed K that it is compared to. Intervals: bootstrap over prompts, in pairs. Theorem 3.1 "
        "(delta = 0): no h above 1 - t_draft/t_target can be best; it takes no choosing. With true p/q it knows every "
        "p, and the oracle which token will be rejected; no decoder can run these."
    )
    return Table("specdecpp-throughput", "Best throughput (SpecDec++, tables 1 and 3)", columns, rows, note)


def rate_tables(study: LoadedStudy, found: Measurements) -> list[Table]:
    """Verification rate against discard rate: figure 4, and fixed K beside every head's thresholds by its weight."""
    named = rate_series(found.settings, found.chosen[BEST_HEAD], published_head(study.heads))
    weights = [
        ("fixed K" if head is None else f"w_rej {study.heads[head].config.w_rej:g}", setting)
        for setting in found.settings
        for head in [setting.rule.head]
        if setting.rule.k or head is not None
    ]

    def point(series: str, setting: Setting) -> Row:
        rule, totals = setting.rule, setting.totals
        rates = {"discard_rate": totals.discard_rate, "verification_rate": totals.verification_rate, "tau": totals.tau}
        theory = found.times.tokens_per_s(totals)
        return {"series": series, "setting": rule.label, "head": rule.head, **rates, "theory": theory}

    return [
        drawn_data("specdecpp-rates", [point(name, setting) for name, own in named.items() for setting in own]),
        drawn_data("specdecpp-all-heads", [point(name, setting) for name, setting in weights]),
    ]


def rate_series(settings: Sequence[Setting], best_head: LengthRule, published: str | None) -> dict[str, list[Setting]]:
    """Series of figure 4: fixed K; the best head's thresholds; the published head's, as published; the front of all
    heads and thresholds; thresholds on q; the oracle."""
    heads = [setting for setting in settings if setting.rule.head is not None]

    def of(head: str | None, calibrated: bool) -> list[Setting]:
        return [s for s in heads if s.rule.head == head and s.rule.calibrated == calibrated]

    how = "calibrated" if best_head.calibrated else "raw"
    series = {
        "fixed K": [setting for setting in settings if setting.rule.k],
        f"best head ({best_head.head}), {how}": of(best_head.head, best_head.calibrated),
    }
    if published is not None and (published, False) != (best_head.head, best_head.calibrated):
        series["published head (w_rej 6, D 3), raw"] = of(published, False)
    series["Pareto front of all heads and h"] = front(heads)
    series["confidence: until q(y) < t"] = [setting for setting in settings if setting.rule.t]
    series[ORACLE] = [setting for setting in settings if setting.rule == LengthRule()]
    return series


def kl_tables(rows: Sequence[Row], constant: float | None) -> list[Table]:
    """KL by (w_rej, D), and its eval column as lines. rows: of `kl_rows`. constant: the eval KL of the best
    constant."""
    table = [{**json_values(row), "paper": PAPER_EVAL_KL.get((row["w_rej"], row["depth"]))} for row in rows]
    kls = [("train_kl", "train"), ("eval_kl", "eval")]
    columns = [
        Column("w_rej", "w_rej", "g"), Column("depth", "D"),
        *(Column(key, f"{name} KL, raw", ".4f") for key, name in kls),
        Column("paper", "eval KL, paper", ".3f"),
        *(Column(f"{key}_corrected", f"{name} KL, corrected", ".4f") for key, name in kls),
        Column("eval_auc", "eval AUC", ".3f"),
    ]  # fmt: skip
    note = (
        "Mean binary KL in nats over drafted tokens, each alike. Raw: the head's output as the paper's threshold reads "
        "it, which w_rej above 1 biases towards rejection; corrected: log(w_rej/w_acc) added to its logit. "
        + ("" if constant is None else f"The best constant has {constant:.4f}. ")
        + "The paper's pair is llama-2-chat 7B for 70B: compare directions, not sizes. Heads that read more than the "
        "state after a token are not here: labels of mixed text have no rounds for them."
    )
    lines = [
        {"series": f"w_rej {row['w_rej']:g}, {what}", "depth": row["depth"], "kl": row[key]}
        for row in rows
        for key, what in (("eval_kl", "raw"), ("eval_kl_corrected", "corrected"))
    ]
    paper = [{"series": "paper, w_rej 6, raw", "depth": d, "kl": kl} for (_, d), kl in PAPER_EVAL_KL.items()]
    return [
        Table("specdecpp-kl", "KL of the heads by w_rej and depth", columns, table, note),
        drawn_data("specdecpp-kl-depth", [*lines, *paper]),
    ]


def regression_tables(fits: Mapping[str, ForwardTimes], theory: Sequence[Row]) -> list[Table]:
    """Forward times (table 2, section 4.2). fits: by what they are of. theory: rows of `theory_rows`."""
    fitted = [
        {
            "of": name, "t_draft": times.t_draft * 1e3, "t_target": times.t_target * 1e3,
            "c": times.t_draft / times.t_target, "r2": times.r2, "rows": times.rows, "paper": PAPER_R2,
        }
        for name, times in fits.items()
    ]  # fmt: skip
    return [
        Table(
            "specdecpp-forward-times", "Forward times by regression (section 4.2)",
            [
                Column("of", "rows"), Column("rows", "number", "d"), Column("t_draft", "t_draft (ms)", ".3f"),
                Column("t_target", "t_target (ms)", ".3f"), Column("c", "c", ".3f"), Column("r2", "R2", ".4f"),
                Column("paper", "R2, paper"),
            ],
            json_values(fitted),
            "Least squares, without intercept, of a prompt's seconds (all of its decoding) on its drafted tokens and "
            "its target calls, the prefill among them; ar is in none of the fits. The cost model takes the first row.",
        ),
        Table(
            "specdecpp-theory", "Theoretical against measured throughput (section 4.2)",
            [
                Column("run", "bench run"), Column("method", "method"), Column("measured", "measured (tok/s)", ".1f"),
                Column("theory", "theory (tok/s)", ".1f"), Column("difference", "theory / measured - 1", "+.1%"),
                Column("difference_dev", "with times of dev", "+.1%"), Column("paper", "paper"),
            ],
            [{**json_values(row), "paper": None if row["method"] == "ar" else PAPER_THEORY_ERROR} for row in theory],
            "Theory: the run's own counts at times fitted to the same run, as in the paper; beside it at the times of "
            "the dev bench, which ran at another moment. ar was not part of the fits: its target calls read one row.",
        ),
    ]  # fmt: skip
