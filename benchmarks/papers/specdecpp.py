"""Repeat the experiments of SpecDec++ (Huang et al. 2024) on a pair of models.

    sh benchmarks/papers/specdecpp.sh
    python benchmarks/papers/specdecpp.py --heads runs/specdecpp/heads --output runs/specdecpp/results

specdecpp.sh makes acceptance labels and trains heads of several depths and loss weights. This script reads off what
every fixed K and every threshold of every head would do, fits the cost model T = t_draft N_draft + t_target N_target
(eq. 2.1, section 4.2) and decodes with the best settings (tables 1 and 3).
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.benchmarks.papers.rollouts import RAW, Floats, Policy, Recorder, Rollouts, decoded
from draftsmith.data.console import (
    Column,
    Table,
    format_interval,
    json_values,
    log_note,
    print_table,
    progress_bar,
    tables_to_json,
)
from draftsmith.data.store.datasets import collate_acceptance, open_dataset
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.command import BenchConfig, bench
from draftsmith.eval.bench.prompts import read_prompts
from draftsmith.eval.bench.results import Resamples, read_rows
from draftsmith.eval.bench.runner import load_run
from draftsmith.eval.meta import RESULTS, describe
from draftsmith.eval.settings import AnswerLength, DraftSettings, PromptChoice, Running
from draftsmith.launch.cli import main_of
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.metrics import binary_kl, soft_label_auc
from draftsmith.modules.decoding.trace import DecodeTrace, Totals, pool
from draftsmith.modules.drafters.method_names import parse_methods
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.files import make_directory, write_json
from draftsmith.modules.pretrained.heads import load_head
from draftsmith.modules.types import InputError, SamplingParams, check_range

Row = Mapping[str, Any]
# Completions loop at the size of the shipped models and would flatter every drafter: they are left out.
EMBEDDED_TASKS = (
    "rename,add_docstring,remove_docstring,add_type_hints,remove_type_hints,wrap_in_try,sort_imports,explain"
)
# The head and threshold of the paper's headline numbers (section 4).
PUBLISHED_W_REJ, PUBLISHED_DEPTH, PUBLISHED_H = 6.0, 3, 0.7
# The paper's table of eval KL: w_rej = 6, by depth 0..4.
PAPER_EVAL_KL = dict(enumerate((0.637, 0.596, 0.589, 0.582, 0.575)))
MIX = 0.15  # share of tokens that the draft reads from the target's text instead of its own (section 3.3)
BEST_K, BEST_T, BEST_HEAD = "best fixed K", "best threshold on q", "best head and h"
PUBLISHED, ORACLE = "published: w_rej 6, D 3, h 0.7", "oracle (lemma 2.1)"


@dataclass(frozen=True, kw_only=True)
class SpecDecPPConfig(DraftSettings, PromptChoice, AnswerLength, Running):
    """Measures what acceptance heads of several depths and loss weights gain.

    Attributes:
        target: Model directory, hub id or embedded:target.
        head: The draft model.
        data: JSONL, JSON or Parquet file of chats, a prompts artifact, a data set, or embedded:prompts.
        temperature: The paper samples at 1.
        heads: Folder of acceptance heads, or of the outputs of their trainings.
        labels: Folder with train/acceptance and eval/acceptance, the labels that heads are compared on.
        dev_split: Prompts to choose settings on.
        limit: Prompts to report.
        repeats: Runs of every measured method on every prompt; the median counts.
        ks: Fixed draft lengths.
        thresholds: Values of h.
        min_drafted: Shortest draft under a threshold.
        max_drafted: Longest draft under a threshold.
        label_prompts: Rows of each artifact of labels that are read.
        dev_prompts: Dev prompts to choose settings on.
        output: Directory that receives results.json and the runs of `eval bench`.
    """

    target: str = "embedded:target"
    head: tuple[str, ...] = ("embedded:draft",)
    data: str = "embedded:prompts"
    split: str = "test"
    tasks: str | None = EMBEDDED_TASKS
    max_new_tokens: int = 256
    temperature: float = 1.0
    heads: Path = Path("runs/specdecpp/heads")
    labels: Path = Path("runs/specdecpp/data")
    dev_split: str = "dev"
    limit: int = 48
    repeats: int = 1
    ks: tuple[int, ...] = tuple(range(2, 15))
    thresholds: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    min_drafted: int = 2
    max_drafted: int = 20
    label_prompts: int = 60
    dev_prompts: int = 24
    output: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "draft" not in self.drafters:
            raise InputError("head", "no draft model", "one", "Name one.")
        for h in self.thresholds:
            check_range("thresholds", h, 0.0, 1.0, "()")
        check_range("ks", min(self.ks), 1)
        check_range("min_drafted", self.min_drafted, 1)
        check_range("max_drafted", self.max_drafted, self.min_drafted)
        if self.dev_split == self.split:
            raise InputError("split", f"{self.dev_split}, {self.split}", "two different splits", "Name two.")


@dataclass(frozen=True)
class ForwardTimes:
    """Seconds per drafted token and per target call, fitted to rows of a bench (eq. 2.1-2.3)."""

    t_draft: float
    t_target: float
    r2: float
    rows: int

    @classmethod
    def fit(cls, rows: Sequence[Row], clock: str) -> ForwardTimes:
        """Fit by least squares without intercept, one row per method and prompt.

        Rows of ar are left out, whose target calls read one token.
        """
        rows = [row for row in rows if row["method"] != "ar"]
        counts = np.array([[row["num_draft_tokens"], row["num_target_calls"]] for row in rows], np.float64)  # [N, 2]
        seconds = np.array([row[f"{clock}_s"] for row in rows], np.float64)
        weights = np.linalg.lstsq(counts, seconds, rcond=None)[0]
        residual = np.square(seconds - counts @ weights).sum()
        total = np.square(seconds - seconds.mean()).sum()
        return cls(float(weights[0]), float(weights[1]), float(1 - residual / total) if total else np.nan, len(rows))

    def seconds(self, totals: Totals) -> float:
        return self.t_draft * totals.num_draft_tokens + self.t_target * totals.num_target_calls


@sole_writer()
def run(config: SpecDecPPConfig) -> Path:
    """Measure; write OUTPUT/results.json."""
    return Study(config).measure()


class Study:
    """Loaded models and heads, with the rollouts of the dev prompts and of the reported ones."""

    def __init__(self, config: SpecDecPPConfig):
        self.config, self.params = config, SamplingParams(config.temperature)
        torch.set_num_threads(1)
        target = Checkpoint(config.target)
        self.prompts, dev = (
            read_prompts(config.data, target, split, config.tasks, limit)
            for split, limit in ((config.split, config.limit), (config.dev_split, config.dev_prompts))
        )
        self.models = load_run(config, target, parse_methods("spec"), [*self.prompts, *dev], [self.params])
        assert self.models.draft is not None
        self.draft = self.models.draft
        self.places = head_directories(config.heads)
        self.heads: dict[str, AcceptanceHead] = {}
        for name, place in self.places.items():
            head = load_head(place, self.draft, kind="acceptance")
            assert isinstance(head, AcceptanceHead)
            self.heads[name] = head
        depth = max(config.max_drafted, *config.ks)
        self.rollouts = dict[str, list[Rollouts]]()
        for split, prompts in ((config.dev_split, dev), (config.split, self.prompts)):
            recorder = Recorder(
                self.models, "draft", self.params, depth, config.max_new_tokens, config.seed, self.heads
            )
            with progress_bar(f"rollouts, {split}", len(prompts), "prompts") as advance:
                self.rollouts[split] = list[Rollouts]()
                for number, prompt in enumerate(prompts):
                    self.rollouts[split].append(recorder(prompt, number))
                    advance(1)
        self._traces: dict[tuple[str, Policy], list[DecodeTrace]] = {}

    def traces(self, split: str, policy: Policy) -> list[DecodeTrace]:
        """Return one trace for each answer."""
        if (split, policy) not in self._traces:
            self._traces[split, policy] = [decoded(policy, own, self.heads) for own in self.rollouts[split]]
        return self._traces[split, policy]

    @cached_property
    def published(self) -> str | None:
        """Name of the head with the paper's inputs, w_rej and depth, if there is one."""
        alike = [(head.config.tied, name) for name, head in self.heads.items() if is_published(head)]
        return min(alike)[1] if alike else None

    def threshold(self, head: str, h: float, calibrated: bool) -> Policy:
        limits = self.config.min_drafted, self.config.max_drafted
        return Policy("h", h, head if calibrated else head + RAW, *limits)

    def grid(self) -> list[Policy]:
        """Return fixed K, thresholds on q, and thresholds of each head, raw and calibrated."""
        config = self.config
        policies = [Policy("k", k) for k in config.ks]
        policies += [Policy("t", t, maximum=config.max_drafted) for t in config.thresholds]
        for head in self.heads:
            for calibrated in (False, True):
                policies += [self.threshold(head, h, calibrated) for h in config.thresholds]
        return policies

    def bench(self, split: str, limit: int, policies: Sequence[Policy], head: str) -> list[Row]:
        """Decode with these settings and one head, interleaved; return the rows per prompt.

        A finished run of the same settings is read. A prompt that one of them could not answer is left out.
        """
        config, output = self.config, self.config.output / f"bench-{split}-{head}-t{self.params.temperature:g}"
        shared = {item.name for item in dataclasses.fields(BenchConfig)} & {f.name for f in dataclasses.fields(config)}
        settings = {name: getattr(config, name) for name in shared}
        settings |= {"split": split, "limit": limit, "acceptance": str(self.places[head]), "output": output}
        settings |= {"methods": ",".join(dict.fromkeys(str(policy.method("draft")) for policy in policies))}
        # Turns as `read_prompts` reads them.
        bench(BenchConfig(**settings | {"turns": "last", "temperature": str(self.params.temperature)}))
        rows = read_rows(output)
        failed = {row["id"] for row in rows if row["error"] is not None}
        return [row for row in rows if row["id"] not in failed]

    def measure(self) -> Path:
        """Fit times and choose settings on the dev prompts, decode the reported ones, write the results."""
        config, clock = self.config, self.config.clock
        # Lengths over the whole range and the published rule, for the times of the cost model.
        ks, count = sorted(config.ks), 5
        spread = sorted({ks[round(i * (len(ks) - 1) / (count - 1))] for i in range(count)})
        timing = self.published or next(iter(self.heads))
        timed = [*(Policy("k", k) for k in spread), self.threshold(timing, PUBLISHED_H, False)]
        timed.append(self.threshold(timing, 0.5, True))
        times = ForwardTimes.fit(self.bench(config.dev_split, config.dev_prompts, timed, timing), clock)

        log_note("Replaying every K, and every h of every head")
        chosen = self.choose(times)
        runs: dict[str, list[Row]] = {}
        for head in dict.fromkeys(policy.head for policy in chosen.values() if policy.head in self.heads):
            own = [policy for policy in chosen.values() if policy.head in ("", head)]
            runs[head] = self.bench(config.split, config.limit, own, head)

        fits = {"dev": times, **{head: ForwardTimes.fit(rows, clock) for head, rows in runs.items()}}
        theory = [{"run": head, **row} for head, rows in runs.items() for row in theory_rows(rows, fits[head], clock)]
        return self.write_results(
            [
                throughput_table(self.throughput_rows(chosen, times, runs)),
                kl_table(self.kl_rows()),
                *regression_tables(fits, theory),
            ]
        )

    def choose(self, times: ForwardTimes) -> dict[str, Policy]:
        """Return the fastest settings on the dev prompts by the cost model, the first among equals."""
        speeds = {}
        for policy in self.grid():
            totals = pool(self.traces(self.config.dev_split, policy))
            speeds[policy] = totals.num_tokens / times.seconds(totals)
        chosen = {
            name: max((policy for policy in speeds if policy.rule == rule), key=speeds.__getitem__)
            for name, rule in ((BEST_K, "k"), (BEST_T, "t"), (BEST_HEAD, "h"))
        }
        if self.published is not None:
            chosen[PUBLISHED] = self.threshold(self.published, PUBLISHED_H, False)
        return chosen

    def throughput_rows(
        self, chosen: Mapping[str, Policy], times: ForwardTimes, runs: Mapping[str, Sequence[Row]]
    ) -> list[Row]:
        """Return a row per setting: tokens/s by the cost model on both splits, and measured where it was decoded."""
        config, fixed, rows = self.config, chosen[BEST_K], list[Row]()
        for role, policy in {**chosen, ORACLE: Policy("oracle")}.items():
            row: dict[str, Any] = {"role": role, "rule": policy.label, "head": policy.head or None}
            row |= dict.fromkeys(("gain_theory", "gain_theory_ci", "gain_measured", "gain_measured_ci"))
            row |= {"dev_theory": rate(self.pairs(config.dev_split, policy, times))}
            pairs, base = (self.pairs(config.split, own, times) for own in (policy, fixed))
            row["test_theory"] = rate(pairs)
            if policy != fixed:
                row["gain_theory"], row["gain_theory_ci"] = gain(pairs, base, config.seed)
            if policy.rule != "oracle":
                of_run = runs[policy.head] if policy.head else next(iter(runs.values()))
                ar, own, decoded_base = (
                    measured_pairs(of_run, str(name), config.clock)
                    for name in ("ar", policy.method("draft"), fixed.method("draft"))
                )
                row |= {"measured": rate(own), "speedup": rate(own) / rate(ar)}
                if policy != fixed:
                    row["gain_measured"], row["gain_measured_ci"] = gain(own, decoded_base, config.seed)
            rows.append(json_values(row))
        return rows

    def pairs(self, split: str, policy: Policy, times: ForwardTimes) -> Floats:
        """Return tokens and their seconds by the cost model [prompts, 2]."""
        totals = [pool([trace]) for trace in self.traces(split, policy)]
        return np.array([(own.num_tokens, times.seconds(own)) for own in totals])

    @torch.inference_mode()
    def kl_rows(self) -> list[Row]:
        """Return KL(P || P^) in nats and AUC by (w_rej, D), on train and eval labels.

        kl: of the head's output as it is, which the paper's threshold reads; corrected: after log(w_rej / w_acc) was
        added to its logit.
        """
        config, labels = self.config, dict[str, tuple[torch.Tensor, torch.Tensor]]()
        for name in ("train", "eval"):
            directory = config.labels / name / "acceptance"
            if not directory.exists():
                continue
            identity = {"draft": self.draft.info.identity}
            dataset = open_dataset(directory, "acceptance", identity, mix=MIX, seed=config.seed)
            states, probs = [], []
            for number in range(min(config.label_prompts, len(dataset))):
                batch = collate_acceptance([dataset.item(number, 0)])
                mask = batch.loss_mask.to(self.draft.device)
                states.append(self.draft.features(batch.z_ids.to(self.draft.device))[mask].float())
                probs.append(batch.accept_prob.to(self.draft.device)[mask])
            labels[name] = torch.cat(states), torch.cat(probs)  # [N, H], [N]
        rows = []
        for name, head in self.heads.items():
            row: dict[str, Any] = {"head": name, "w_rej": head.config.w_rej, "depth": head.config.num_blocks}
            for kind, (hidden, label) in labels.items():
                raw = head(hidden)
                row[f"{kind}_kl"] = float(binary_kl(raw, label))
                row[f"{kind}_kl_corrected"] = float(binary_kl(head.corrected(raw), label))
                row[f"{kind}_auc"] = float(soft_label_auc(raw, label))
            rows.append(row)
        return sorted(rows, key=lambda row: (row["w_rej"], row["depth"]))

    def write_results(self, tables: Sequence[Table]) -> Path:
        """Write results.json last, and print the tables."""
        config = self.config
        identities = {"target": self.models.target.info.identity, "models": {"draft": self.draft.info.identity}}
        meta = describe("specdecpp", config, self.prompts, config.data, **identities)
        meta["command"] = shlex.join(["python", *sys.argv])
        make_directory(config.output)
        write_json(config.output / RESULTS, {"meta": meta, "tables": tables_to_json(tables)})
        for table in tables:
            print_table(table)
        log_note(f"Written to {config.output / RESULTS}")
        return config.output


