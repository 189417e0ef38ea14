"""Compare stop policies of draft chains: fixed lengths, thresholds, online learning, acceptance heads, and true p/q.

    python benchmarks/papers/stop_rules.py --draft embedded:draft --heads HEADS --output runs/stop-rules

All policies are replayed on the same responses with the same accept draws. Settings are chosen on dev prompts at each
cost c of a drafted token (in target calls) and reported on others; those at this machine's own c are also decoded.
Beside the gains stand the probabilities themselves: AUC, Brier score, calibration error and KL of every predictor
against min(1, p/q). HEADS is a folder of acceptance heads or of trainings' outputs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.benchmarks.papers import common
from draftsmith.benchmarks.papers.common import Row, rate, ratio_interval
from draftsmith.benchmarks.papers.replay import (
    FITTED,
    ON_TOP,
    ONLINE,
    RAW,
    TRUE_PROBS,
    Policy,
    PolicyReplay,
    head_probs,
    online_features,
)
from draftsmith.benchmarks.papers.rollouts import ChainRollouts, Floats, Recording, TargetAnswers
from draftsmith.data.console import Column, Table, format_interval, json_values, log_note
from draftsmith.data.settings import comma_numbers
from draftsmith.data.store.writer import sole_writer
from draftsmith.data.text.repetition import Repetition
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.bench.runner import trained_for
from draftsmith.eval.report.tables import drawn_data
from draftsmith.launch.cli import main_of
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.metrics import (
    NUM_BINS,
    binary_kl,
    brier,
    expected_calibration_error,
    fit_platt,
    soft_label_auc,
)
from draftsmith.modules.acceptance.online import OnlineLogistic
from draftsmith.modules.decoding.confidence import log_odds
from draftsmith.modules.decoding.trace import pool
from draftsmith.modules.drafters.methods import chain_drafters, chain_method
from draftsmith.modules.pretrained.heads import drafter_identity, head_config
from draftsmith.modules.types import InputError, SamplingParams, check_range

FIXED = "fixed K"
# Kinds of policies. `free` and `looking` need no training; the latter look for repetitions of the text too.
KINDS = {
    "fixed": "baseline", "free": "training-free", "looking": "training-free, reads repetitions",
    "fitted": "fitted on dev labels", "head": "trained head", "ceiling": "knows p and q",
    "oracle": "knows the verdicts",
}  # fmt: skip
COPYING = 0.2  # share of a response's tokens that repeat earlier text, above which it counts as copying
PUBLISHED_H, PUBLISHED_MIN = 0.7, 2  # of SpecDec++
MIN_TOKENS = 100  # fewer say too little about calibration or ranking
SCENE = Column("scene", "drafter, mode")
INTERVALS = "Intervals are 95 %, by bootstrap over prompts in pairs."
QUICK: dict[str, Any] = {
    "dev_limit": 6, "limit": 9, "max_new_tokens": 48, "max_drafted": 8, "repeats": 1, "bench_limit": 2,
    "hs": "0.2,0.4,0.6,0.8,0.95", "ts": "0.3,0.6", "cs": "0.1,0.35",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StopRulesConfig(common.PaperConfig):
    """Compares stop policies of draft chains on the same text and the same accept draws.

    Attributes:
        draft: What drafts chains: a draft model, a trained head, or several of them.
        heads: Folders of acceptance heads; each is used with the drafter and the mode that it was trained for.
        dev_split: Split that settings are chosen on.
        limit: Prompts to report; 0 takes all.
        dev_limit: Prompts to choose settings on.
        max_drafted: Longest draft.
        cs: Costs of a drafted token in target calls, separated by commas; this machine's own is added.
        hs: Thresholds on the probability that some drafted token is rejected.
        ts: Thresholds on q of each drafted token.
        bench_limit: Prompts to decode with the chosen settings; 0 decodes none.
    """

    draft: tuple[str, ...] = ("embedded:draft",)
    heads: tuple[Path, ...] = ()
    dev_split: str = "dev"
    limit: int = 120
    dev_limit: int = 40
    max_new_tokens: int = 128
    max_drafted: int = 16
    cs: str = "0.05,0.1,0.2,0.35"
    hs: str = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,0.95,0.98,0.99"
    ts: str = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"
    bench_limit: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("max_drafted", self.max_drafted, 1)
        for name in ("dev_limit", "bench_limit"):
            check_range(name, getattr(self, name), 0)
        for name in ("hs", "ts", "cs"):
            for value in comma_numbers(name, getattr(self, name), float):
                check_range(name, value, 0.0, 10.0 if name == "cs" else 1.0, "()")
        if not self.chain_drafters:
            raise InputError("draft", "nothing", "a drafter of chains", "Pass --draft.")
        if self.dev_split == self.split:
            raise InputError("dev_split", self.dev_split, "another split than the reported one", "Name another.")

    @property
    def chain_drafters(self) -> list[str]:
        return [name for name in chain_drafters() if name in self.drafters]

    def head_places(self) -> dict[str, dict[str, Path]]:
        """Return drafter -> directories of the acceptance heads that were trained for it, by name."""
        places: dict[str, dict[str, Path]] = {drafter: {} for drafter in self.chain_drafters}
        for folder in self.heads:
            for name, place in common.head_directories(folder).items():
                drafter = trained_for(str(place))
                if drafter not in places:
                    raise InputError(
                        "heads", f"{place}, for {drafter}", "heads of the --draft", "Pass --draft DIR too."
                    )
                places[drafter][name] = place
        return places

    def families(self, heads: Mapping[str, AcceptanceHead], knows_p: bool) -> list[Family]:
        """Return the policies, of which one per family is chosen on dev prompts."""
        deepest = self.max_drafted
        maxima = sorted({max(1, deepest // 2), deepest})
        ts, hs = (comma_numbers(name, getattr(self, name), float) for name in ("ts", "hs"))

        def by_threshold(predictor: str) -> list[Policy]:
            return [Policy("h", h, predictor, maximum=most) for most in maxima for h in hs]

        def by_cost(predictor: str) -> list[Policy]:
            return [Policy("cost", predictor=predictor, maximum=most) for most in maxima]

        families = [
            Family(FIXED, "fixed", [Policy("k", k) for k in range(1, deepest + 1)]),
            Family("q(y) < t", "free", [Policy("t", t, maximum=most) for most in maxima for t in ts]),
            Family("self-verify (HSDDW)", "free", [Policy("entropy", maximum=most) for most in maxima]),
        ]
        families.append(Family(f"{ONLINE}, cost rule", "looking", by_cost(ONLINE)))
        families.append(Family(f"{FITTED}, threshold", "fitted", by_threshold(FITTED)))
        families.append(Family(f"{FITTED}, cost rule", "fitted", by_cost(FITTED)))
        for name, head in heads.items():
            weighted = head.config.w_rej != head.config.w_acc
            if weighted and head.config.as_published:
                published = Policy("h", PUBLISHED_H, name + RAW, min(PUBLISHED_MIN, deepest), deepest)
                families.append(Family(f"{name}: raw, h 0.7 as published", "head", [published]))
            if weighted:
                families.append(Family(f"{name}: raw, threshold", "head", by_threshold(name + RAW)))
            families.append(Family(f"{name}: calibrated, threshold", "head", by_threshold(name)))
            families.append(Family(f"{name}: calibrated, cost rule", "head", by_cost(name)))
            families.append(Family(f"{name}{ON_TOP}, cost rule", "head", by_cost(name + ON_TOP)))
        if knows_p:
            families.append(Family(f"{TRUE_PROBS}, cost rule", "ceiling", by_cost(TRUE_PROBS)))
        return [*families, Family("oracle", "oracle", [Policy("oracle")])]


@dataclass(frozen=True)
class Family:
    """Policies of which one is chosen on dev prompts. kind: a key of KINDS."""

    name: str
    kind: str
    policies: Sequence[Policy]


@dataclass(frozen=True)
class Choice:
    """A family's policy at one c, and its gain over the best fixed K on the dev prompts."""

    family: Family
    policy: Policy
    dev_gain: float


