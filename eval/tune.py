"""`draftsmith eval tune`: method and settings for this machine, these models and these prompts, written as decode.yaml.

Successive halving over real rounds of the bench (Jamieson and Talwalkar 2016): all settings decode the first prompt,
the faster half goes on to the second, half of these to the third and fourth, and so on. Every comparison is paired on
the same prompts. The finalists are measured anew on all prompts, and the fastest of them is tried in each precision of
its drafts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftsmith.data.console import Column, Table, format_interval, json_values, log_note, print_table, print_text
from draftsmith.data.settings import DraftSettings, Sampling, check_not_negative, check_positive
from draftsmith.data.store.files import make_directory, write_json, write_text
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.measuring import measure_group
from draftsmith.eval.bench.prompts import BenchPrompt, longest_sequence, read_prompts
from draftsmith.eval.bench.results import BASELINE, RESULTS, Row, describe, of_methods, summarise, tokens_per_s
from draftsmith.eval.bench.runner import Runner, load_models, load_run, make_runners, trained_for
from draftsmith.eval.report.tables import to_json
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.decoding.learner import snapshot_learned_state
from draftsmith.modules.decoding.tree import MAX_NODES, num_candidates
from draftsmith.modules.drafters.chains import FixedK, by_drafter, chain_methods
from draftsmith.modules.drafters.methods import Models, Named, parse_method, parse_methods
from draftsmith.modules.drafters.trees import tree_methods
from draftsmith.modules.engine.low_precision import Precision, can_multiply
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError

DECODE = "decode.yaml"
WARM_UP_TOKENS = 8
PRECISIONS: tuple[Precision, ...] = ("dtype", "int8", "int4")

# The settings that are tried, as far as --depth, --tree-depth and the models allow them. WIDTHS: children of a node.
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
NGRAMS = (2, 3)
CONFIDENCES = (0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9)
NODES, TREE_DEPTHS, WIDTHS = (6, 10, 16, 24, 40, 60), (1, 2, 3, 4, 6, 8), (4, 8)

# Settings that decode.yaml takes over as they were given; `draftsmith decode` and `draftsmith eval bench` know them.
KEPT = ("temperature", "top_k", "top_p", "ignore_eos", "dtype", "device", "engine", "packed", "draft_precision",
        "target_precision", "num_threads", "seed", "trust_remote_code")  # fmt: skip

COLUMNS = (
    Column("setting", "setting"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("speedup", "speed-up", ".2fx"),
    Column("speedup_ci", "95 % CI", below=True),
    Column("tau", "tau", ".2f"),
    Column("tau_ci", "95 % CI", below=True),
    Column("chosen", ""),
)


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
        finalists: settings that are measured on all prompts.
        repeats: runs of each finalist on every prompt; the median counts.
        output: directory that receives decode.yaml and results.json.
    """

    target: str = "embedded:target"
    prompts: str = "embedded:prompts"
    acceptance: str | None = None
    limit: int = 16
    depth: int = 16
    tree_depth: int = 6
    finalists: int = 4
    repeats: int = 2
    output: Path = dataclasses.field(kw_only=True)