def head_directories(root: Path) -> dict[str, Path]:
    """Return name -> head directory for every folder in `root` that is a head or a training's output."""
    directories: dict[str, Path] = {}
    for folder in sorted(path for path in root.glob("*") if path.is_dir()):
        place = next((place for place in (folder, folder / "best") if (place / "config.json").exists()), None)
        if place is not None:
            directories[folder.name] = place
    if not directories:
        expected = "a folder of acceptance heads or of trainings' outputs"
        raise InputError("heads", f"no head in {root}", expected, "Check the path.")
    return directories


def is_published(head: AcceptanceHead) -> bool:
    config = head.config
    return (config.w_rej / config.w_acc, config.num_blocks) == (PUBLISHED_W_REJ, PUBLISHED_DEPTH)


def measured_pairs(rows: Sequence[Row], method: str, clock: str) -> Floats:
    """Return the tokens and seconds of a method, [prompts, 2]."""
    return np.array([(row["tokens"], row[f"{clock}_s"]) for row in rows if row["method"] == method], np.float64)


def rate(pairs: Floats) -> float:
    """Return tokens per second of pairs [prompts, 2]: a ratio of sums."""
    tokens, seconds = pairs.sum(0)
    return float(tokens / seconds)


def gain(pairs: Floats, base: Floats, seed: int) -> tuple[float, str | None]:
    """Return (tokens/s of `pairs`) / (tokens/s of `base`) - 1, with its 95 % interval; none for fewer than two prompts.

    pairs, base [prompts, 2]: tokens and seconds of the same prompts, which are resampled together.
    """
    drawn = Resamples(range(len(pairs)), seed)

    def speed(values: Floats) -> Floats:
        return drawn.sums(values[:, 0]) / drawn.sums(values[:, 1])

    ends = drawn.interval(speed(pairs) / speed(base) - 1)
    return rate(pairs) / rate(base) - 1, format_interval(ends, "+.1%", " to ") or None


