"""`draftsmith eval eagle2`: the experiments of EAGLE-2 (Li et al. 2024): acceptance by position and by confidence,
ablations, and what the number of nodes and the depth are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.bench.trees import read_tree
from draftsmith.eval.replay.record import Recording
from draftsmith.eval.replay.replay import replay_tree
from draftsmith.eval.replay.trees import TreeRecorder, record_trees
from draftsmith.eval.report.figures import Figure
from draftsmith.eval.studies.common import (
    Ground,
    StudyConfig,
    decode,
    measured,
    numbers,
    prepare,
    reduced,
    write_results,
)
from draftsmith.eval.studies.eagle2.figures import (
    Found,
    Size,
    ablation_table,
    acceptance_by_confidence,
    acceptance_by_position,
    acceptance_by_task,
    confidence_table,
    measured_speed,
    predicted_speed,
    prediction_table,
    summary_of,
    tau_by_size,
)
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
    def sizes(self) -> list[Size]:
        """Of the trees whose counts are replayed."""
        counts, depths = numbers("nodes", self.nodes, int), numbers("depths", self.depths, int)
        return [Size(count, depth, self.topk) for depth in depths for count in counts]

    @property
    def measured_sizes(self) -> list[Size]:
        counts = numbers("measured_nodes", self.measured_nodes, int)
        depths = numbers("measured_depths", self.measured_depths, int)
        return [Size(count, depth, self.topk) for depth in depths for count in counts]

    @property
    def ablated_sizes(self) -> list[Size]:
        """
        Raises:
            InputError: what is no size.
        """
        found = []
        for text in self.ablations.split(","):
            parts = text.strip().split(":")
            if len(parts) != 3 or not all(part.isdecimal() for part in parts):
                raise InputError("ablations", repr(text), "nodes:depth:topk, such as 60:6:10", "Correct it.")
            found.append(Size(*map(int, parts)))
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
    ground = prepare(config, [*labels, f"eagle-tree:tree={config.tree}", *(size.label for size in replayed)])
    found = [look(config, ground, labels, params) for params in config.sampling]
    return write_results(
        config, "eagle2", ground, figures_of(config, found), summary_of(config.ablated_sizes, timed, found)
    )


def ablation_labels(config: Eagle2Config) -> list[str]:
    """Both parts on and off, at every size."""
    return [label for size in config.ablated_sizes for label in size.ablations.values()]


def look(config: Eagle2Config, ground: Ground, labels: Sequence[str], params: SamplingParams) -> Found:
    """Everything in one mode."""
    static = watch(config, ground, f"eagle-tree:tree={config.tree}", params)
    dynamic = watch(config, ground, config.ablated_sizes[0].label, params)
    return Found(
        params.temperature,
        static,
        dynamic,
        replays(config, ground, params),
        measured(config, labels, params),
    )


def watch(config: Eagle2Config, ground: Ground, label: str, params: SamplingParams) -> list[Node]:
    """Decode all prompts with one method; the nodes that have a verdict."""
    seen: list[Node] = []

    def on_round(prompt: BenchPrompt, done: Round) -> None:
        seen.extend(nodes_of(prompt, done, params, ground.eos_ids))

    decode(config, ground, label, params, on_round)
    return seen


def replays(config: Eagle2Config, ground: Ground, params: SamplingParams) -> dict[Size, Totals]:
    """Counts of every size, from one recording of the largest trees."""
    depth = max(size.depth for size in config.sizes)
    how = Recording(params, depth, config.max_new_tokens, config.seed, ground.eos_ids)
    rollouts = record_trees(TreeRecorder(ground.models, Eagle2(nodes=1, topk=config.topk), how), ground.prompts)
    return {size: pool(replay_tree(rollouts, size.nodes, size.depth)) for size in config.sizes}


def figures_of(config: Eagle2Config, found: Sequence[Found]) -> list[Figure]:
    shape = read_tree(config.tree)
    return [
        ablation_table(config.ablated_sizes, REFERENCES, found),
        acceptance_by_position(shape, config.tree, found),
        acceptance_by_task(shape, config.tree, found),
        acceptance_by_confidence(found, config.seed),
        confidence_table(found),
        tau_by_size(found),
        measured_speed(config.measured_sizes, found),
        predicted_speed(config.measured_sizes, found),
        prediction_table(config.measured_sizes, found),
    ]