@sole_writer()
def run(config: TuneConfig) -> Path:
    """Measure, print the finalists, and write `output`/decode.yaml and results.json.

    Raises:
        InputError: bad settings, models or prompts; nothing that drafts; an acceptance head without its drafter.
    """
    started = time.perf_counter()
    check_positive(config, "max_new_tokens", "depth", "tree_depth", "finalists", "repeats", "num_threads")
    check_not_negative(config, "limit")
    if not config.drafters:
        raise InputError("draft", "nothing", "what drafts", "Pass --draft DIR: a draft model, a head, or several.")
    reader = trained_for(config.acceptance) if config.acceptance else None
    if reader is not None and reader not in config.drafters:
        found = f"a head for what {reader} drafts, which is not given"
        raise InputError("acceptance", found, "--draft with it", "Pass --draft DIR too.")
    settings = settings_to_try(config, reader)

    # Load, and drop the settings that the models do not allow.
    source = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    prompts = [dataclasses.replace(prompt, number=number) for number, prompt in enumerate(source)]
    models = load_run(config, settings, prompts, config.max_new_tokens, config.sampling)
    # Medusa and Hydra have a head for each token of a chain; other heads draft any number.
    limits = {kind: getattr(head.config, "num_heads", config.depth) for kind, head in models.heads.items()}
    settings = [
        named
        for named in settings
        if not isinstance(named.method, FixedK) or named.method.k <= limits.get(named.method.needs[0], config.depth)
    ]

    # Halve the settings on ever more prompts.
    log_note(f"{len(settings)} settings on {len(prompts)} prompts")
    runners = make_runners(settings, models, [config.sampling])[config.temperature]
    unlearn = [snapshot_learned_state(runner) for runner in runners.values()]
    # The first run of a method pays for its set-up.
    warm_up = dataclasses.replace(config, max_new_tokens=min(config.max_new_tokens, WARM_UP_TOKENS))
    measure_rows(warm_up, prompts[:1], runners, 1)
    finalists = halve(config, prompts, runners)

    # Measure the finalists anew. What they have learned from these prompts must not help them on the same ones.
    for restore in unlearn:
        restore()
    rows = measure_rows(config, prompts, {label: runners[label] for label in finalists}, config.repeats)
    fair = config.sampling.greedy and str(models.target.dtype) == "torch.float32"
    measured = of_methods(rows, config.temperature)
    summaries = summarise(measured, config.clock, config.seed, fair, config.temperature)
    summaries.sort(key=lambda row: -row["tokens_per_s"])
    best = summaries[0]

    # Try the winner in each precision of its drafts.
    chosen = next(named for named in settings if named.label == best["method"])
    precisions = precision_speeds(config, prompts, models, chosen)
    precision = max(precisions, key=lambda bits: precisions[bits], default=None)

    # Show and write.
    about = (
        f"The finalists of {len(settings)} settings, each on the same {len(prompts)} prompts, interleaved; speed-up "
        "over ar, with 95 % bootstrap intervals over prompts."
    )
    if precision is not None:
        speeds = ", ".join(f"{bits} {speed:,.0f}" for bits, speed in precisions.items())
        about += f" Drafts in {precision}, by tokens/s with --draft-precision: {speeds}."
    cells = [
        {
            "setting": row["method"],
            **{name: row[name] for name in ("tokens_per_s", "speedup", "speedup_ci95", "tau", "tau_ci95")},
            "speedup_ci": format_interval(row["speedup_ci95"]),
            "tau_ci": format_interval(row["tau_ci95"]),
            "chosen": "chosen" if row is best else "",
        }
        for row in summaries
    ]
    table = Table("settings", "The fastest settings", COLUMNS, json_values(cells), about)
    print_table(dataclasses.replace(table, title=""), bold="chosen")
    make_directory(config.output)
    write_text(config.output / DECODE, decode_yaml(config, chosen, precision, best["speedup"], len(settings)))
    more = {"clock": config.clock, **models.times.state_dict()}
    meta = describe("tune", config, models.target, prompts, config.prompts, {"draft": models.draft}, **more)
    summary = {
        "chosen": chosen.label,
        "draft_precision": precision,
        **{f"{bits}_tokens_per_s": speed for bits, speed in precisions.items()},
        **{name: best[name] for name in ("speedup", "speedup_ci95", "tau", "tokens_per_s")},
        "settings": len(settings),
        "seconds": time.perf_counter() - started,
    }
    write_json(config.output / RESULTS, {"meta": meta, "tables": to_json([table]), "summary": json_values(summary)})
    print_text(f"{chosen.label}: written to {config.output / DECODE}. Use it: draftsmith decode --config FILE '...'")
    return config.output


