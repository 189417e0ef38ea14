"""Recording the candidates of dynamic trees at every position of the target's answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.data.models.naming import naming
from draftsmith.eval.bench.prompts import BenchPrompt
from draftsmith.eval.replay.record import Recording, TargetAnswers, walk
from draftsmith.eval.replay.rollouts import Floats, Ints, TreeRollouts
from draftsmith.modules.decoding.protocols import DraftTree
from draftsmith.modules.decoding.tree import num_candidates
from draftsmith.modules.drafters.methods import Models
from draftsmith.modules.drafters.trees import DynamicTrees


class TreeRecorder:
    """Records one answer after another, with trees of one width."""

    def __init__(
        self,
        models: Models,
        method: DynamicTrees,
        how: Recording,
        answers: TargetAnswers | None = None,
        keep_values: int = 0,
    ):
        """method: whose topk and values are recorded, for trees of any size. answers: those of other recordings of the
        same prompts, if there are any. keep_values: `TreeRollouts.values` of the best so many candidates, and
        `frontier`; 0 keeps neither."""
        assert method.topk <= models.target.info.vocab_size and method.by_values
        self._answers, self._how, self._topk = answers or TargetAnswers(models.target, how), how, method.topk
        self._keep_values = keep_values
        self._drafter = method.fixed(models, num_candidates(method.topk, how.depth + 1), how.depth)

    @torch.inference_mode()
    def __call__(self, prompt: BenchPrompt, number: int) -> TreeRollouts:
        """number: of the answer, which seeds it."""
        with naming([prompt.id]):
            return self._record(prompt, number)

    def _record(self, prompt: BenchPrompt, number: int) -> TreeRollouts:
        how = self._how
        num_levels = how.depth + 1
        reading = self._answers.read(prompt, number, num_levels)
        length = len(reading.answer.tokens)
        rows = length - 1
        rank = np.full((rows, num_levels, num_levels), -1, np.int64)
        place = np.full((rows, num_levels), -1, np.int64)
        levels = np.zeros(rows, np.int64)
        confidence, on_text = np.full((rows, num_levels), np.nan), np.full((rows, num_levels), np.nan)
        values = np.full((rows, num_levels, self._keep_values), -np.inf)
        frontier = np.full((rows, num_levels, self._topk), -np.inf)
        for start, tree in walk(self._drafter, reading, prompt.prompt_ids, how, num_levels, number):
            row = start - 1
            found = _on_text(tree, reading.text.tokens[start:])
            levels[row] = num_levels_of(len(tree.tokens), self._topk)
            rank[row, : levels[row]] = ranks(tree, found.path, self._topk, num_levels)[: levels[row]]
            if self._keep_values:
                kept = best_values(tree, self._topk, levels[row], self._keep_values)
                values[row, : levels[row]], frontier[row, : levels[row]] = kept
            within = min(len(found.places), length - start)
            place[row, :within] = found.places[:within]
            confidence[row, :within] = found.confidence[:within]
            on_text[row, :within] = place[row, :within] == 0
        return TreeRollouts(
            answers=[reading.answer],
            answer=np.zeros(rows, np.int64),
            start=np.arange(1, length),
            topk=self._topk,
            rank=rank,
            confidence=confidence,
            on_text=on_text,
            levels=levels,
            place=place,
            values=values if self._keep_values else None,
            frontier=frontier if self._keep_values else None,
        )


def num_levels_of(count: int, topk: int) -> int:
    """The inverse of `num_candidates`."""
    levels = 0 if count == 0 else 1 + (count // topk - 1) // topk
    assert num_candidates(topk, levels) == count
    return levels


@dataclass(frozen=True)
class _OnText:
    """A text's way through a tree. path: its nodes. places, confidence: at the root and at every node of the path that
    has children, which of them it goes on with (-1: none), and the probability of the best."""

    path: list[int]
    places: list[int]
    confidence: list[float]


def _on_text(tree: DraftTree, text: Sequence[int]) -> _OnText:
    assert tree.values is not None
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)  # best first: siblings are numbered by rank
    path, places, confidence = [], [], []
    node, value = -1, 0.0
    for token in text:
        siblings = children.get(node)
        if siblings is None:
            break
        tokens = [tree.tokens[sibling] for sibling in siblings]
        confidence.append(float(np.exp(tree.values[siblings[0]] - value)))
        places.append(tokens.index(token) if token in tokens else -1)
        if places[-1] < 0:
            break
        node = siblings[places[-1]]
        value = tree.values[node]
        path.append(node)
    return _OnText(path, places, confidence)


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


def best_values(tree: DraftTree, topk: int, num_levels: int, count: int) -> tuple[Floats, Floats]:
    """[num_levels, count], [num_levels, topk]: `TreeRollouts.values` and `TreeRollouts.frontier` of one round."""
    values = np.array(tree.values)
    found, frontier = np.full((num_levels, count), -np.inf), np.full((num_levels, topk), -np.inf)
    for level in range(num_levels):
        up_to = num_candidates(topk, level + 1)
        best = descending(values[:up_to])[:count]
        found[level, : len(best)] = best
        frontier[level] = descending(values[num_candidates(topk, level) : up_to])[:topk]
    return found, frontier


def descending(values: Floats) -> Floats:
    return -np.sort(-values)
