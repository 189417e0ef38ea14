"""`draftsmith eval hsddw`: the experiments of HSDDW (Syu and Lee, 2025) on three models: entropy of accepted and
rejected tokens, sensitivity to the window, windows over a generation, ablation, redundancy."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from draftsmith.data.console import Row
from draftsmith.data.settings import comma_numbers
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.studies import common
from draftsmith.eval.studies.hsddw.found import (
    entropy_tables,
    redundancy_table,
    speed_tables,
    summary_of,
    window_tables,
)
from draftsmith.eval.studies.hsddw.watch import VERIFIED, WINDOWS, Watcher
from draftsmith.modules.decoding.trace import DecodeTrace, Totals, pool
from draftsmith.modules.drafters.methods import parse_methods
from draftsmith.modules.types import InputError, SamplingParams, at_least

# Name in tables -> method, in the order of the paper's table 2.
METHODS = {
    "SD": "spec:k={k}",
    "pre-verify": "pre-verify:k={k}",
    "self-verify": "self-verify:k={k}",
    "pre+self-verify": "pre+self-verify:k={k}",
    "HSDDW": "hsddw:k={k}:max={max}",
}
# M2 alone, beside the target: what the hierarchy has to beat.
M2_METHODS = {"SD, M2 drafts": METHODS["SD"], "self-verify, M2 drafts": METHODS["self-verify"]}

NAMED = ["mode", "method"]


@dataclass(frozen=True, kw_only=True)
class HsddwConfig(common.StudyConfig):
    """Repeats the experiments of HSDDW: three models, windows that entropy ends.

    Attributes:
        draft: M1, the fast draft model. mid: M2, the model between M1 and the target.
        k: tokens that M1 drafts at most, in the tables and wherever else one window is looked at.
        windows: values of k for the sensitivity, separated by commas.
        max: most tokens that hsddw hands to the target at once.
        examples: answers whose windows are shown one by one.
    """

    k: int = 10
    windows: str = "2,4,6,8,10,12,15,20"
    max: int = 20
    examples: int = 2


@sole_writer()
def run(config: HsddwConfig) -> Path:
    """Decode and measure, print the tables and write `output`/results.json, which is there only when complete."""
    for role in ("draft", "mid"):
        if not getattr(config, role):
            raise InputError(role, "nothing", f"--{role} DIR", f"Pass --{role}: M{1 if role == 'draft' else 2}.")
    for field in ("k", "max", "examples"):
        at_least(field, getattr(config, field), 1)
    if config.quick:
        around = {"windows": f"{max(2, config.k // 2)},{2 * config.k}"}
        config = common.reduced(config, {"limit": 5, "repeats": 1}, around)
    windows = sorted({config.k, *comma_numbers("windows", config.windows, int)})
    labels = [method.format(k=k, max=config.max) for method in METHODS.values() for k in windows]
    context = common.prepare(config, labels)
    watched, verified, windows_seen = [], [], []
    for params in config.sampling:
        for method in METHODS:
            named = dict(zip(NAMED, (common.mode(params.temperature), method), strict=True))
            row, seen = watch(config, context, method, params)
            watched.append({**named, **row})
            verified += [{**named, **one} for one in seen.verified]
            windows_seen += [{**named, **one} for one in seen.windows]
    speeds = pd.DataFrame([row for params in config.sampling for row in measure_windows(config, windows, params)])
    tables = [
        *speed_tables(config.k, speeds),
        *entropy_tables(pd.DataFrame(verified, columns=[*NAMED, *VERIFIED])),
        redundancy_table(config.k, watched),
        *window_tables(pd.DataFrame(windows_seen, columns=[*NAMED, *WINDOWS]), config.examples, config.seed),
    ]
    return common.write_results("hsddw", config, context, tables, summary_of(tables))


def watch(config: HsddwConfig, context: common.StudyContext, name: str, params: SamplingParams) -> tuple[Row, Watcher]:
    """Decode all prompts with one method at `config.k`; what was drafted and who made the answers, and the watcher,
    whose windows have `length`, the tokens of their answer."""
    label = METHODS[name].format(k=config.k, max=config.max)
    drafter = parse_methods(label)[0].method.build(context.models)
    assert drafter is not None
    watcher = Watcher(drafter, context.eos_ids)
    made = common.decode_prompts(
        config, context, label, params, lambda prompt, done: watcher.on_round(prompt.id, done), drafter
    )
    lengths = {prompt.id: len(answer.tokens) for prompt, answer in zip(context.prompts, made, strict=True)}
    for window in watcher.windows:
        window["length"] = lengths[window["prompt"]]
    return drafted_row(watcher.inner, watcher.origin, pool(answer.trace for answer in made)), watcher


def drafted_row(drafts: DecodeTrace, origin: Counter[str], totals: Totals) -> Row:
    """Table 4's row of a method. drafts: of M1 for M2. origin: tokens by who made them."""
    inner, made = pool([drafts]), max(origin.total(), 1)
    return {
        "drafted": totals.num_draft_tokens,
        "accepted": totals.num_accepted,
        "redundancy": totals.redundancy,
        "inner": inner.redundancy if inner.num_draft_tokens else None,
        "utilisation": totals.verification_rate,
        **{model: origin[model] / made for model in ("M1", "M2", "target")},
    }


def measure_windows(config: HsddwConfig, windows: Sequence[int], params: SamplingParams) -> Iterator[Row]:
    """Every method at every window, interleaved; M2 alone in a run of its own, since a run has one --draft."""
    alone = dataclasses.replace(config, draft=config.mid, mid=None)
    for run_config, methods, directory in ((config, METHODS, "bench"), (alone, M2_METHODS, "bench-m2")):
        label_of = {(name, k): methods[name].format(k=k, max=config.max) for name in methods for k in windows}
        rows = common.measured(run_config, list(label_of.values()), params, directory)
        for (name, k), label in label_of.items():
            yield {**rows[label], "mode": common.mode(params.temperature), "method": name, "k": k}