@dataclass(frozen=True)
class CostChoices:
    """The choice of every family at one c. here: c is this machine's."""

    c: float
    here: bool
    choices: Mapping[str, Choice]

    @property
    def name(self) -> str:
        return f"{self.c:.3g}{' (here)' if self.here else ''}"

    def best(self, kind: str) -> Choice | None:
        """Return the family of a kind with the highest gain on dev prompts."""
        own = [choice for choice in self.choices.values() if choice.family.kind == kind]
        return max(own, key=lambda choice: choice.dev_gain, default=None)


class Scene:
    """One drafter at one temperature with the heads of that mode, replayed on dev and reported prompts."""

    def __init__(
        self,
        config: StopRulesConfig,
        drafter: str,
        params: SamplingParams,
        heads: Mapping[str, AcceptanceHead],
        dev: ChainRollouts,
        test: ChainRollouts,
        copied: Sequence[float],
        own_c: float,
    ):
        self.config, self.drafter, self.params, self.heads = config, drafter, params, heads
        self.mode = "greedy" if params.greedy else common.mode_name(params)
        self.title = f"{'draft model' if drafter == 'draft' else f'{drafter.upper()} chain'}, {self.mode}"
        self.rollouts, self.copied = test, np.array(copied)
        self.fitted = {name: fitted_probs(rollouts, dev) for name, rollouts in (("dev", dev), ("test", test))}
        dev_replay, self.test = (
            PolicyReplay(rollouts, heads, self._probs(name, rollouts))
            for name, rollouts in (("dev", dev), ("test", test))
        )
        families = config.families(heads, dev.accept_along is not None)
        self.at = []
        for c in (*comma_numbers("cs", config.cs, float), own_c):
            rates = {policy: rate(dev_replay.pairs(policy, c)) for family in families for policy in family.policies}
            best = {family.name: max(family.policies, key=rates.__getitem__) for family in families}
            base = rates[best[FIXED]]
            choices = {f.name: Choice(f, best[f.name], rates[best[f.name]] / base - 1) for f in families}
            self.at.append(CostChoices(c, c == own_c, choices))

    def _probs(self, name: str, rollouts: ChainRollouts) -> dict[str, Floats]:
        along = rollouts.accept_along
        return {FITTED: self.fitted[name]} | ({} if along is None else {TRUE_PROBS: along})

    def gain(
        self, at: CostChoices, choice: Choice, base: Choice | None = None, mask: NDArray[np.bool_] | None = None
    ) -> tuple[float, Sequence[float] | None]:
        """Return the gain of a choice over the best fixed K, or another, with its interval. mask: of the prompts."""
        kept = slice(None) if mask is None else mask
        pairs, other = (self.test.pairs(own.policy, at.c)[kept] for own in (choice, base or at.choices[FIXED]))
        return rate(pairs) / rate(other) - 1, ratio_interval(pairs, other, self.config.seed)


