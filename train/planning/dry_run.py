"""Code run on tensors that have a shape and no numbers: what it would hold in memory, and how much it would compute.

torch's own tools do this for a plain module: FakeTensorMode, FlopCounterMode, and MemTracker of torch.distributed. None
of them runs a training step of ours. In FakeTensorMode a loss mask selects an unknown number of rows; MemTracker
refuses a module that is called twice without a common root, as an unrolled draft does, and the module hooks of
FlopCounterMode fail in a backward pass that runs inside a forward. So this is a mode of our own over FakeTensorMode,
with the counter's formulas.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from draftsmith.modules.types import InputError
from draftsmith.train.planning.heap import Heap

aten = torch.ops.aten
# Elements of the largest real tensor: token ids of the largest batch, but not who sees whom in a long text.
MOST_REAL = 2**22
WORKING = "working"
SELECTS = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class NotRehearsed(InputError):
    """Code that goes by numbers, and so cannot run without them."""


@dataclass(frozen=True)
class HeldBytes:
    """Bytes at one moment by what they are of. freed: those that a CPU's process has freed and keeps."""

    parts: dict[str, int] = field(default_factory=dict)
    freed: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.freed


@dataclass
class _Block:
    """A tensor's storage while it is alive."""

    part: str
    size: int
    place: int | None = None


class DryRun(TorchDispatchMode):
    """A mode: while it is on, floating-point tensors are fake. Integers and booleans are real, as code goes by their
    values (token ids, masks, places), and so are single numbers. Weights that were made outside may be used.

    part: what tensors that are made now are counted as. now: bytes of each part. made: of all that was ever made.
    peaks: of each phase, its moment of most. flops: of matrix products. attention_flops: of causal attention only the
    half that is needed.
    """

    def __init__(self, on_cpu: bool):
        """on_cpu: memory is a CPU's, whose process keeps some of what it has freed."""
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._blocks = WeakIdKeyDictionary()
        self._heap = Heap() if on_cpu else None
        self._phase = ""
        self.part = WORKING
        self.now: dict[str, int] = {}
        self.peaks: dict[str, HeldBytes] = {}
        self.made, self.flops, self.attention_flops = 0, 0.0, 0.0

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """Tensors made within count as this part."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def count_as(self, part: str, tensor: Tensor) -> None:
        """What was made as something else is of this part from now on."""
        block = self._blocks[tensor.untyped_storage()]
        self.now[block.part] -= block.size
        block.part = part
        self.now[part] = self.now.get(part, 0) + block.size

    def begin(self, phase: str) -> None:
        """What is most from here on is this phase's; of one that has been before, anew."""
        self._phase = phase
        self.peaks[phase] = self._moment()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked for as often as anything else
            return args[0].fake_device
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # composed operators arrive whole
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func in SELECTS:
            args = (args[0], _places(args[1]), *args[2:])
        out = self._run(func, args, kwargs)
        packet = func.overloadpacket
        if packet in ATTENTION:
            self.attention_flops += ATTENTION[packet](*args, **kwargs)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=out)
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage not in self._blocks:
                self._made(storage)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Really, where inputs and results are what is real here; else on fake tensors."""
        inputs = _tensors(*args, *kwargs.values())
        real = not any(isinstance(tensor, FakeTensor) or _is_fake_here(tensor) for tensor in inputs)
        if real and inputs and math.prod(tensor.numel() for tensor in inputs) <= MOST_REAL:
            out = func(*args, **kwargs)
            if not any(map(_is_fake_here, _tensors(out))):
                return out
        try:
            with self._fake:
                tried = (args, kwargs)
                if real:  # of itself it would compute with them
                    tried = tree_map_only(Tensor, self._fake.from_tensor, tried)
                out = func(*tried[0], **tried[1])
        except DynamicOutputShapeException:
            if not real:
                raise
            return func(*args, **kwargs)  # a mask's places: no more than it has elements
        # What is made of nothing, or of much, was tried out, as it might have been too large.
        return out if not real or any(map(_is_fake_here, _tensors(out))) else func(*args, **kwargs)

    def _made(self, storage: torch.UntypedStorage) -> None:
        self._blocks[storage] = block = _Block(self.part, storage.nbytes())
        if self._heap is not None:
            block.place = self._heap.take(block.size)
        self.made += block.size
        self.now[block.part] = self.now.get(block.part, 0) + block.size
        weakref.finalize(storage, self._freed, block).atexit = False
        held = sum(self.now.values()) + (self._heap.end - self._heap.used if self._heap is not None else 0)
        if held > self.peaks.setdefault(self._phase, HeldBytes()).total:
            self.peaks[self._phase] = self._moment()

    def _freed(self, block: _Block) -> None:
        self.now[block.part] -= block.size
        if self._heap is not None:
            self._heap.give(block.place, block.size)

    def _moment(self) -> HeldBytes:
        return HeldBytes(dict(self.now), self._heap.end - self._heap.used if self._heap is not None else 0)


def _tensors(*values: Any) -> list[Tensor]:
    """Those among arguments or results of an operator, which are tensors, lists of them, or something else."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _is_fake_here(tensor: Tensor) -> bool:
    """Numbers, and whatever is too large to be made for a plan."""
    return (tensor.is_floating_point() and tensor.ndim > 0) or tensor.numel() > MOST_REAL


def _places(indices: Any) -> list[Tensor | None]:
    """Indices without masks: how many rows a mask selects is in its values. One that is fake selects all."""
    places: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            places.append(index)
        else:
            mask = torch.ones(index.shape, dtype=torch.bool) if isinstance(index, FakeTensor) else index
            places += mask.nonzero().unbind(1)
    return places


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, **_: Any
) -> float:
    """Scores and weighted values, [B, heads, T, D] each: a multiply-add counts 2."""
    batch, heads, rows, size = query.shape
    keys = key.shape[2]
    pairs = rows * (rows + 1) / 2 if causal and rows == keys else rows * keys
    return 2.0 * batch * heads * pairs * (size + value.shape[3])


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **_: Any) -> float:
    """Gradients of both products, for both of their sides; what a kernel computes anew is not counted."""
    return 2 * _attention(query, key, value, 0.0, rest[3])


# torch's counter does not know the attention of a CPU, which is what runs here whatever device is planned for.
ATTENTION: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
