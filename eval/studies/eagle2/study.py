"""`draftsmith eval eagle2`: the experiments of EAGLE-2 (Li et al. 2024): acceptance by position and by confidence,
ablations, and what the number of nodes and the depth are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.settings import comma_numbers
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import read_tree
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.record import Recording, record_all
from draftsmith.eval.replay.replay import replay_tree
from draftsmith.eval.replay.trees import TreeRecorder
from draftsmith.eval.studies.common import (
    StudyConfig,
    StudyContext,
    decode_prompts,
    measured,
    prepare,
    reduced,
    write_results,
)
from draftsmith.eval.studies.eagle2.found import ModeResults, TreeSize, summary_of, tables_of
from draftsmith.eval.studies.eagle2.nodes import Node, nodes_of
from draftsmith.modules.decoding.loop import Round
from draftsmith.modules.decoding.trace import Totals, pool
from draftsmith.modules.drafters.eagle.methods import Eagle2
from draftsmith.modules.types import InputError, SamplingParams, at_least

# Beside the dynamic trees: EAGLE-1's static tree, and a chain.
REFERENCES = ("eagle:k=5", "eagle-tree")


@dataclass(frozen=True, kw_only=True)
class Eagle2Config(StudyConfig):
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

    @property
    def sizes(self) -> list[TreeSize]:
        """Sizes of the trees whose counts are replayed."""
        counts, depths = comma_numbers("nodes", self.nodes, int), comma_numbers("depths", self.depths, int)
        return [TreeSize(count, depth, self.topk) for depth in depths for count in counts]

    @property
    def measured_sizes(self) -> list[TreeSize]:
        counts = comma_numbers("measured_nodes", self.measured_nodes, int)
        depths = comma_numbers("measured_depths", self.measured_depths, int)
        return [TreeSize(count, depth, self.topk) for depth in depths for count in counts]

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
        config = reduced(config, {"limit": 6, "repeats": 1}, QUICK)
    replayed, timed = config.sizes, config.measured_sizes
    strange = [size for size in timed if size not in replayed]
    if strange:
        expected = "nodes and depths that are also replayed"
        raise InputError("measured_nodes", strange[0].label, expected, "Add them to --nodes and --depths.")
    labels = list(dict.fromkeys([*REFERENCES, *ablation_labels(config), *(size.label for size in timed)]))
    context = prepare(config, [*labels, f"eagle-tree:tree={config.tree}", *(size.label for size in replayed)])
    found = [look(config, context, labels, params) for params in config.sampling]
    references, shape = list(REFERENCES), read_tree(config.tree)
    tables = tables_of(config.ablated_sizes, references, timed, shape, found, config.seed)
    return write_results("eagle2", config, context, tables, summary_of(config.ablated_sizes, timed, found))


def ablation_labels(config: Eagle2Config) -> list[str]:
    """Labels of both parts on and off, at every size."""
    return [label for size in config.ablated_sizes for label in size.ablations.values()]


def look(config: Eagle2Config, context: StudyContext, labels: Sequence[str], params: SamplingParams) -> ModeResults:
    """Everything in one mode."""
    static = watch(config, context, f"eagle-tree:tree={config.tree}", params)
    dynamic = watch(config, context, config.ablated_sizes[0].label, params)
    return ModeResults(
        params.temperature,
        static,
        dynamic,
        replays(config, context, params),
        measured(config, labels, params),
    )


def watch(config: Eagle2Config, context: StudyContext, label: str, params: SamplingParams) -> list[Node]:
    """Decode all prompts with one method; the nodes that have a verdict."""
    seen: list[Node] = []

    def on_round(prompt: BenchPrompt, done: Round) -> None:
        seen.extend(nodes_of(prompt, done, params, context.eos_ids))

    decode_prompts(config, context, label, params, on_round)
    return seen


def replays(config: Eagle2Config, context: StudyContext, params: SamplingParams) -> dict[TreeSize, Totals]:
    """Counts of every size, from one recording of the largest trees."""
    depth = max(size.depth for size in config.sizes)
    how = Recording(params, depth, config.max_new_tokens, config.seed, context.eos_ids)
    rollouts = record_all(TreeRecorder(context.models, Eagle2(nodes=1, topk=config.topk), how), context.prompts)
    return {size: pool(replay_tree(rollouts, size.nodes, size.depth)) for size in config.sizes}