@sole_writer()
def run(config: StopRulesConfig) -> Path:
    """Record, choose, replay and decode; write OUTPUT/results.json and report.html."""
    config = common.quick(config, QUICK)
    dev = read_prompts(config.prompts, config.target, config.dev_split, config.keep_tasks, config.dev_limit)
    loaded = common.load(config, [chain_method(name) for name in config.chain_drafters], dev)
    models, places = loaded.models, config.head_places()
    scenes = []
    for params in config.sampling:
        how = Recording(params, config.max_drafted, config.max_new_tokens, config.seed, loaded.eos_ids)
        splits = {"dev": dev, "test": loaded.prompts}
        answers = {split: TargetAnswers(models.target, how) for split in splits}
        for drafter in config.chain_drafters:
            identity = None if drafter == "draft" else drafter_identity(config.drafters[drafter], models.target)
            trained = {name: place for name, place in places[drafter].items() if has_labels_of(place, params)}
            heads = common.load_heads(trained, models.embedder(drafter), identity)
            rollouts = {
                split: common.record_chains(models, drafter, prompts, how, heads, answers[split])
                for split, prompts in splits.items()
            }
            copied = [copied_share(*pair) for pair in zip(loaded.prompts, rollouts["test"].answers, strict=True)]
            c = models.times.step_cost(models, drafter)
            scene = Scene(config, drafter, params, heads, **rollouts, copied=copied, own_c=c)
            log_note(f"{scene.title}: {', '.join(heads) or 'no head'}; c = {c:.3f} here")
            scenes.append(scene)
    decoded = [row for scene in scenes for row in decode_choices(config, scene, places)] if config.bench_limit else []
    tables = [
        head_table(scenes),
        *(gain_table(scene) for scene in scenes),
        drawn_data("stop-rules-gain", gain_rows(scenes)),
        copying_table(scenes),
        *([bench_table(decoded)] if decoded else []),
        *quality_tables(scenes),
    ]
    summary = {f"{row['scene']}, c={row['at']}, {row['policy']}: gain": row["gain"] for row in gain_rows(scenes)}
    return common.write_results("stop_rules", config, loaded, tables, summary)


