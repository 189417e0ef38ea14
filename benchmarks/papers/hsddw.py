"""Repeat the experiments of HSDDW (Syu and Lee, 2025) on three models: M1 drafts for M2, and M2 for the target.

    python benchmarks/papers/hsddw.py --output runs/hsddw

What each part adds (table 2), what is drafted in vain (table 4), entropies of accepted and rejected tokens (figure 6),
and sensitivity to the window (figure 7).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from draftsmith.benchmarks.papers import common
from draftsmith.benchmarks.papers.common import Row
from draftsmith.data.console import Column, Table, json_values
from draftsmith.data.settings import comma_numbers
from draftsmith.data.store.writer import sole_writer
from draftsmith.launch.cli import main_of
from draftsmith.modules.acceptance.metrics import soft_label_auc
from draftsmith.modules.decoding.drafter import Drafter
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.stop import DraftView, StopPolicy
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace, pool
from draftsmith.modules.drafters.hierarchical import HierarchicalDrafter
from draftsmith.modules.drafters.method_names import parse_methods
from draftsmith.modules.types import InputError, SamplingParams, check_range

# Methods by their names in the paper's table 2, and its speed-ups on MT-Bench at T=1.
METHODS = {
    "SD": "spec:k={k}",
    "pre-verify": "pre-verify:k={k}",
    "self-verify": "self-verify:k={k}",
    "pre+self-verify": "pre+self-verify:k={k}",
    "HSDDW": "hsddw:k={k}:max={max}",
}
PAPER = {"SD": 2.40, "pre-verify": 2.53, "self-verify": 2.63, "pre+self-verify": 2.69, "HSDDW": 2.95}
# M2 alone beside the target: what the hierarchy has to beat.
M2_METHODS = {"SD, M2 drafts": METHODS["SD"], "self-verify, M2 drafts": METHODS["self-verify"]}
FIXED = ("SD", "pre-verify")  # no rule chose their tokens by entropy: only their verdicts are counted
NAMED = ["mode", "method"]
VERIFIED = ["prompt", "by", "entropy", "accepted"]


@dataclass(frozen=True, kw_only=True)
class HsddwConfig(common.PaperConfig):
    """Repeats the experiments of HSDDW: three models, windows that entropy ends.

    Attributes:
        head: M1, the fast draft model. mid: M2, between M1 and the target.
        k: Longest draft of M1, in the tables and wherever one window is shown.
        windows: Values of k for the sensitivity, separated by commas.
        max: Most tokens that HSDDW hands to the target at once.
    """

    head: tuple[str, ...] = ("embedded:draft-small",)
    mid: str | None = "embedded:draft"
    limit: int = 10
    k: int = 10
    windows: str = "2,4,6,8,10,15"
    max: int = 20


@sole_writer()
def run(config: HsddwConfig) -> Path:
    """Decode and measure; write OUTPUT/results.json."""
    for role in ("head", "mid"):
        if not getattr(config, role):
            raise InputError(role, "nothing", f"--{role} DIR", f"Pass --{role}: M{1 if role == 'head' else 2}.")
    for name in ("k", "max"):
        check_range(name, getattr(config, name), 1)
    windows = sorted({config.k, *comma_numbers("windows", config.windows, int)})
    loaded = common.load(config, [m.format(k=k, max=config.max) for m in METHODS.values() for k in windows])

    drafted, verified = [], []
    for params in config.modes:
        for method in METHODS:
            named = dict(zip(NAMED, (common.mode_name(params), method), strict=True))
            row, watcher = watch(config, loaded, method, params)
            drafted.append({**named, **row})
            verified += [{**named, **one} for one in watcher.verified]
    speeds = pd.DataFrame([row for params in config.modes for row in measure_windows(config, windows, params)])
    tables = [
        *speed_tables(config.k, speeds),
        entropy_table(pd.DataFrame(verified, columns=[*NAMED, *VERIFIED])),
        redundancy_table(config.k, drafted),
    ]
    return common.write_results("hsddw", config, loaded, tables)


def measure_windows(config: HsddwConfig, windows: Sequence[int], params: SamplingParams) -> Iterator[Row]:
    """Measure every method at every window; M2 alone in a run of its own, since a run has one --head."""
    alone = dataclasses.replace(config, head=(str(config.mid),), mid=None)
    for run_config, methods, directory in ((config, METHODS, "bench"), (alone, M2_METHODS, "bench-m2")):
        label_of = {(name, k): methods[name].format(k=k, max=config.max) for name in methods for k in windows}
        rows = common.measure(run_config, list(label_of.values()), params, directory)
        for (name, k), label in label_of.items():
            yield {**rows[label], "mode": common.mode_name(params), "method": name, "k": k}


class WatchedStop(StopPolicy):
    """Another policy's decisions, with the entropies of this round's draft, and of every draft with its verdict."""

    def __init__(self, policy: StopPolicy):
        self.policy, self.max_drafted = policy, policy.max_drafted
        self.entropies: list[float] = []
        self.drafts: list[tuple[list[float], int]] = []  # entropies, accepted tokens

    def reset(self) -> None:
        self.policy.reset()

    def start_round(self) -> None:
        self.entropies = []
        self.policy.start_round()

    def should_stop(self, view: DraftView) -> bool:
        self.entropies.append(view.entropy)
        return self.policy.should_stop(view)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.drafts.append((self.entropies[:num_drafted], num_accepted))
        self.policy.observe(num_drafted, num_accepted)


class Watcher:
    """Observer of a drafter's rounds, not beyond the end token of a response.

    Attributes:
        verified: a row of VERIFIED for every token up to the first rejected one. by: drafter and verifier, "M1 by
            target". entropy: of the distribution that the token was drawn from [nats].
        inner: M1's drafts as rounds whose target is M2.
        origin: tokens of the rounds by the model that produced them.
    """

    def __init__(self, drafter: Drafter, eos_ids: Sequence[int]):
        self._eos = frozenset(eos_ids)
        self._hierarchy = drafter if isinstance(drafter, HierarchicalDrafter) else None
        chain: Any = drafter if self._hierarchy is None else self._hierarchy.inner
        self._stop = WatchedStop(chain.stop)
        chain.stop = self._stop
        self.verified: list[dict[str, Any]] = []
        self.inner, self.origin = DecodeTrace(), Counter[str]()

    def on_round(self, prompt: str, done: Round) -> None:
        """Take a round in before the drafter observes its verdict, as `generate` reports it. prompt: its id."""
        if done.tree is not None and done.tree.tokens:
            self._take_round(prompt, done)
        elif done.tree is not None:
            self.origin["target"] += len(done.tokens)
        self._stop.drafts = []

    def _take_round(self, prompt: str, done: Round) -> None:
        assert done.tree is not None and done.verdict is not None
        tokens, hierarchy = done.tree.tokens, self._hierarchy
        end = next((i for i, token in enumerate(tokens) if token in self._eos), len(tokens))
        if hierarchy is None:
            by, entropies = "M1 by target", self._stop.entropies
            from_m1 = set(range(len(tokens)))
        else:
            by, entropies = "M2 by target", hierarchy.rule.entropies
            # M1's drafts of this round, each followed by a token of M2's own.
            from_m1, start = set[int](), 0
            for inner_entropies, accepted in self._stop.drafts:
                self._add_verified(prompt, "M1 by M2", inner_entropies, accepted, start, end)
                emitted = min(accepted + 1, max(0, end + 1 - start))
                count = len(inner_entropies)
                self.inner.steps.append(DecodeStep(count, accepted, emitted, count))
                from_m1 |= set(range(start, start + accepted))
                start += accepted + 1
        self._add_verified(prompt, by, entropies[: len(tokens)], len(done.verdict.path), 0, end)
        kept = set(range(done.num_accepted))
        self.origin += Counter(M1=len(kept & from_m1), M2=len(kept - from_m1), target=len(done.tokens) - len(kept))

    def _add_verified(
        self, prompt: str, by: str, entropies: Sequence[float], accepted: int, start: int, end: int
    ) -> None:
        """start: place of the draft in the round. end: place of the end token."""
        for i, value in enumerate(entropies[: accepted + 1]):
            if start + i <= end:
                self.verified.append({"prompt": prompt, "by": by, "entropy": value, "accepted": i < accepted})


def watch(config: HsddwConfig, loaded: common.Loaded, name: str, params: SamplingParams) -> tuple[Row, Watcher]:
    """Decode all prompts with one method at `config.k`; return its row of table 4 and the watcher."""
    label = METHODS[name].format(k=config.k, max=config.max)
    drafter = parse_methods(label)[0].method.build(loaded.models)
    assert drafter is not None
    watcher = Watcher(drafter, loaded.eos_ids)
    generations = common.decode_prompts(
        config, loaded, label, params, lambda prompt, done: watcher.on_round(prompt.id, done), drafter
    )
    totals, inner = pool(answer.trace for answer in generations), pool([watcher.inner])
    count = max(watcher.origin.total(), 1)
    # sigma = 1 - accepted / drafted.
    outer_sigma, inner_sigma = (
        1 - part.num_accepted / part.num_draft_tokens if part.num_draft_tokens else None for part in (totals, inner)
    )
    row = {
        "drafted": totals.num_draft_tokens,
        "accepted": totals.num_accepted,
        "redundancy": outer_sigma or 0.0,
        "inner": inner_sigma,
        "utilization": totals.verification_rate,
        **{model: watcher.origin[model] / count for model in ("M1", "M2", "target")},
    }
    return row, watcher


def speed_tables(k: int, speeds: pd.DataFrame) -> list[Table]:
    """Build table 2 and figure 7. speeds: rows of benches with mode, method and window k."""
    rows = []
    for (mode, method), group in speeds.groupby(NAMED, sort=False):
        best = group.loc[group["speedup"].idxmax()]
        at_k = {"method": method, **common.speed_columns(group[group["k"] == k].iloc[0]), "best_k": best["k"]}
        lost = 1 - group["speedup"].min() / best["speedup"]
        paper = PAPER.get(method) if mode == "T=1" else None
        rows.append({**at_k, "best": best["speedup"], "lost": lost, "paper": paper})
    columns = [
        Column("mode", "mode"), Column("method", "method"), Column("speedup", f"speed-up, k={k}", ".2fx"),
        Column("ci", "95 % CI"), Column("tau", "tau", ".2f"), Column("best_k", "best k", "d"),
        Column("best", "at it", ".2fx"), Column("lost", "worst k loses", ".0%"), Column("paper", "paper", ".2fx"),
    ]  # fmt: skip
    note = (
        "Speed-up over autoregressive decoding, methods of one mode interleaved on the same prompts. Methods whose "
        "draft is M2 were measured in a run of their own. The best k is chosen on these prompts."
    )
    gains = [
        {**common.speed_columns(row), **{key: row[key] for key in ("method", "k", "tokens_per_s")}}
        for row in speeds.to_dict("records")
    ]
    return [
        Table("hsddw-ablation", "HSDDW: what each part adds", columns, json_values(rows), note),
        Table("hsddw-window-sensitivity", rows=json_values(gains)),
    ]


def entropy_table(verified: pd.DataFrame) -> Table:
    """Build figure 6, and the AUC of entropy as a predictor of rejection, from methods with fixed windows."""
    rows = []
    for (mode, by), group in verified[verified["method"].isin(FIXED)].groupby(["mode", "by"], sort=False):
        accepted, rejected = (group["entropy"][group["accepted"] == verdict] for verdict in (True, False))
        label = torch.tensor([not verdict for verdict in group["accepted"]], dtype=torch.float64)
        auc = soft_label_auc(torch.tensor(group["entropy"].to_list(), dtype=torch.float64), label)
        counts = {"accepted": len(accepted), "rejected": len(rejected)}
        means = {"mean_accepted": accepted.mean(), "mean_rejected": rejected.mean()}
        rows.append({"mode": mode, "by": by, **counts, **means, "auc": float(auc)})
    columns = [
        Column("mode", "mode"), Column("by", "drafted, verified"), Column("accepted", "accepted", ",d"),
        Column("rejected", "rejected", ",d"), Column("mean_accepted", "mean entropy, accepted", ".2f"),
        Column("mean_rejected", "rejected", ".2f"), Column("auc", "AUC", ".3f"),
    ]  # fmt: skip
    note = "Nats, of the distribution that a token was drawn from, up to the first rejected token; fixed windows."
    return Table("hsddw-entropy", "Entropy of accepted and rejected tokens", columns, json_values(rows), note)


def redundancy_table(k: int, rows: Sequence[Row]) -> Table:
    """Build table 4."""
    columns = [
        Column("mode", "mode"), Column("method", f"method, k={k}"), Column("drafted", "drafted", ",d"),
        Column("accepted", "accepted", ",d"), Column("redundancy", "sigma", ".0%"),
        Column("inner", "sigma of M1 at M2", ".0%"), Column("utilization", "eta", ".0%"),
        Column("M1", "from M1", ".0%"), Column("M2", "from M2", ".0%"), Column("target", "from the target", ".0%"),
    ]  # fmt: skip
    note = (
        "Sigma: 1 - accepted / drafted tokens of the target's rounds; at M2, of what M1 drafted for it. Eta: target "
        "calls per token. From: the model that produced the tokens of the responses."
    )
    return Table("hsddw-redundancy", "Tokens drafted in vain", columns, json_values(rows), note)


if __name__ == "__main__":
    sys.exit(main_of(HsddwConfig, run))
