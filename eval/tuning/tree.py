"""`draftsmith eval tree`: the static draft tree that a head's own accuracies on prompts make the best (Medusa, section
2.3.3), as a YAML file for its methods of static trees.

How often the token of each rank is the target's is counted at every place of the target's greedy answers, depth by
depth behind the answer's own tokens. The tree of most expected tokens is then grown, and decoded with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import Column, Table, json_values, print_table, print_text
from draftsmith.data.heads.draft_settings import DraftSettings
from draftsmith.data.settings import check_not_negative, check_positive
from draftsmith.data.store.files import make_directory, write_json, write_text
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.load import load_run, read_tree
from draftsmith.eval.bench.prompt_runner import answered
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.bench.results import RESULTS, describe
from draftsmith.eval.bench.runner import make_runners
from draftsmith.eval.replay.record import Recording, TargetAnswers
from draftsmith.eval.report.tables import to_json
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.decoding.branches import BranchDrafter
from draftsmith.modules.decoding.trace import pool
from draftsmith.modules.decoding.tree import MAX_NODES, expected_accepted, likeliest_paths
from draftsmith.modules.drafters.methods import Models, Named, known_methods, parse_method
from draftsmith.modules.drafters.trees import StaticTrees
from draftsmith.modules.finite import NO_TOKEN
from draftsmith.modules.types import InputError, SamplingParams, at_most

TREE = "tree.yaml"


@dataclass(frozen=True)
class TreeConfig(DraftSettings, PromptChoice, AnswerLength, Running):
    """Chooses a static draft tree for a head by its accuracies on prompts, greedily, and measures it on them.

    Attributes:
        target: Model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts; take some
            that are like those to come, and not those that results are reported on.
        limit: Use the first so many prompts; 0 takes all.
        nodes: Drafted tokens of the tree.
        depth: Levels of it at most; heads that draft fewer tokens have fewer.
        ranks: Children of a node that are looked at.
        output: Directory that receives tree.yaml and results.json.
    """

    target: str = "embedded:target"
    prompts: str = "embedded:prompts"
    limit: int = 40
    nodes: int = 63
    depth: int = 6
    ranks: int = 10
    output: Path = dataclasses.field(kw_only=True)


@sole_writer()
def run(config: TreeConfig) -> Path:
    """Print accuracies, and what the tree is expected to do and does; write `output`/tree.yaml and results.json."""
    check_positive(config, "nodes", "depth", "ranks", "max_new_tokens", "num_threads")
    check_not_negative(config, "limit")
    at_most("nodes", config.nodes, MAX_NODES)
    kind, method = method_of(config)
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    models = load_run(config, [Named(method, parse_method(method))], prompts, config.max_new_tokens, SamplingParams())
    at_most("ranks", config.ranks, models.target.info.vocab_size)
    accuracies = measured_accuracies(models, kind, prompts, config)
    paths = likeliest_paths(accuracies, config.nodes)
    if not paths:
        found = f"a head that is never right by its {config.ranks} first tokens"
        raise InputError("draft", found, "one that is, on these prompts", "Train it.")
    make_directory(config.output)
    expected = 1 + expected_accepted(accuracies, paths)
    write_text(config.output / TREE, tree_yaml(paths, method, config, expected))
    tau = measured_tau(models, method, config, prompts)
    depths = [sum(len(path) == depth for path in paths) for depth in range(1, 1 + max(map(len, paths)))]
    table = accuracy_table(accuracies, depths)
    print_table(table)
    meta = describe("tree", config, models.target, prompts, config.prompts, {})
    summary = {"nodes": len(paths), "depths": depths, "expected_tau": expected, "tau": tau, "paths": paths}
    results = {"meta": meta, "tables": to_json([table]), "summary": json_values(summary), "accuracies": accuracies}
    write_json(config.output / RESULTS, results)
    print_text(
        f"{len(paths)} nodes, by depth {depths}: {expected:.3f} tokens a round expected, tau {tau:.3f} on these prompts"
    )
    print_text(f"Use it: --methods {method}:tree={config.output / TREE}")
    return config.output


def method_of(config: TreeConfig) -> tuple[str, str]:
    """The kind of the one head that is given, and the name of its method of static trees.

    Raises:
        InputError: no head, several, or one that drafts no such trees.
    """
    methods = {m.uses[0]: name for name, m in known_methods().items() if issubclass(m, StaticTrees)}
    given = list(config.drafters)
    if len(given) != 1 or given[0] not in methods:
        named = [f"{path} ({kind})" for kind, path in config.drafters.items()]
        found, expected = ", ".join(named) or "nothing", f"one head that drafts static trees: {', '.join(methods)}"
        raise InputError("draft", found, expected, "Pass --draft HEAD.")
    return given[0], methods[given[0]]


def measured_accuracies(
    models: Models, kind: str, prompts: Sequence[BenchPrompt], config: TreeConfig
) -> list[list[float]]:
    """[depth][rank]: how often the token of this rank is the target's greedy one, where those before it were among the
    first `ranks`; over all places of the answers."""
    head = models.heads[kind]
    depth = min(config.depth, getattr(head.config, "num_heads", config.depth))
    branches, counts = head.branches(models.target, depth), Counts(depth, config.ranks)
    how = Recording(SamplingParams(), depth, config.max_new_tokens, config.seed, models.ends)
    answers = TargetAnswers(models.target, how)
    for number, prompt in enumerate(prompts):
        read = answers.read(prompt, number, 0, head.capture)
        text = [*prompt.prompt_ids, *read.answer.tokens]
        # The decoder's first draft follows an answer's first token, which the reading of the prompt gives.
        starts = range(max(len(prompt.prompt_ids) + 1, branches.min_start), len(text))
        if starts:
            # The last token is one that no state is needed behind.
            branches.open(text[:-1], read.features[: len(text) - 1])
            counts.add(branches, list(starts), text)
    return counts.shares


class Counts:
    """Ranks of the target's tokens, by depth."""

    def __init__(self, depth: int, ranks: int):
        self._right, self._reached = torch.zeros(depth, ranks, dtype=torch.int64), torch.zeros(depth)
        self._depth, self._ranks = depth, ranks

    def add(self, branches: BranchDrafter, starts: Sequence[int], text: Sequence[int]) -> None:
        """Drafts that are made to follow the text, from each of the starts: a draft goes on as long as the text's own
        token is among the first `ranks`."""
        padded = torch.tensor([*text, *[0] * self._depth])
        first, alive = torch.tensor(starts), torch.ones(len(starts), dtype=torch.bool)

        def draw(piece: slice, level: int, logits: Tensor) -> Tensor:
            places = first[piece] + level
            tokens = padded[places].to(logits.device)
            own = logits.gather(1, tokens[:, None])
            ranks = (logits > own).sum(1).cpu()
            there = alive[piece] & (places < len(text))
            self._reached[level] += there.sum()
            alive[piece] = there & (ranks < self._ranks)
            self._right[level] += torch.bincount(ranks[alive[piece]], minlength=self._ranks)
            return torch.where(own[:, 0].isnan(), NO_TOKEN, tokens)

        branches.grow(starts, self._depth, draw)

    @property
    def shares(self) -> list[list[float]]:
        return (self._right / self._reached[:, None].clamp_min(1)).tolist()