def has_labels_of(directory: Path, params: SamplingParams) -> bool:
    """Return whether a head's labels are of this mode, greedy or sampling; True if it does not say."""
    recorded = (head_config(directory).get("sampling") or {}).get("temperature", [])
    temperatures = recorded if isinstance(recorded, list) else [recorded]
    return not temperatures or params.greedy in [value == 0 for value in temperatures]


def copied_share(prompt: BenchPrompt, answer: Any) -> float:
    """Return the share of a response's tokens that continue a repetition of the prompt or of itself."""
    mask = [False] * len(prompt.prompt_ids) + [True] * len(answer.tokens)
    shares = Repetition.of([([*prompt.prompt_ids, *answer.tokens], mask)])
    return shares.from_prompt + shares.from_answer


def decode_choices(config: StopRulesConfig, scene: Scene, places: Mapping[str, Mapping[str, Path]]) -> Iterator[Row]:
    """Decode the choices at this machine's c: fixed K and its neighbors, the best head and training-free ones."""
    at = scene.at[-1]
    k = int(at.choices[FIXED].policy.value)
    named = [(FIXED, Policy("k", near)) for near in (k, k - 1, k + 1) if 1 <= near <= config.max_drafted]
    best = {kind: at.best(kind) for kind in ("head", "free", "looking")}
    named += [(KINDS[kind], choice.policy) for kind, choice in best.items() if choice is not None]
    methods: dict[str, tuple[str, Policy]] = {}
    for role, policy in named:
        methods.setdefault(str(policy.method(scene.drafter, at.c)), (role, policy))
    changes: dict[str, Any] = {"limit": config.bench_limit}
    if best["head"] is not None:
        changes["acceptance"] = str(places[scene.drafter][best["head"].policy.head])
    name = f"bench-{scene.drafter}"
    rows = common.measure(config, list(methods), scene.params, name, **changes)
    single = common.bench_rows(common.bench_directory(config, scene.params, name))
    speed = {method: rows[method]["tokens_per_s"] for method in methods}
    base = max((method for method, (role, _) in methods.items() if role == FIXED), key=speed.__getitem__)
    for method, (role, policy) in methods.items():
        replayed = pool(scene.test.traces(policy, at.c)[: config.bench_limit])
        gain, ends = common.bench_gain(single, method, base, config.clock, config.seed)
        yield json_values({
            "scene": scene.title, "role": role, "method": method,
            **{key: rows[method][key] for key in ("tokens_per_s", "speedup", "tau")},
            "tau_replayed": replayed.tau, "gain": None if method == base else gain,
            "interval": "" if method == base else format_interval(ends, "+.1%", " to "),
        })  # fmt: skip


def head_table(scenes: Sequence[Scene]) -> Table:
    """Build the gains of the best head over the best of other kinds, and its share of what true p/q gains."""
    rows = list[Row]()
    for scene in scenes:
        for at in scene.at:
            head, ceiling = at.best("head"), at.best("ceiling")
            if head is None:
                continue
            row = {"scene": scene.title, "c": at.name, "head": head.family.name}
            for kind in ("fixed", "free", "looking"):
                base = at.best(kind)
                assert base is not None
                value, ends = scene.gain(at, head, base)
                interval = format_interval(ends, "+.1%", " to ")
                what = f"head over the best {KINDS[kind]}"
                rows.append({**row, "what": what, "value": value, "interval": interval, "base": base.family.name})
            most = scene.gain(at, ceiling)[0] if ceiling is not None else 0.0
            if most > 0:
                share = scene.gain(at, head)[0] / most
                rows.append({**row, "what": "share of the gain with true p/q", "value": share})
    columns = [
        SCENE, Column("c", "c"), Column("what", "what"), Column("value", "value", "+.1%"),
        Column("interval", "interval"), Column("head", "head"), Column("base", "base"),
    ]  # fmt: skip
    return Table("stop-rules-head", "The trained head beside other policies", columns, json_values(rows), INTERVALS)


