"""Recording the candidates of dynamic trees at every position of the target's answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftsmith.data.models.loading import name_nonfinite
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.record import Recording, TargetAnswers, walk
from draftsmith.eval.replay.rollouts import Ints, TreeRollouts
from draftsmith.modules.decoding.protocols import DraftTree
from draftsmith.modules.decoding.tree import num_candidates
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.drafters.trees import DynamicTrees


class TreeRecorder:
    """Records one answer after another, with trees of one width."""

    def __init__(self, models: Models, method: DynamicTrees, how: Recording, answers: TargetAnswers | None = None):
        """method: whose topk and values are recorded, for trees of any size. answers: those of other recordings of the
        same prompts, if there are any."""
        assert method.topk <= models.target.info.vocab_size and method.by_values
        self._answers, self._how, self._topk = answers or TargetAnswers(models.target, how), how, method.topk
        self._drafter = method.fixed(models, num_candidates(method.topk, how.depth + 1), how.depth)

    @torch.inference_mode()
    def __call__(self, prompt: BenchPrompt, number: int) -> TreeRollouts:
        """number: of the answer, which seeds it."""
        how, topk, num_levels = self._how, self._topk, self._how.depth + 1
        with name_nonfinite([prompt.id]):
            reading = self._answers.read(prompt, number, num_levels, self._drafter.capture)
            count = len(reading.answer.tokens) - 1
            rank, levels = np.full((count, num_levels, num_levels), -1, np.int64), np.zeros(count, np.int64)
            for row, tree in enumerate(walk(self._drafter, reading, prompt.prompt_ids, how, num_levels, number)):
                levels[row] = own = num_levels_of(len(tree.tokens), topk)
                path = path_along(tree, reading.text.tokens[row + 1 :])
                rank[row, :own] = ranks(tree, path, topk, num_levels)[:own]
        start = np.arange(1, count + 1)
        return TreeRollouts([reading.answer], np.zeros(count, np.int64), start, topk, rank, levels)


def num_levels_of(count: int, topk: int) -> int:
    """The inverse of `num_candidates`."""
    levels = 0 if count == 0 else 1 + (count // topk - 1) // topk
    assert num_candidates(topk, levels) == count
    return levels


def path_along(tree: DraftTree, text: Sequence[int]) -> list[int]:
    """The nodes that a text goes through, from the first token on."""
    nodes = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path: list[int] = []
    for token in text:
        node = nodes.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def ranks(tree: DraftTree, path: Sequence[int], topk: int, num_levels: int) -> Ints:
    """[D, D]: row d has the places of the path's nodes among the candidates of the first d + 1 levels, by value, of
    equal values the lowest number first; -1 where the path has no node there."""
    values, found = np.array(tree.values), np.full((num_levels, num_levels), -1, np.int64)
    sizes = np.array([num_candidates(topk, levels) for levels in range(1, num_levels + 1)])
    number = np.arange(len(values))
    for level, node in enumerate(path):
        before = (values > values[node]) | ((values == values[node]) & (number < node))
        up_to = np.concatenate([[0], before.cumsum()])[np.minimum(sizes, len(values))]
        found[level:, level] = up_to[level:]
    return found
