"""CUDA graphs without CUDA: what is captured, how often, and that a replay reads nothing but its buffers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from draftsmith.modules.drafters import feature_heads, hydra
from draftsmith.modules.engine import graphs, rows
from draftsmith.modules.engine.graphs import Graphed
from draftsmith.modules.targets import llama


class FakeGraph:
    """Replays by calling the function again, into the tensors that the capture gave."""

    def __init__(self, fn: Any, buffers: Any, static: Any):
        self._again = partial(fn, *buffers, *static)
        self.outputs = tuple(tensor.clone() for tensor in self._again())

    def replay(self) -> None:
        for kept, made in zip(self.outputs, self._again(), strict=True):
            kept.copy_(made)


class FakeGraphs:
    """Every session has fixed shapes and is read by graphs, as on CUDA. captured: what they were made for."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.captured: list[Any] = []
        patch.setattr(graphs, "records", lambda tensor: True)
        patch.setattr(Graphed, "_capture", lambda graphed, inputs, static: self._capture(graphed, inputs, static))
        for module in (llama, feature_heads, hydra):
            patch.setattr(module, "cached_rows", self._cached_rows)

    def _capture(self, graphed: Any, inputs: Any, static: Any) -> Any:
        self.captured.append((*(tuple(tensor.shape) for tensor in inputs), *static))
        buffers = tuple(tensor.clone() for tensor in inputs)
        graph = FakeGraph(graphed._fn, buffers, static)
        return graph, buffers, graph.outputs

    @staticmethod
    def _cached_rows(network: Any, count: int, capacity: int, static: bool | None) -> Any:
        return rows.cached_rows(network, count, capacity, static is None or static)