def gain_table(scene: Scene) -> Table:
    """Build a row per family and a column per c."""
    columns = [Column("policy", "policy"), Column("kind", "kind")]
    columns += [Column(f"c{number}", f"c = {at.name}") for number, at in enumerate(scene.at)]
    rows = []
    for name, choice in scene.at[0].choices.items():
        row: dict[str, Any] = {"policy": name, "kind": KINDS[choice.family.kind]}
        for number, at in enumerate(scene.at):
            own = at.choices[name]
            row[f"c{number}"] = own.policy.label if name == FIXED else gain_text(*scene.gain(at, own))
        rows.append(row)
    note = f"Time: 1 per round and c per drafted token. Settings are chosen on dev prompts at each c. {INTERVALS}"
    name = f"stop-rules-gains-{scene.drafter}-{common.slug(scene.mode)}"
    return Table(name, f"Gain over the best fixed K, {scene.title}", columns, rows, note)


def gain_text(value: float, ends: Sequence[float] | None) -> str:
    interval = format_interval(ends, "+.1%", " to ")
    return f"{value:+.1%} ({interval})" if interval else f"{value:+.1%}"


def gain_rows(scenes: Sequence[Scene]) -> Iterator[Row]:
    """Yield a row for each scene, c and family, with the chosen setting and its counts."""
    for scene in scenes:
        for at in scene.at:
            for name, choice in at.choices.items():
                totals = pool(scene.test.traces(choice.policy, at.c))
                value, ends = scene.gain(at, choice)
                low, high = ends or (None, None)
                yield json_values({
                    "scene": scene.title, "c": at.c, "at": at.name, "policy": name, "setting": choice.policy.label,
                    "dev_gain": choice.dev_gain, "gain": value, "low": low, "high": high, "tau": totals.tau,
                    "drafted": totals.num_draft_tokens / max(totals.num_target_calls - totals.prompts, 1),
                    "discard_rate": totals.discard_rate,
                })  # fmt: skip


def copying_table(scenes: Sequence[Scene]) -> Table:
    """Build the gains on responses that copy, and on new text."""
    rows, kinds = [], ("head", "free", "looking", "ceiling")
    for scene in scenes:
        copies = scene.copied > COPYING
        for at in scene.at:
            for name, mask in (("new text", ~copies), ("copying", copies)):
                if mask.any():
                    best = {kind: at.best(kind) for kind in kinds}
                    gains = {
                        k: gain_text(*scene.gain(at, own, mask=mask)) for k, own in best.items() if own is not None
                    }
                    rows.append({"scene": scene.title, "at": at.name, "text": name, "count": int(mask.sum()), **gains})
    columns = [SCENE, Column("at", "c"), Column("text", "responses"), Column("count", "prompts", "d")]
    columns += [Column(kind, KINDS[kind]) for kind in kinds if any(kind in row for row in rows)]
    note = f"Copying: more than {COPYING:.0%} of a response's tokens continue a repetition. {INTERVALS}"
    return Table("stop-rules-copying", "Gains of the best of each kind by text", columns, rows, note)


def bench_table(rows: Sequence[Row]) -> Table:
    columns = [
        SCENE, Column("role", "role"), Column("method", "method"), Column("tokens_per_s", "tokens/s", ".1f"),
        Column("speedup", "over ar", ".2fx"), Column("gain", "over the fastest K", "+.1%"),
        Column("interval", "interval"), Column("tau", "tau", ".2f"), Column("tau_replayed", "replayed", ".2f"),
    ]  # fmt: skip
    return Table("stop-rules-bench", "Decoded with the settings of this machine's c", columns, rows, INTERVALS)


def online_probs(rollouts: ChainRollouts) -> Floats:
    """Return probabilities [S, K] of the online fit, which learns from the rounds of decoding with K drafted tokens."""
    model, features = OnlineLogistic(2), online_features(rollouts)
    labeled = rollouts.verified()
    probs = np.full(labeled.shape, np.nan)
    answer, next_start = -1, 1
    for row in range(len(features)):
        probs[row] = [model.prob(x) for x in features[row]]
        if rollouts.answer[row] != answer:
            answer, next_start = int(rollouts.answer[row]), 1
        if rollouts.start[row] == next_start:
            accepted = int(rollouts.num_accepted[row])
            model.observe(features[row][labeled[row]].tolist(), accepted)
            next_start += accepted + 1
    return probs


