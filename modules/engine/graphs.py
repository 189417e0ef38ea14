"""CUDA graphs: a forward of fixed shapes is captured once and replayed, without launching its kernels one by one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]


def records(tensor: Tensor) -> bool:
    """Return whether the tensor's device has graphs."""
    return tensor.is_cuda


class Graphed:
    """Callable that runs `fn(*inputs, *static)`, on CUDA by replaying a graph for these shapes and static values.

    `fn` launches the same kernels on the same memory whenever shapes and static values are the same, reads nothing back
    to the host and returns a tuple of tensors. On CUDA the returned tensors are the graph's own, and all graphs share
    one memory pool: outputs are valid until the next call, to which they may be inputs.
    """

    # Libraries choose kernels and allocate in their first calls, which cannot be captured.
    WARM_UPS = 3

    def __init__(self, fn: Callable[..., Outputs]):
        self._fn = fn
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Outputs, Outputs]] = {}
        self._pool: Any = None

    def __call__(self, *inputs: Tensor, static: tuple[Hashable, ...] = ()) -> Outputs:
        if not records(inputs[0]):
            return self._fn(*inputs, *static)
        key = (*(tensor.shape for tensor in inputs), *static)
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs, static)
        graph, buffers, outputs = self._graphs[key]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.copy_(tensor)
        graph.replay()
        return outputs

    def _capture(self, inputs: Outputs, static: tuple[Hashable, ...]) -> tuple[torch.cuda.CUDAGraph, Outputs, Outputs]:
        """Warm up on a side stream, then capture over copies of the inputs (torch's notes on CUDA graphs)."""
        buffers = tuple(tensor.clone() for tensor in inputs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self.WARM_UPS):
                self._fn(*buffers, *static)
        torch.cuda.current_stream().wait_stream(side)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        # An older graph that is collected meanwhile would spoil the capture.
        gc.disable()
        try:
            # Of this thread only: another one may be pinning a batch meanwhile, which a capture of all threads forbids.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._fn(*buffers, *static)
        finally:
            if collects:
                gc.enable()
        return graph, buffers, outputs
