"""`draftsmith eval eagle2`: the experiments of EAGLE-2 (Li et al. 2024): acceptance by position and by confidence,
ablations, and what the number of nodes and the depth are worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from draftsmith.data.console import Row
from draftsmith.data.settings import comma_numbers
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import read_tree
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.record import Recording, record_all
from draftsmith.eval.replay.replay import replay_tree
from draftsmith.eval.replay.trees import TreeRecorder
from draftsmith.eval.studies import common
from draftsmith.eval.studies.eagle2.found import COUNTS, TreeSize, ablation_table, size_tables, summary_of
from draftsmith.eval.studies.eagle2.nodes import COLUMNS, node_tables, nodes_of
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.trace import pool
from draftsmith.modules.drafters.eagle.head import Eagle2
from draftsmith.modules.types import InputError, SamplingParams, at_least

# Beside the dynamic trees: EAGLE-1's static tree, and a chain.
REFERENCES = ("eagle:k=5", "eagle-tree")


@dataclass(frozen=True, kw_only=True)
class Eagle2Config(common.StudyConfig):
    """Repeats the experiments of EAGLE-2 with an EAGLE head: which drafted tokens are accepted, what ranking them by
    value and reranking them adds, and how many to draft.

    Attributes:
        draft: the directory of an EAGLE head that was trained for the target.
        tree: static tree whose positions are looked at: a shipped name, or a YAML list of paths of ranks.
        ablations: sizes nodes:depth:topk of the ablations, separated by commas; confidence is looked at in the first.
        topk: children of a node, and nodes that are expanded at once, of all trees whose nodes and depth vary.
        nodes: numbers of nodes, separated by commas.
        depths: times that trees are expanded, separated by commas.
        measured_nodes: those of `nodes` that are also measured, each with every one of `measured_depths`.
        measured_depths: those of `depths` that are also measured.
    """

    tree: str = "eagle-1"
    ablations: str = "60:6:10,16:4:4"
    topk: int = 10
    nodes: str = "2,4,6,8,12,16,24,32,48,60"
    depths: str = "1,2,3,4,5,6,8"
    measured_nodes: str = "4,8,16,32,60"
    measured_depths: str = "2,4,6"

    def sizes(self, nodes: str, depths: str) -> list[TreeSize]:
        """Sizes of all these numbers of nodes, each with all these depths; names of the settings that hold them."""
        counts, levels = (comma_numbers(name, getattr(self, name), int) for name in (nodes, depths))
        return [TreeSize(count, depth, self.topk) for depth in levels for count in counts]

    @property
    def ablated_sizes(self) -> list[TreeSize]:
        """
        Raises:
            InputError: what is no size.
        """
        found = []
        for text in self.ablations.split(","):
            parts = text.strip().split(":")
            if len(parts) != 3 or not all(part.isdecimal() for part in parts):
                raise InputError("ablations", repr(text), "nodes:depth:topk, such as 60:6:10", "Correct it.")
            found.append(TreeSize(*map(int, parts)))
        return found


QUICK = {
    "ablations": "60:6:10",
    "nodes": "4,8,16,32,60",
    "depths": "2,4,6",
    "measured_nodes": "8,60",
    "measured_depths": "2,6",
}


@sole_writer()
def run(config: Eagle2Config) -> Path:
    """Decode and measure, print the tables and write `output`/results.json, which is there only when complete."""
    if "eagle" not in config.drafters:
        given = ", ".join(config.drafters.values()) or "nothing"
        raise InputError("draft", given, "an EAGLE head", "Pass --draft: a head of `draftsmith train eagle`.")
    at_least("topk", config.topk, 1)
    if config.quick:
        config = common.reduced(config, {"limit": 6, "repeats": 1}, QUICK)
    replayed, timed = config.sizes("nodes", "depths"), config.sizes("measured_nodes", "measured_depths")
    strange = [size for size in timed if size not in replayed]
    if strange:
        expected = "nodes and depths that are also replayed"
        raise InputError("measured_nodes", strange[0].label, expected, "Add them to --nodes and --depths.")
    ablated, static = config.ablated_sizes, f"eagle-tree:tree={config.tree}"
    ablations = [label for size in ablated for label in size.ablations.values()]
    labels = list(dict.fromkeys([*REFERENCES, *ablations, *(size.label for size in timed)]))
    context = common.prepare(config, [*labels, static, *(size.label for size in replayed)])
    nodes = {label: watch(config, context, label) for label in (static, ablated[0].label)}
    counts = pd.DataFrame([row for params in config.sampling for row in replays(config, context, replayed, params)])
    speeds = pd.DataFrame(
        {"mode": common.mode(params.temperature), **row}
        for params in config.sampling
        for row in common.measured(config, labels, params).values()
    )
    tables = [
        ablation_table(ablated, REFERENCES, speeds),
        *node_tables(nodes[static], nodes[ablated[0].label], read_tree(config.tree), config.seed),
        *size_tables(timed, counts, speeds),
    ]
    return common.write_results("eagle2", config, context, tables, summary_of(tables))


def watch(config: Eagle2Config, context: common.StudyContext, label: str) -> pd.DataFrame:
    """Decode all prompts with one method; the nodes that have a verdict."""
    seen: list[Row] = []
    for params in config.sampling:

        def on_round(prompt: BenchPrompt, done: Round, params: SamplingParams = params) -> None:
            seen.extend(nodes_of(prompt, done, params, context.eos_ids))

        common.decode_prompts(config, context, label, params, on_round)
    return pd.DataFrame(seen, columns=COLUMNS)


def replays(
    config: Eagle2Config, context: common.StudyContext, sizes: Sequence[TreeSize], params: SamplingParams
) -> Iterator[Row]:
    """Counts of every size, from one recording of the largest trees."""
    depth = max(size.depth for size in sizes)
    how = Recording(params, depth, config.max_new_tokens, config.seed, context.eos_ids)
    rollouts = record_all(TreeRecorder(context.models, Eagle2(nodes=1, topk=config.topk), how), context.prompts)
    for size in sizes:
        totals = pool(replay_tree(rollouts, size.nodes, size.depth))
        row = {"mode": common.mode(params.temperature), "size": str(size), "nodes": size.nodes, "depth": size.depth}
        yield row | {"tau": totals.tau, "tokens": totals.num_tokens} | {name: getattr(totals, name) for name in COUNTS}