def fitted_probs(rollouts: ChainRollouts, fit: ChainRollouts) -> Floats:
    """Return probabilities [S, K] of a logistic model of the log-odds of q(y), fitted to the labels of `fit`."""
    labeled = fit.verified()
    odds = log_odds(torch.from_numpy(fit.log_q[labeled]))
    scale, bias = fit_platt(odds, torch.from_numpy(fit.accept_prob[labeled]))
    return torch.sigmoid(scale * log_odds(torch.from_numpy(rollouts.log_q)) + bias).numpy()


def quality(score: Tensor, prob: Tensor | None, label: Tensor) -> dict[str, Any]:
    """Return auc, brier, ece and kl [nats] against soft labels [N]; None where they are not defined.

    score ranks tokens; prob is a probability, if the predictor gives one.
    """
    numbers: dict[str, Any] = dict.fromkeys(("auc", "brier", "ece", "kl"))
    if len(score) >= MIN_TOKENS:
        numbers["auc"] = float(soft_label_auc(score, label))
        if prob is not None:
            # A softmax that rounds to 0 or 1 would have an infinite KL.
            kl = binary_kl(torch.logit(prob.double(), eps=1e-6), label)
            numbers |= {"brier": float(brier(prob, label)), "kl": float(kl)}
            numbers["ece"] = float(expected_calibration_error(prob, label))
    return json_values({"tokens": len(score), **numbers})


def quality_tables(scenes: Sequence[Scene]) -> list[Table]:
    """Build the quality of every predictor's probabilities: overall, by place in the draft, and in bins."""
    overall, by_depth, bins = [], [], []
    for scene in scenes:
        rollouts = scene.rollouts
        mask = rollouts.verified()
        for logits in rollouts.heads.values():  # tokens that every head has read
            mask = mask & ~np.isnan(logits)
        label = torch.from_numpy(rollouts.accept_prob[mask])  # [N]
        depth = np.broadcast_to(np.arange(1, rollouts.depth + 1), mask.shape)[mask]
        probs = {"q(y)": np.exp(rollouts.log_q), "max q": np.exp(rollouts.log_max_q), FITTED: scene.fitted["test"]}
        probs[ONLINE] = online_probs(rollouts)
        for name, head in scene.heads.items():
            probs |= {name + RAW: head_probs(rollouts.heads[name], head, False)}
            probs |= {name: head_probs(rollouts.heads[name], head, True)}
        predictions = {name: (own := torch.from_numpy(values[mask]), own) for name, values in probs.items()}
        entropy: tuple[Tensor, Tensor | None] = (-torch.from_numpy(rollouts.entropy[mask]), None)
        for name, (score, prob) in {**predictions, "entropy": entropy}.items():
            row = {"scene": scene.title, "predictor": name}
            overall.append({**row, "accepted": float(label.mean()), **quality(score, prob, label)})
            if prob is None:
                continue
            for place in np.unique(depth):
                own = torch.from_numpy(depth == place)
                by_depth.append({**row, "depth": int(place), **quality(score[own], prob[own], label[own])})
            order = prob.argsort(stable=True)  # bins of equal mass
            parts = (values.double()[order].tensor_split(NUM_BINS) for values in (prob, label))
            bins += [
                json_values({**row, "predicted": float(p.mean()), "observed": float(y.mean()), "count": len(p)})
                for p, y in zip(*parts, strict=True)
                if len(p)
            ]
    columns = [
        SCENE, Column("predictor", "predictor"), Column("tokens", "tokens", ",d"),
        Column("accepted", "accepted", ".1%"), Column("auc", "AUC", ".3f"), Column("brier", "Brier", ".4f"),
        Column("ece", "ECE", ".4f"), Column("kl", "KL (nats)", ".4f"),
    ]  # fmt: skip
    note = (
        "Labels are min(1, p(y)/q(y)), greedy 1 or 0, of drafted tokens up to the first rejected one of rounds that "
        "begin at every position. A perfect predictor has Brier 0 and KL 0. ECE: 15 bins of equal mass."
    )
    return [
        Table("stop-rules-quality", "Predictors of acceptance", columns, overall, note),
        drawn_data("stop-rules-reliability", bins),
        *(
            drawn_data(f"stop-rules-{key}-by-depth", [row for row in by_depth if row[key] is not None])
            for key in ("auc", "ece")
        ),
    ]


if __name__ == "__main__":
    sys.exit(main_of(StopRulesConfig, run))
