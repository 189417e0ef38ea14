"""`draftsmith eval policies`: what is an acceptance head worth beside every other way to end a draft?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftsmith.data.console import json_values, log_note
from draftsmith.data.heads.directory import drafter_identity, head_config
from draftsmith.data.settings import comma_numbers
from draftsmith.data.store.files import make_directory, write_json
from draftsmith.data.store.reading import read_object
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.results import cpu_name
from draftsmith.eval.replay.record import Recording, TargetAnswers
from draftsmith.eval.studies.common import (
    StudyContext,
    bench_directory,
    load_heads,
    measured,
    prepare,
    recorded_chains,
    reduced,
    write_results,
)
from draftsmith.eval.studies.forward_times import bench_rows, gain_interval
from draftsmith.eval.studies.policies.comparison import FIXED, DrafterMode, Policy, PolicyComparison, compare_policies
from draftsmith.eval.studies.policies.prompts import KnownGrams, copied_shares, parted, training_texts
from draftsmith.eval.studies.policies.settings import PoliciesConfig
from draftsmith.eval.studies.policies.tables import FREE, HEAD, LOOKING, OVERLAP, shown_first, summary_of, tables_of
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters.chains import chain_methods
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.types import SamplingParams

Row = dict[str, Any]
# What --quick makes of the settings.
MOST = {"dev_limit": 6, "limit": 9, "max_new_tokens": 48, "max_drafted": 8, "repeats": 1}
QUICK_BENCH = 2
INSTEAD = {"hs": "0.2,0.4,0.6,0.8,0.95", "ts": "0.3,0.6", "cs": "0.1,0.35"}


@sole_writer()
def run(config: PoliciesConfig) -> Path:
    """Record, choose, replay, decode, print the tables and write `output`/results.json, which is there only when
    complete."""
    config.check()
    if config.quick:
        config = reduced(config, MOST, {**INSTEAD, "bench_limit": min(config.bench_limit, QUICK_BENCH)})
    dev, config = parted(config)
    context = prepare(config, [chain_methods()[name] for name in config.chain_drafters], dev)
    known = {tuple(prompt.prompt_ids) for prompt in dev}
    if both := sum(tuple(prompt.prompt_ids) in known for prompt in context.prompts):
        total = len(context.prompts)
        log_note(f"{both} of {total} reported prompts are among those that settings are chosen on: gains flatter.")
    heads = {drafter: study_heads(config, context.models, drafter) for drafter in config.chain_drafters}
    train = KnownGrams(training_texts(config), config.ngram)
    own = {name: own_c(config, context.models, name) for name in config.chain_drafters}
    found = []
    for scene in scenes(config, context, dev, heads):
        overlaps = [train.share(answer.tokens) for answer in scene.test.answers]
        log_note(f"{scene.title}: {', '.join(scene.heads) or 'no head'}; c = {own[scene.drafter]:.3f} here")
        cs = (*comma_numbers("cs", config.cs, float), own[scene.drafter])
        copied = copied_shares(context.prompts, scene.test.answers)
        found.append(compare_policies(scene, config.grid, cs, overlaps, copied, config.seed))
    decoded = [row for compared in found for row in cross_check(config, compared)] if config.bench_limit else []
    tables, summary = tables_of(found, decoded), summary_of(found, decoded)
    if not train:
        log_note("Of the text that heads were trained on nothing is known (--train-text): no table of overlaps.")
        tables = [table for table in tables if table.name != OVERLAP]
    return write_results("policies", config, context, tables, summary, shown_first(tables), c=own)


def study_heads(config: PoliciesConfig, models: Models, drafter: str) -> dict[str, AcceptanceHead]:
    """The acceptance heads of one drafter, by name.

    Raises:
        InputError: one was trained for another.
    """
    places = config.head_places[drafter]
    if not places:
        return {}
    identity = None if drafter == "draft" else drafter_identity(config.drafters[drafter], models.target)
    return load_heads(places, models.embedder(drafter), identity)


def has_labels_of(directory: Path, params: SamplingParams) -> bool:
    """Whether a head's labels are of this mode, greedy or sampling; where it does not say, they may be."""
    made_with = (head_config(directory).get("sampling") or {}).get("temperature", [])
    temperatures = made_with if isinstance(made_with, list) else [made_with]
    return not temperatures or params.greedy in [value == 0 for value in temperatures]


