"""`draftsmith eval policies`: what is an acceptance head worth beside every other way to end a draft?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.heads.directory import drafter_identity, head_config
from draftsmith.data.progress import say
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import trained_for
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.record import Recording, TargetAnswers
from draftsmith.eval.replay.rollouts import ChainRollouts
from draftsmith.eval.studies.common import (
    StudyConfig,
    StudyContext,
    comma_numbers,
    head_directories,
    load_heads,
    prepare,
    recorded_chains,
    reduced,
    write_results,
)
from draftsmith.eval.studies.policies.comparison import DrafterMode, PolicyComparison, compare_policies
from draftsmith.eval.studies.policies.families import PolicyGrid
from draftsmith.eval.studies.policies.measured import cross_check, own_c
from draftsmith.eval.studies.policies.prompts import known_grams, least_third, overlap, parted, training_texts
from draftsmith.eval.studies.policies.tables import OVERLAP, shown_first, summary_of, tables_of
from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.drafters.chains import chain_methods
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.types import InputError, SamplingParams, at_least, between

# What --quick makes of the settings.
MOST = {"dev_limit": 6, "limit": 9, "max_new_tokens": 48, "max_drafted": 8, "repeats": 1}
QUICK_BENCH = 2
INSTEAD = {"hs": "0.2,0.4,0.6,0.8,0.95", "ts": "0.3,0.6", "cs": "0.1,0.35"}


@dataclass(frozen=True, kw_only=True)
class PoliciesConfig(StudyConfig):
    """Compares stop policies of draft chains on the same text and the same accept draws: fixed lengths, thresholds,
    learning while decoding, acceptance heads, and what a policy that knew more would gain. Settings are chosen on dev
    prompts. Run again, it goes on from the rounds that are recorded.

    Attributes:
        draft: what drafts chains: a draft model, a trained head, or several of them.
        heads: folders of acceptance heads by name, head directories or trainings' outputs. Each is used with the
            drafter that it was trained for, at the temperatures of its labels' mode: greedy, or sampling.
        draft_heads: deprecated, the old name of --heads for the draft model's.
        eagle_heads: deprecated, the old name of --heads for an EAGLE head's.
        split: prompts that are reported; none takes all.
        dev_prompts: a source of prompts that settings are chosen on, where they are in another than `prompts`.
        dev_split: split of the prompts that settings are chosen on. Where it is the reported one, or the rows name no
            split, the last quarter of the prompts is for choosing and the others are reported.
        train_split: prompts whose text heads were trained on, where train_text names none.
        train_text: directories of artefacts that heads were trained on, for the overlap of answers with them.
        ngram: tokens of the n-grams that the overlap counts.
        limit: report on the first so many prompts; 0 takes all.
        dev_limit: choose on the first so many prompts of dev_split; 0 takes all.
        max_drafted: longest draft.
        cs: costs of a drafted token by that of a round without a draft, separated by commas; this machine's own is
            added.
        hs: thresholds on the probability that some drafted token is rejected.
        ts: thresholds on q of each drafted token.
        bench_limit: decode so many prompts with the chosen settings for real, on the clock; 0 leaves it out.
    """

    split: str | None = "test"
    limit: int = 120
    max_new_tokens: int = 128
    heads: tuple[Path, ...] = ()
    draft_heads: Path | None = None
    eagle_heads: Path | None = None
    dev_prompts: str | None = None
    dev_split: str | None = "dev"
    train_split: str = "train"
    train_text: tuple[Path, ...] = ()
    ngram: int = 8
    dev_limit: int = 40
    max_drafted: int = 16
    cs: str = "0.05,0.1,0.2,0.35"
    hs: str = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9,0.95,0.98,0.99"
    ts: str = "0.1,0.2,0.3,0.4,0.5,0.6,0.7,0.8,0.9"
    bench_limit: int = 40

    @property
    def chain_drafters(self) -> list[str]:
        return [name for name in chain_methods() if name in self.drafters]

    @property
    def grid(self) -> PolicyGrid:
        deepest = self.max_drafted
        return PolicyGrid(
            tuple(range(1, deepest + 1)),
            tuple(comma_numbers("ts", self.ts, float)),
            tuple(comma_numbers("hs", self.hs, float)),
            tuple(sorted({max(1, deepest // 2), deepest})),
        )

    def check(self) -> None:
        """
        Raises:
            InputError: settings that make no sense.
        """
        for name in ("max_drafted", "ngram"):
            at_least(name, getattr(self, name), 1)
        for name in ("dev_limit", "bench_limit"):
            at_least(name, getattr(self, name), 0)
        for name in ("hs", "ts", "cs"):
            for value in comma_numbers(name, getattr(self, name), float):
                between(name, value, 0, 10 if name == "cs" else 1)
        if not self.chain_drafters:
            raise InputError("draft", "nothing", "a drafter", "Pass --draft: a draft model, a head, or several.")
        for name in ("draft", "eagle"):
            if getattr(self, f"{name}_heads") is not None and name not in self.drafters:
                found, expected = f"heads of what {name} drafts without it", "--draft with it"
                raise InputError(f"{name}_heads", found, expected, "Pass --draft DIR too.")
        for place in (place for folder in self.heads for place in head_directories(folder).values()):
            if trained_for(str(place)) not in self.chain_drafters:
                found = f"{place}, for what {trained_for(str(place))} drafts, which is not given"
                raise InputError("heads", found, "--draft with it", "Pass --draft DIR too.")


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