def theory_rows(rows: Sequence[Row], fitted: ForwardTimes, clock: str) -> Iterator[Row]:
    """Yield measured throughput per method beside the cost model's for the same counts."""
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        tokens, drafted, calls = (
            sum(row[name] for row in own) for name in ("tokens", "num_draft_tokens", "num_target_calls")
        )
        measured = rate(measured_pairs(own, method, clock))
        theory = tokens / (fitted.t_draft * drafted + fitted.t_target * calls)
        yield {"method": method, "measured": measured, "theory": theory, "difference": theory / measured - 1}


def throughput_table(rows: Sequence[Row]) -> Table:
    """Build tables 1 and 3."""
    columns = [
        Column("role", "setting"), Column("head", "head"),
        Column("rule", "rule"), Column("dev_theory", "cost model, dev (tok/s)", ".1f"),
        Column("test_theory", "cost model, test (tok/s)", ".1f"), Column("gain_theory", "over best K", "+.1%"),
        Column("gain_theory_ci", "95 % interval"), Column("measured", "measured (tok/s)", ".1f"),
        Column("speedup", "over ar", ".2fx"), Column("gain_measured", "over best K", "+.1%"),
        Column("gain_measured_ci", "95 % interval"),
    ]  # fmt: skip
    note = (
        "Settings are the fastest by the cost model on the dev prompts. Cost model: replayed counts, times fitted to "
        "a bench on the dev prompts. Measured: decoding of the reported prompts, interleaved with the fixed K. "
        "No decoder can run the oracle."
    )
    return Table("specdecpp-throughput", "Best throughput (SpecDec++, tables 1 and 3)", columns, rows, note)