def settings_to_try(config: TuneConfig, reader: str | None) -> list[Named]:
    """Return lossless settings of all methods that the given models allow, `ar` first.

    reader: the drafter that the acceptance head was trained for, None without a head.
    """
    depth = config.depth
    lengths = sorted({depth, *(k for k in LENGTHS if k < depth)})
    labels = [BASELINE]
    labels += [f"pld:k={k}:ngram={ngram}" for k in lengths[1::2] for ngram in NGRAMS]
    for drafter, fixed in chain_methods().items():
        if drafter not in config.drafters:
            continue
        own = by_drafter(drafter)
        labels += [f"{fixed}:k={k}" for k in lengths]
        labels += [f"confidence:t={t}:max={depth}{own}" for t in CONFIDENCES]
        labels += [f"self-verify:k={k}{own}" for k in sorted({depth, max(depth // 2, 1)})]
        labels.append(f"online:max={depth}{own}")
        if drafter == reader:
            least = min(2, depth)
            labels += [
                f"specdec++:h={h}:min={least}:max={depth}:calibrated={calibrated}{own}"
                for calibrated in ("off", "on")
                for h in THRESHOLDS
            ]
            labels += [f"cost:max={depth}{own}", f"online:head=on:max={depth}{own}"]
    # Trees of few nodes at any depth, up to what the widths of their levels give.
    depths = sorted({config.tree_depth, *(levels for levels in TREE_DEPTHS if levels < config.tree_depth)})
    for name in (name for kind, name in tree_methods().items() if kind in config.drafters):
        for topk in WIDTHS:
            for levels in depths:
                most = min(num_candidates(topk, levels + 1), MAX_NODES)
                labels += [f"{name}:nodes={nodes}:depth={levels}:topk={topk}" for nodes in NODES if nodes <= most]
    return parse_methods(",".join(labels))


def measure_rows(
    config: TuneConfig, prompts: Sequence[BenchPrompt], runners: Mapping[str, Runner], repeats: int
) -> list[Row]:
    """Measure all runners on all prompts, interleaved. A prompt's seed depends on its number only."""
    rows: list[Row] = []
    for prompt in prompts:
        about = prompt.number, config.temperature, config.max_new_tokens, repeats, [config.seed + prompt.number]
        rows += measure_group(runners, [prompt], *about)
    return rows


def halve(config: TuneConfig, prompts: Sequence[BenchPrompt], runners: Mapping[str, Runner]) -> list[str]:
    """Drop the slower half of the settings again and again, on ever more prompts. Return `ar` and the finalists."""
    measured: dict[str, list[Row]] = {label: [] for label in runners}
    going = [label for label in runners if label != BASELINE]
    # `ar` is measured with the finalists only: nothing is eliminated against it.
    first, count = 0, 1
    while len(going) > config.finalists and first < len(prompts):
        for row in measure_rows(config, prompts[first:count], {label: runners[label] for label in going}, 1):
            measured[row["method"]].append(row)
        going.sort(key=lambda label: -tokens_per_s(measured[label], config.clock))
        half = -(-len(going) // 2)
        # Prompts may end before the settings do: the last ones are then cut at once.
        going = going[: config.finalists if count >= len(prompts) else max(half, config.finalists)]
        log_note(f"{len(going)} settings left after {min(count, len(prompts))} prompts, {going[0]} the fastest")
        first, count = count, 2 * count
    return [BASELINE, *going]


def precision_speeds(
    config: TuneConfig, prompts: Sequence[BenchPrompt], models: Models, chosen: Named
) -> dict[str, float]:
    """Measure tokens/s of the chosen setting by the precision of its drafts.

    Empty where there is no choice: nothing drafts, --draft-precision was given, or the models do not run in others.
    """
    # The acceptance head is too small for its precision to matter.
    needs = set(chosen.method.needs) - {"acceptance"}
    lean = all(isinstance(lm, LlamaLM) for lm in (models.target, models.draft) if lm is not None)
    if config.draft_precision != "dtype" or not needs or not lean or models.target.device.type != "cpu":
        return {}
    longest = longest_sequence(prompts, config.max_new_tokens, models.target.info.max_position)
    runners: dict[str, Runner] = {}
    for bits in filter(can_multiply, PRECISIONS):
        loaded = load_models([chosen], config.paths, longest, config.sampling, models.target, bits, **config.loading)
        loaded = dataclasses.replace(loaded, ends=models.ends, times=models.times)
        runners[bits] = make_runners([chosen], loaded, [config.sampling])[config.temperature][chosen.label]
    # The first run of a method pays for its set-up.
    warm_up = dataclasses.replace(config, max_new_tokens=min(config.max_new_tokens, WARM_UP_TOKENS))
    measure_rows(warm_up, prompts[:1], runners, 1)
    measured = of_methods(measure_rows(config, prompts, runners, config.repeats), config.temperature)
    return {bits: tokens_per_s(rows, config.clock) for bits, rows in measured.items()}


def decode_yaml(config: TuneConfig, chosen: Named, precision: str | None, speedup: float, num_settings: int) -> str:
    """Write the options of `draftsmith decode --config` and `draftsmith eval bench --config`."""

    def full_path(name: str) -> str:
        # A directory by its whole path, so that the file works from anywhere; hub ids and the like as they are.
        return str(Path(name).resolve()) if Path(name).exists() else name

    needs = parse_method(chosen.label).needs
    content: dict[str, Any] = {"target": full_path(config.target)}
    drafters = [full_path(path) for name, path in config.drafters.items() if name in needs]
    content |= {"draft": drafters} if drafters else {}
    content |= {"acceptance": full_path(str(config.acceptance))} if "acceptance" in needs else {}
    content |= {"method": chosen.label, **{name: getattr(config, name) for name in KEPT}}
    content |= {"draft_precision": precision or config.draft_precision}
    about = (
        f"# Chosen by `draftsmith eval tune` among {num_settings} settings: {speedup:.2f}x the measured speed of "
        "decoding without a draft.\n"
        '# draftsmith decode --config THIS "..."\n'
        "# draftsmith eval bench --config THIS --prompts embedded:prompts --output DIR\n"
    )
    return about + yaml.safe_dump(content, sort_keys=False)
