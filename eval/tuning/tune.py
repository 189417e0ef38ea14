"""`draftsmith eval tune`: method and settings for this machine, these models and these prompts, written as decode.yaml.

Acceptance is recorded once and replayed for every setting; forwards are timed by themselves; from both follows what
each setting would reach. The few best, one a family, are then decoded for real, interleaved, and the fastest is taken;
and so is the precision of its drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from draftsmith.data.console import log_note, print_table, print_text
from draftsmith.data.heads.draft_settings import DraftSettings
from draftsmith.data.settings import Sampling, check_not_negative, check_positive, comma_numbers
from draftsmith.data.store.files import make_directory, write_json, write_text
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import load_models, load_run, trained_for
from draftsmith.eval.bench.prompt_runner import answered, measure_group
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence, read_prompts
from draftsmith.eval.bench.results import BASELINE, RESULTS, Row, describe, of_methods
from draftsmith.eval.bench.runner import Runner, make_runners, remember
from draftsmith.eval.bench.summary import tokens_per_s
from draftsmith.eval.cost.clock import clock_of
from draftsmith.eval.cost.machine import DecodingCosts, family_of, measure_costs
from draftsmith.eval.replay.chains import ChainRecorder, LookupRecorder
from draftsmith.eval.replay.record import Recording, TargetAnswers, record_all
from draftsmith.eval.replay.trees import TreeRecorder
from draftsmith.eval.report.tables import to_json
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.eval.tuning.candidates import HEAD, NGRAMS, Grid, Predicted, Recorded, best_of_families, predict, probes
from draftsmith.eval.tuning.reasoning import Choice, summary, tables
from draftsmith.modules.drafters.chains import FixedK, chain_methods
from draftsmith.modules.drafters.methods import Models, Named, parse_method
from draftsmith.modules.drafters.trees import DynamicTrees
from draftsmith.modules.engine.low_precision import Precision, can_int8
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, at_least

DECODE = "decode.yaml"
PRECISIONS: tuple[Precision, ...] = ("dtype", "bf16", "int8")
# Settings that decode.yaml takes over as they were given; `draftsmith decode` and `draftsmith eval bench` know them.
KEPT = ("temperature", "top_k", "top_p", "ignore_eos", "dtype", "device", "engine", "packed", "draft_precision",
        "target_precision", "num_threads", "seed", "trust_remote_code")  # fmt: skip


@dataclass(frozen=True)
class TuneConfig(DraftSettings, PromptChoice, AnswerLength, Sampling, Running):
    """Finds the fastest way to decode: method and settings for this machine, these models and these prompts.

    Attributes:
        target: model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts; take some
            that are like those to come, and not those that speed is reported on.
        acceptance: acceptance head directory.
        limit: use the first so many prompts; 0 takes all.
        depth: longest chain of drafted tokens.
        tree_depth: most levels that a tree is expanded.
        topk: widths of trees, separated by commas; each is recorded by itself.
        verify: best settings that are decoded for real, one a family; 0 trusts the prediction.
        repeats: runs of each of them on every prompt; the median counts.
        output: directory that receives decode.yaml and results.json.
    """

    target: str = "embedded:target"
    prompts: str = "embedded:prompts"
    acceptance: str | None = None
    limit: int = 16
    depth: int = 16
    tree_depth: int = 6
    topk: str = "4,8"
    verify: int = 4
    repeats: int = 2
    output: Path = dataclasses.field(kw_only=True)

    @property
    def reader(self) -> str | None:
        """The drafter whose states the acceptance head reads; None without one."""
        return self.acceptance and trained_for(self.acceptance)

    def weighed(self) -> Grid:
        """The settings in question."""
        topks = tuple(sorted(comma_numbers("topk", self.topk, int)))
        return Grid(self.depth, self.tree_depth, topks)


@dataclass(frozen=True)
class Setup:
    """What tuning works with: everything is loaded, nothing is measured."""

    models: Models
    prompts: list[BenchPrompt]
    settings: list[Named]


@sole_writer()
def run(config: TuneConfig) -> Path:
    """Print the reasoning, and write `output`/decode.yaml and results.json."""
    setup = prepare(config)
    choice = tune(config, setup)
    found = tables(choice)
    print_table(dataclasses.replace(found[0], title=""), bold="chosen")
    make_directory(config.output)
    write_text(config.output / DECODE, decode_yaml(config, choice))
    models = {"draft": setup.models.draft}
    more = {"clock": config.clock, **setup.models.times.state_dict()}
    meta = describe("tune", config, setup.models.target, setup.prompts, config.prompts, models, **more)
    results = {"meta": meta, "tables": to_json(found), "summary": summary(choice)}
    write_json(config.output / RESULTS, {**results, "costs": dataclasses.asdict(choice.costs)})
    print_text(f"{choice.label}: written to {config.output / DECODE}. Use it: draftsmith decode --config FILE '...'")
    return config.output


def prepare(config: TuneConfig) -> Setup:
    """Check the settings and load what they name."""
    check(config)
    grid = config.weighed()
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    settings = grid.settings(config.paths, config.reader)
    models = load_run(config, settings, prompts, config.max_new_tokens, config.sampling)
    vocab_size = models.target.info.vocab_size
    for topk in grid.topks:
        if topk > vocab_size:
            raise InputError("topk", topk, f"{vocab_size}, the vocabulary, or less", "Lower it.")
    # Heads that guess a token each draft no more of them: `build` refuses longer chains.
    heads = {kind: getattr(head.config, "num_heads", grid.depth) for kind, head in models.heads.items()}
    settings = [
        own
        for own in settings
        if not isinstance(own.method, FixedK) or own.method.k <= heads.get(own.method.needs[0], grid.depth)
    ]
    return Setup(models, prompts, settings)


def check(config: TuneConfig) -> None:
    """What can be found wrong before anything is loaded."""
    check_positive(config, "max_new_tokens", "depth", "tree_depth", "repeats", "num_threads")
    check_not_negative(config, "limit", "verify")
    for topk in config.weighed().topks:
        at_least("topk", topk, 1)
    if not config.drafters:
        raise InputError("draft", "nothing", "what drafts", "Pass --draft DIR: a draft model, a head, or several.")
    if config.reader is not None and config.reader not in config.drafters:
        found = f"a head for what {config.reader} drafts, which is not given"
        raise InputError("acceptance", found, "--draft with it", "Pass --draft DIR too.")


def tune(config: TuneConfig, setup: Setup) -> Choice:
    """Record, time, predict, verify."""
    clock = clock_of(config.device, config.num_threads)
    spent: dict[str, float] = {}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        started = clock()
        result = call()
        spent[what] = clock() - started
        return result

    def take_costs() -> DecodingCosts:
        for name in recorded.chains:
            setup.models.times.step_cost(setup.models, name)  # which the rules of cost and online ask for
        probed = {family: [item.method for item in named] for family, named in probes(setup.settings).items()}
        return measure_costs(setup.models, setup.prompts, probed, config.sampling, config.seed, clock)

    def decode(finalists: Sequence[Predicted]) -> dict[str, float]:
        named = [Named(BASELINE, parse_method(BASELINE)), *(item.named for item in finalists)]
        return measured_speeds(config, setup, named, config.repeats) if finalists else {}

    log_note(f"{len(setup.settings)} settings on {len(setup.prompts)} prompts")
    recorded = timed("recording", lambda: record(config, setup))
    costs = timed("costs", take_costs)
    predicted = timed("prediction", lambda: predict(setup.settings, recorded, costs))
    finalists = [item for item in best_of_families(predicted) if item.family != BASELINE][: config.verify]
    measured = timed("verification", lambda: decode(finalists))
    choice = Choice(predicted, measured, costs, spent)
    chosen = choice.expected(choice.label).named
    return replace(choice, precisions=timed("precisions", lambda: precision_speeds(config, setup, chosen)))


def precision_speeds(config: TuneConfig, setup: Setup, chosen: Named) -> dict[str, float]:
    """Tokens/s of the chosen setting by what drafts are computed in, decoded for real and interleaved; empty where
    that is not open: nothing drafts, prediction is trusted, --draft-precision says it already, or there is no other."""
    models, needs = setup.models, set(chosen.method.needs) - {"acceptance"}
    lean = all(isinstance(lm, LlamaLM) for lm in (models.target, models.draft) if lm is not None)
    given = config.draft_precision != "dtype" or not config.verify
    if given or not needs or not lean or models.target.device.type != "cpu":
        return {}
    own = tuple(bits for bits in PRECISIONS if bits != "int8" or can_int8())
    longest = longest_sequence(setup.prompts, config.max_new_tokens, models.target.info.max_position)
    runners: dict[str, Runner] = {}
    for bits in own:
        made = load_models([chosen], config.paths, longest, config.sampling, models.target, bits, **config.loading)
        made = replace(made, ends=models.ends)
        runners[bits] = make_runners([chosen], made, [config.sampling])[config.temperature][chosen.label]
    return speeds_of(config, setup, runners, config.repeats)


def record(config: TuneConfig, setup: Setup) -> Recorded:
    """One recording a drafter, from which all settings are replayed."""
    how = Recording(config.sampling, config.depth, config.max_new_tokens, config.seed, setup.models.ends)
    models = setup.models
    answers = TargetAnswers(models.target, how)
    head = models.acceptance
    chains, trees = {}, {}
    for drafter in (name for name in chain_methods() if name in config.drafters):
        heads = {HEAD: head} if head is not None and config.reader == drafter else {}
        recorder = ChainRecorder(models, drafter, how, heads, answers)
        chains[drafter] = record_all(recorder, setup.prompts)
    for named in setup.settings:
        if isinstance(named.method, DynamicTrees) and family_of(named) not in trees:
            tree_recorder = TreeRecorder(models, named.method, replace(how, depth=config.tree_depth), answers)
            trees[family_of(named)] = record_all(tree_recorder, setup.prompts)
    lookups = {ngram: record_all(LookupRecorder(answers, how, ngram), setup.prompts) for ngram in NGRAMS}
    return Recorded(chains, trees, models, lookups)


def measured_speeds(
    config: TuneConfig,
    setup: Setup,
    named: Sequence[Named],
    repeats: int,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, float]:
    """Label -> tokens/s, interleaved prompt by prompt as in the bench."""
    runners = make_runners(named, setup.models, [config.sampling])[config.temperature]
    return speeds_of(config, setup, runners, repeats, progress)


def speeds_of(
    config: TuneConfig,
    setup: Setup,
    runners: Mapping[str, Runner],
    repeats: int,
    progress: Callable[[int], None] = lambda count: None,
) -> dict[str, float]:
    """The same of runners by their labels."""
    for label, runner in runners.items():  # uncounted: the first run of a method pays for its set-up
        restore = remember(runner)
        answered(label, runner, setup.prompts[:1], config.max_new_tokens, [config.seed])
        restore()
    rows: list[Row] = []
    for number, prompt in enumerate(setup.prompts):
        limits = (config.max_new_tokens, repeats, [config.seed + number])
        rows += measure_group(runners, [prompt], number, config.temperature, *limits)
        progress(1)
    measured = of_methods(rows, config.temperature)
    return {label: tokens_per_s(measured[label], config.clock) for label in runners}


def decode_yaml(config: TuneConfig, choice: Choice) -> str:
    """Settings for `draftsmith decode --config` and `draftsmith eval bench --config`."""
    needs = parse_method(choice.label).needs
    content: dict[str, Any] = {"target": full_path(config.target)}
    drafters = [full_path(path) for name, path in config.drafters.items() if name in needs]
    content |= {"draft": drafters} if drafters else {}
    content |= {"acceptance": full_path(str(config.acceptance))} if "acceptance" in needs else {}
    content |= {"method": choice.label, **{name: getattr(config, name) for name in KEPT}}
    content |= {"draft_precision": choice.precision or config.draft_precision}
    about = (
        f"# Chosen by `draftsmith eval tune` among {len(choice.predicted)} settings: {choice.speedup:.2f}x the speed "
        f"of decoding without a draft, {choice.basis}.\n"
        '# draftsmith decode --config THIS "..."\n'
        "# draftsmith eval bench --config THIS --prompts embedded:prompts --output DIR\n"
    )
    return about + yaml.safe_dump(content, sort_keys=False)


def full_path(name: str) -> str:
    """A directory by its whole path, so that the file works from anywhere; other names as they are."""
    return str(Path(name).resolve()) if Path(name).exists() else name