def kl_table(rows: Sequence[Row]) -> Table:
    """Build the paper's table of KL."""
    columns = [
        Column("w_rej", "w_rej", "g"), Column("depth", "D"), Column("train_kl", "train KL, raw", ".4f"),
        Column("eval_kl", "eval KL, raw", ".4f"), Column("paper", "eval KL, paper", ".3f"),
        Column("train_kl_corrected", "train KL, corrected", ".4f"),
        Column("eval_kl_corrected", "eval KL, corrected", ".4f"), Column("eval_auc", "eval AUC", ".3f"),
    ]  # fmt: skip
    table = [
        {**row, "paper": PAPER_EVAL_KL.get(row["depth"]) if row["w_rej"] == PUBLISHED_W_REJ else None} for row in rows
    ]
    note = "Mean binary KL in nats over drafted tokens. The paper's pair is another: compare directions, not sizes."
    return Table("specdecpp-kl", "KL of the heads by w_rej and depth", columns, json_values(table), note)


def regression_tables(fits: Mapping[str, ForwardTimes], theory: Sequence[Row]) -> list[Table]:
    """Build table 2 and the comparison of section 4.2."""
    fitted = [
        {"of": name, "rows": own.rows, "t_draft": own.t_draft * 1e3, "t_target": own.t_target * 1e3, "r2": own.r2}
        for name, own in fits.items()
    ]
    times = [
        Column("of", "rows"), Column("rows", "number", "d"), Column("t_draft", "t_draft (ms)", ".3f"),
        Column("t_target", "t_target (ms)", ".3f"), Column("r2", "R2", ".4f"),
    ]  # fmt: skip
    compared = [
        Column("run", "head"), Column("method", "method"), Column("measured", "measured (tok/s)", ".1f"),
        Column("theory", "theory (tok/s)", ".1f"), Column("difference", "theory / measured - 1", "+.1%"),
    ]  # fmt: skip
    note = "The run's own counts, at times fitted to the same run. ar was not part of the fits."
    return [
        Table("specdecpp-forward-times", "Forward times by regression (section 4.2)", times, json_values(fitted)),
        Table("specdecpp-theory", "Theoretical and measured throughput", compared, json_values(theory), note),
    ]


if __name__ == "__main__":
    sys.exit(main_of(SpecDecPPConfig, run))