def scenes(
    config: PoliciesConfig,
    context: StudyContext,
    dev: Sequence[BenchPrompt],
    heads: Mapping[str, Mapping[str, AcceptanceHead]],
) -> Iterator[DrafterMode]:
    """Every drafter at every temperature, recorded in output/rollouts or read from there. heads: of each drafter."""
    for params in config.sampling:
        how = Recording(params, config.max_drafted, config.max_new_tokens, config.seed, context.eos_ids)
        splits = {"dev": list(dev), "test": context.prompts}
        answers = {split: TargetAnswers(context.models.target, how) for split in splits}
        for drafter in config.chain_drafters:
            places = config.head_places[drafter]
            own = {name: head for name, head in heads[drafter].items() if has_labels_of(places[name], params)}
            recorded = {
                split: recorded_chains(
                    config.output / "rollouts" / f"{drafter}-t{params.temperature:g}-{split}",
                    context.models, drafter, prompts, how, own, "together", answers[split],
                )
                for split, prompts in splits.items()
            }  # fmt: skip
            yield DrafterMode(drafter, params, own, **recorded)


def own_c(config: PoliciesConfig, models: Models, drafter: str) -> float:
    """c (`MeasuredTimes.step_cost`); kept in `output`, and taken from there on the same machine: policies that are
    chosen and decoded with it are the same when the study goes on."""
    path = config.output / f"cost-{drafter}.json"
    machine = {"cpu": cpu_name(), "device": config.device, "threads": config.num_threads, "dtype": config.dtype}
    if path.exists() and (kept := read_object(path, {"machine": dict, "c": float}))["machine"] == machine:
        return float(kept["c"])
    c = models.times.step_cost(models, drafter)
    make_directory(path.parent)
    write_json(path, {"machine": machine, "c": c})
    return c


def cross_check(config: PoliciesConfig, compared: PolicyComparison) -> list[Row]:
    """Settings of this machine's c, decoded for real on the first `bench_limit` reported prompts, one row each: the
    fixed K that the cost model chose and its neighbours, the best head's policy, the best training-free ones;
    throughput over the fastest of the fixed K, counts beside those of the replay."""
    scene, at = compared.scene, compared.own
    k, head = int(at.fixed.policy.value), at.best("head")
    named = [(FIXED, Policy("k", near)) for near in (k, k - 1, k + 1) if 1 <= near <= scene.test.depth]
    best = ((HEAD, head), (FREE, at.best("free")), (LOOKING, at.best("looking")))
    named += [(role, chosen.policy) for role, chosen in best if chosen is not None]
    roles: dict[str, tuple[str, Policy]] = {}
    for role, policy in named:
        method = policy.method(scene.drafter, at.c)
        assert method is not None
        roles.setdefault(method, (role, policy))
    instead: dict[str, Any] = {"limit": config.bench_limit}
    if head is not None:
        instead["acceptance"] = str(config.head_places[scene.drafter][head.policy.head])
    name = f"bench-{scene.drafter}"
    rows = measured(config, list(roles), scene.params, name, **instead)
    single = bench_rows(bench_directory(config, scene.params, name))
    clock = config.clock
    speed = {method: rows[method]["tokens_per_s"] for method in roles}
    base = max((method for method, (role, _) in roles.items() if role == FIXED), key=speed.__getitem__)
    found = []
    for method, (role, policy) in roles.items():
        replayed = compared.totals(at, policy, config.bench_limit)
        ends = None if method == base else gain_interval(single, method, base, clock, config.seed)
        low, high = ends or (None, None)
        found.append(
            {
                "scene": scene.title, "drafter": scene.drafter, "mode": scene.mode, "role": role, "method": method,
                "is_base": method == base,
                **{key: rows[method][key] for key in ("prompts", "tokens_per_s", "speedup", "tau", "discard_rate")},
                "gain": speed[method] / speed[base] - 1, "low": low, "high": high,
                "tau_replayed": replayed.tau, "discard_replayed": replayed.discard_rate,
            }
        )  # fmt: skip
    return [json_values(row) for row in found]
