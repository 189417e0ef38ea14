"""CUDA graphs without CUDA: what is captured, how often, and that a replay reads nothing but its buffers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from worlds import GREEDY, in_rows, small_models

from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.drafters import feature_heads
from draftsmith.modules.drafters.method_names import parse_method
from draftsmith.modules.engine import graphs, rows
from draftsmith.modules.engine.graphs import Graphed
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets import llama


class FakeGraph:
    """Replays by calling the function again, into the tensors that the capture gave."""

    def __init__(self, fn: Any, buffers: Any, static: Any):
        self._again = partial(fn, *buffers, *static)
        self.outputs = tuple(tensor.clone() for tensor in self._again())

    def replay(self) -> None:
        for kept, made in zip(self.outputs, self._again(), strict=True):
            kept.copy_(made)


@pytest.fixture
def captured(monkeypatch) -> list[Any]:
    """Every session has fixed shapes and is read by graphs, as on CUDA. Returns what they were captured for."""
    shapes: list[Any] = []

    def capture(graphed: Any, inputs: Any, static: Any) -> Any:
        shapes.append((*(tuple(tensor.shape) for tensor in inputs), *static))
        buffers = tuple(tensor.clone() for tensor in inputs)
        graph = FakeGraph(graphed._fn, buffers, static)
        return graph, buffers, graph.outputs

    def cached_rows(network: Any, count: int, capacity: int, static: bool | None) -> Any:
        return rows.cached_rows(network, count, capacity, static is None or static)

    monkeypatch.setattr(graphs, "records", lambda tensor: True)
    monkeypatch.setattr(Graphed, "_capture", capture)
    for module in (llama, feature_heads):
        monkeypatch.setattr(module, "cached_rows", cached_rows)
    return shapes


PROMPTS = [[1, 5, 3, 1, 5], [7, 8], [2, 11, 4]]


def answers(label: str, rows: int) -> list[list[int]]:
    """Decode by one session and one drafter, side by side if there are several rows."""
    models = small_models()
    drafter = parse_method(label).build(models)
    session = models.target.session(rows, 64, () if drafter is None else drafter.aux_layers)
    if rows > 1:
        return [one.tokens for one in in_rows(models.target, PROMPTS, 24, session=session)]
    options = DecodeOptions(session=session)
    how = GREEDY, 24, TorchSource(0), (), options
    return [generate_one(models.target, drafter, prompt, *how).tokens for prompt in PROMPTS]


@pytest.mark.parametrize(("label", "rows"), [("ar", 3), *((label, 1) for label in ("ar", "spec:k=3", "hydra:k=3",
                                             "eagle-tree:nodes=6:depth=2:topk=3"))])  # fmt: skip
def test_replays_decode_as_without_graphs_and_few_shapes_are_captured(label, rows, request):
    expected = answers(label, rows)
    captured = request.getfixturevalue("captured")
    assert answers(label, rows) == expected
    # Not one a round, nor a prompt: drafts and verifications of two networks have few widths.
    assert 0 < len(captured) <= 12


def test_a_graph_is_of_its_shapes_and_of_what_is_static(captured):
    graphed, x = Graphed(lambda x, factor: (factor * x,)), torch.ones(2)
    for _ in range(2):
        assert [graphed(x, static=(factor,))[0].tolist() for factor in (2, 3)] == [[2.0, 2.0], [3.0, 3.0]]
        x = x.clone()
    assert captured == [((2,), 2), ((2,), 3)]


def test_other_threads_may_pin_memory_while_a_graph_is_captured(monkeypatch):
    """A capture that all threads watch over ends in an error where one of them allocates pinned memory."""
    options, fake = {}, MagicMock()
    monkeypatch.setattr(graphs, "records", lambda tensor: True)
    for name in ("Stream", "current_stream", "stream", "graph_pool_handle", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, fake)

    def graph(_: Any, **given: Any) -> Any:
        options.update(given)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    assert Graphed(lambda x: (x + 1,))(torch.ones(1))[0].tolist() == [2.0]
    assert options["capture_error_mode"] == "thread_local"
