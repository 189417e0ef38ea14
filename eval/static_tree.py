"""`draftsmith eval tree`: the best static draft tree for a head, by its accuracies on prompts (Medusa, section 2.3.3).

The target answers the prompts. At every position of its greedy answers, and at every depth behind it, the rank of the
target's token among the head's is counted; of sampled answers, how often the verification accepts the first, second,
... child that is drawn without replacement. The tree with the most expected accepted tokens is grown from these shares
and written as YAML.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import Column, Table, json_values, print_table, print_text
from draftsmith.data.settings import DraftSettings, check_not_negative, check_positive
from draftsmith.data.store.files import make_directory, write_json, write_text
from draftsmith.data.store.writer import sole_writer
from draftsmith.eval.bench.prompts import BenchPrompt, read_prompts
from draftsmith.eval.bench.results import RESULTS, describe
from draftsmith.eval.bench.runner import load_run
from draftsmith.eval.report.tables import to_json
from draftsmith.eval.settings import AnswerLength, PromptChoice, Running
from draftsmith.modules.decoding.branches import BranchDrafter
from draftsmith.modules.decoding.loop import generate_one
from draftsmith.modules.decoding.tree import MAX_NODES, expected_accepted, likeliest_paths
from draftsmith.modules.drafters.methods import Models, Named, known_methods, parse_method
from draftsmith.modules.drafters.trees import StaticTrees
from draftsmith.modules.finite import NO_TOKEN
from draftsmith.modules.sampling import TorchSource, draw_rows, residual, row_probabilities
from draftsmith.modules.types import InputError, SamplingParams, at_most

TREE = "tree.yaml"
RANKS = 10  # children of a node that are considered
GREEDY = SamplingParams()


@dataclass(frozen=True)
class TreeConfig(DraftSettings, PromptChoice, AnswerLength, Running):
    """Chooses a static draft tree for a head by its accuracies on prompts.

    Attributes:
        target: Model directory, hub id or embedded:target.
        prompts: JSONL, JSON or Parquet file of chats, a prompts artefact, a data set, or embedded:prompts; take some
            that are like those to come, and not those that results are reported on.
        limit: Use the first so many prompts; 0 takes all.
        nodes: Drafted tokens of the tree.
        depth: Most levels of the tree; heads that draft fewer tokens have fewer.
        temperature: Above 0: a tree whose nodes are drawn (drawn=on), for answers at this temperature.
        output: Directory that receives tree.yaml and results.json.
    """

    target: str = "embedded:target"
    prompts: str = "embedded:prompts"
    limit: int = 40
    nodes: int = 63
    depth: int = 6
    temperature: float = 0.0
    output: Path = dataclasses.field(kw_only=True)


@sole_writer()
def run(config: TreeConfig) -> Path:
    """Choose the tree, print its accuracies and its expected tau, and write `output`/tree.yaml and results.json.

    Raises:
        InputError: no head, several, or one that drafts no static trees; a head that is never right.
    """
    check_positive(config, "nodes", "depth", "max_new_tokens", "num_threads")
    check_not_negative(config, "limit")
    at_most("nodes", config.nodes, MAX_NODES)
    # One head, which drafts static trees.
    methods = {method.uses[0]: name for name, method in known_methods().items() if issubclass(method, StaticTrees)}
    heads = list(config.drafters.items())
    if len(heads) != 1 or heads[0][0] not in methods:
        found = ", ".join(f"{path} ({kind})" for kind, path in heads) or "nothing"
        expected = f"one head that drafts static trees: {', '.join(methods)}"
        raise InputError("draft", found, expected, "Pass --draft HEAD.")
    ((kind, head_path),) = heads
    method = methods[kind]
    prompts = read_prompts(config.prompts, config.target, config.split, config.keep_tasks, config.limit)
    params = SamplingParams(config.temperature)
    models = load_run(config, [Named(method, parse_method(method))], prompts, config.max_new_tokens, params)

    # Grow the tree with the most expected tokens.
    depth = min(config.depth, getattr(models.heads[kind].config, "num_heads", config.depth))
    ranks = min(RANKS, models.target.info.vocab_size)
    accuracies = rank_accuracies(models, kind, prompts, config.max_new_tokens, depth, ranks, params)
    paths = likeliest_paths(accuracies, config.nodes)
    if not paths:
        found = f"a head that is never right by its {ranks} first tokens"
        raise InputError("draft", found, "one that is, on these prompts", "Train it.")
    expected_tau = 1 + expected_accepted(accuracies, paths)
    drawn = "" if params.greedy else ":drawn=on"
    make_directory(config.output)
    file = config.output / TREE
    about = (
        f"# Chosen by `draftsmith eval tree` for {head_path}: {len(paths)} nodes, {expected_tau:.3f} tokens a round "
        f"expected.\n# draftsmith eval bench --methods {method}:tree=THIS{drawn} ...\n"
    )
    write_text(file, about + "".join(f"- {list(path)}\n" for path in paths))

    depths = [sum(len(path) == level for path in paths) for level in range(1, 1 + max(map(len, paths)))]
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
    about = "Shares of places where those before were right; the target's greedy answers."
    title = "How often the token of a rank is the target's"
    if drawn:
        title = "How often the child drawn first, second, ... is accepted"
        about = f"Shares of all places; the target's answers at temperature {config.temperature:g}."
    table = Table("accuracies", title, columns, rows, about)
    print_table(table)
    meta = describe("tree", config, models.target, prompts, config.prompts, {})
    summary = {"nodes": len(paths), "depths": depths, "expected_tau": expected_tau, "paths": paths}
    results = {"meta": meta, "tables": to_json([table]), "summary": json_values(summary), "accuracies": accuracies}
    write_json(config.output / RESULTS, results)
    print_text(f"{len(paths)} nodes, by depth {depths}: {expected_tau:.3f} tokens a round expected")
    print_text(f"Use it: --methods {method}:tree={file}{drawn}")
    return config.output


def rank_accuracies(
    models: Models,
    kind: str,
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    depth: int,
    ranks: int,
    params: SamplingParams = GREEDY,
) -> list[list[float]]:
    """Return [depth][rank]: how often the head's token of this rank is the target's.

    Greedily they are counted at the positions of the target's answers at which all tokens before were among the first
    `ranks`. Sampling, the expected share of draws without replacement that are accepted, at all positions.
    """
    target, head = models.target, models.heads[kind]
    branches = head.branches(target, depth)
    right, reached = torch.zeros(depth, ranks), torch.zeros(depth)
    for number, prompt in enumerate(prompts):
        ids = prompt.prompt_ids
        answer = generate_one(target, None, ids, params, max_new_tokens, TorchSource(number), models.ends)
        text = [*ids, *answer.tokens]
        # The decoder's first draft follows an answer's first token, which the reading of the prompt gives.
        starts = list(range(max(len(ids) + 1, branches.min_start), len(text)))
        if starts:
            # No state is needed behind the last token.
            session = target.session(1, len(text), head.capture, static=False)
            scores = session.extend([text[:-1]], num_logits=1 if params.greedy else len(starts))
            branches.open(text[:-1], scores.features[0])
            if params.greedy:
                text_right, text_reached = count_ranks(branches, starts, text, depth, ranks)
            else:
                logits = scores.logits[0]  # [S, V], of what follows the text up to each start
                text_right, text_reached = count_draws(branches, starts, text, depth, ranks, params, logits, number)
            right += text_right
            reached += text_reached
    return (right / reached[:, None].clamp_min(1)).tolist()


def count_ranks(
    branches: BranchDrafter, starts: Sequence[int], text: Sequence[int], depth: int, ranks: int
) -> tuple[Tensor, Tensor]:
    """Draft along the text from every start, and count the ranks of the text's own tokens.

    A draft goes on as long as the text's token is among the first `ranks`.

    Returns [depth, ranks], the times that each rank was the text's, and [depth], the drafts that got there.
    """
    right, reached = torch.zeros(depth, ranks, dtype=torch.int64), torch.zeros(depth)
    padded = torch.tensor([*text, *[0] * depth])
    first, active = torch.tensor(starts), torch.ones(len(starts), dtype=torch.bool)

    def draw(piece: slice, level: int, logits: Tensor) -> Tensor:
        # The text's token at this depth of every draft of the piece.
        places = first[piece] + level
        tokens = padded[places].to(logits.device)
        own = logits.gather(1, tokens[:, None])  # [s, 1]
        rank = (logits > own).sum(1).cpu()  # [s]
        inside = active[piece] & (places < len(text))
        reached[level] += inside.sum()
        active[piece] = inside & (rank < ranks)
        right[level] += torch.bincount(rank[active[piece]], minlength=ranks)
        # A NaN is reported by the drafter as a token that cannot be.
        return torch.where(own[:, 0].isnan(), NO_TOKEN, tokens)

    branches.grow(starts, depth, draw)
    return right, reached


def count_draws(
    branches: BranchDrafter,
    starts: Sequence[int],
    text: Sequence[int],
    depth: int,
    ranks: int,
    params: SamplingParams,
    target_logits: Tensor,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Draft along the text from every start, and add up how likely each of `ranks` draws is accepted.

    At every place children are drawn without replacement from the head's distribution, and verified one after the other
    as by `verify._descend_drawn`. target_logits: [S, V], behind the text up to each of the S starts, which are
    consecutive.

    Returns [depth, ranks], the sums over places, and [depth], the places.
    """
    accepted, reached = torch.zeros(depth, ranks), torch.zeros(depth)
    padded, first = torch.tensor([*text, *[0] * depth]), torch.tensor(starts)
    generator = torch.Generator().manual_seed(seed)

    def draw(piece: slice, level: int, logits: Tensor) -> Tensor:
        places = first[piece] + level
        known = (places < len(text)).nonzero()[:, 0]
        count, rows = len(known), [params] * len(known)
        reached[level] += count
        target_prob = row_probabilities(target_logits[places[known] - starts[0]], rows)  # [s, V]
        draft_prob, rejected = row_probabilities(logits[known], rows), torch.ones(count, device=logits.device)
        for rank in range(ranks if count else 0):
            uniforms = torch.rand(count, generator=generator, dtype=torch.float64).to(logits.device)
            # Where nothing is left to draw there is no child, and nothing accepted.
            drawn = draw_rows(draft_prob, uniforms).clamp_min(0)[:, None]
            p, q = target_prob.gather(1, drawn)[:, 0], draft_prob.gather(1, drawn)[:, 0]
            chance = torch.where(q > 0, (p / q).clamp(max=1.0), 0.0)
            accepted[level, rank] += float((rejected * chance).sum())
            rejected *= 1 - chance
            target_prob = residual(target_prob, draft_prob)
            left = draft_prob.scatter(1, drawn, 0.0)
            draft_prob = left / left.sum(1, keepdim=True)
        tokens = padded[places].to(logits.device)
        return torch.where(logits.isnan().any(1), NO_TOKEN, tokens)

    branches.grow(starts, depth, draw)
    return accepted, reached
