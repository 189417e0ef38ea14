"""`draftsmith eval policies`: what is an acceptance head worth beside every other way to end a draft?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.heads.directory import drafter_identity, head_config
from draftsmith.data.progress import say
from draftsmith.data.settings import comma_numbers
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import trained_for
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.record import Recording, TargetAnswers
from draftsmith.eval.replay.rollouts import ChainRollouts
from draftsmith.eval.studies.common import (
    StudyContext,
    head_directories,
    load_heads,
    prepare,
    recorded_chains,
    reduced,
    write_results,
)
from draftsmith.eval.studies.policies.comparison import DrafterMode, PolicyComparison, compare_policies
from draftsmith.eval.studies.policies.measured import cross_check, own_c
from draftsmith.eval.studies.policies.prompts import known_grams, least_third, overlap, parted, training_texts
from draftsmith.eval.studies.policies.settings import PoliciesConfig
from draftsmith.eval.studies.policies.tables import OVERLAP, shown_first, summary_of, tables_of
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters.chains import chain_methods
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.types import InputError, SamplingParams

# What --quick makes of the settings.
MOST = {"dev_limit": 6, "limit": 9, "max_new_tokens": 48, "max_drafted": 8, "repeats": 1}
QUICK_BENCH = 2
INSTEAD = {"hs": "0.2,0.4,0.6,0.8,0.95", "ts": "0.3,0.6", "cs": "0.1,0.35"}


@dataclass(frozen=True)
class DrafterHeads:
    """The acceptance heads of one drafter, by name, with the directory and the labels' temperatures of each (none
    known: all)."""

    heads: Mapping[str, AcceptanceHead]
    places: Mapping[str, Path]
    temperatures: Mapping[str, Sequence[float]]

    def at(self, params: SamplingParams) -> dict[str, AcceptanceHead]:
        """Heads whose labels are of this mode."""
        return {
            name: head
            for name, head in self.heads.items()
            if not self.temperatures[name] or params.greedy in [value == 0 for value in self.temperatures[name]]
        }


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
        say(f"{both} of {total} reported prompts are among those that settings are chosen on: gains flatter.")
    heads = {name: drafter_heads(config, context.models, name) for name in config.chain_drafters}
    train = known_grams(training_texts(config), config.ngram)
    own = {name: own_c(config, context.models, name) for name in config.chain_drafters}
    found = []
    for scene in scenes(config, context, dev, heads):
        overlaps = [overlap(answer.tokens, train, config.ngram) for answer in scene.test.answers]
        say(f"{scene.title}: {', '.join(scene.heads) or 'no head'}; c = {own[scene.drafter]:.3f} here")
        cs = (*comma_numbers("cs", config.cs, float), own[scene.drafter])
        found.append(compare_policies(scene, config.grid, cs, overlaps, least_third(overlaps), config.seed))
    measured = [row for compared in found for row in timed(config, compared, heads)]
    tables, summary = tables_of(found, measured), summary_of(found, measured)
    if not train:
        say("Of the text that heads were trained on nothing is known (--train-text): no table of overlaps.")
        tables = [table for table in tables if table.name != OVERLAP]
    return write_results("policies", config, context, tables, summary, shown_first(tables), c=own)


def timed(
    config: PoliciesConfig, compared: PolicyComparison, heads: Mapping[str, DrafterHeads]
) -> list[dict[str, Any]]:
    """The chosen settings, decoded for real; nothing with bench_limit 0."""
    if not config.bench_limit:
        return []
    return cross_check(config, compared, heads[compared.scene.drafter].places, config.bench_limit)


def drafter_heads(config: PoliciesConfig, models: Models, drafter: str) -> DrafterHeads:
    """Raises:
    InputError: a folder without heads, or a head that was trained for another drafter.
    """
    old = {"draft": config.draft_heads, "eagle": config.eagle_heads}.get(drafter)
    places = head_directories(old) if old is not None else {}
    for folder in config.heads:
        own = {name: place for name, place in head_directories(folder).items() if trained_for(str(place)) == drafter}
        for name in own.keys() & places.keys():
            raise InputError("heads", f"{own[name]} and {places[name]}", "one head of a name", "Rename one of them.")
        places |= own
    if not places:
        return DrafterHeads({}, {}, {})
    if drafter != "draft":
        heads = load_heads(places, models.target, drafter_identity(config.drafters[drafter], models.target))
    else:
        assert models.draft is not None
        heads = load_heads(places, models.draft)
    return DrafterHeads(heads, places, {name: label_temperatures(place) for name, place in places.items()})


def label_temperatures(directory: Path) -> list[float]:
    """Temperatures that the head's labels were made at; none where it does not say."""
    made_with = (head_config(directory).get("sampling") or {}).get("temperature", [])
    return list(made_with) if isinstance(made_with, list) else [float(made_with)]


def scenes(
    config: PoliciesConfig, context: StudyContext, dev: Sequence[BenchPrompt], heads: Mapping[str, DrafterHeads]
) -> Iterator[DrafterMode]:
    """Every drafter at every temperature, recorded in output/rollouts or read from there."""
    for params in config.sampling:
        how = Recording(params, config.max_drafted, config.max_new_tokens, config.seed, context.eos_ids)
        splits = {"dev": list(dev), "test": context.prompts}
        answers = {split: TargetAnswers(context.models.target, how) for split in splits}
        for drafter in config.chain_drafters:
            own = heads[drafter].at(params)
            recorded: dict[str, ChainRollouts] = {
                split: recorded_chains(
                    config.output / "rollouts" / f"{drafter}-t{params.temperature:g}-{split}",
                    context.models, drafter, prompts, how, own, "together", answers[split],
                )
                for split, prompts in splits.items()
            }  # fmt: skip
            yield DrafterMode(drafter, params, own, recorded["dev"], recorded["test"])