def measured_tau(models: Models, method: str, config: TreeConfig, prompts: Iterable[BenchPrompt]) -> float:
    """Of decoding the prompts with the tree that was written."""
    label = f"{method}:tree={config.output / TREE}"
    named, name = Named(label, parse_method(label)), str(config.output / TREE)
    found = dataclasses.replace(models, trees={**models.trees, name: read_tree(name)})
    runner = make_runners([named], found, [SamplingParams()])[0.0][label]
    made = [answered(label, runner, [prompt], config.max_new_tokens, [config.seed])[0][0] for prompt in prompts]
    return pool(one.trace for one in made).tau


def tree_yaml(paths: Sequence[Sequence[int]], method: str, config: TreeConfig, expected: float) -> str:
    """The file; paths with parents before children, best first."""
    (head,) = config.drafters.values()
    about = (
        f"# Chosen by `draftsmith eval tree` for {head}: {len(paths)} nodes, {expected:.3f} tokens a round expected.\n"
        f"# draftsmith eval bench --methods {method}:tree=THIS ...\n"
    )
    return about + "".join(f"- {list(path)}\n" for path in paths)


def accuracy_table(accuracies: Sequence[Sequence[float]], depths: Sequence[int]) -> Table:
    """One row a depth."""
    shown = min(4, len(accuracies[0]))
    columns = [
        Column("depth", "depth"),
        *(Column(f"rank_{rank}", f"rank {rank + 1}", ".1%") for rank in range(shown)),
        Column("any", "any rank", ".1%"),
        Column("nodes", "nodes", ",d"),
    ]
    rows: list[dict[str, Any]] = [
        {"depth": depth, "any": sum(level), "nodes": depths[depth - 1] if depth <= len(depths) else 0}
        | {f"rank_{rank}": level[rank] for rank in range(shown)}
        for depth, level in enumerate(accuracies, 1)
    ]
    note = "Shares of places where those before were right; the target's greedy answers."
    return Table("accuracies", "How often the token of a rank is the target's", columns, rows, note)
