"""Code run on tensors that have a shape and no numbers: what it would hold in memory.

torch's own tools do this for a plain module: FakeTensorMode, and MemTracker of torch.distributed. Neither runs a
training step of ours. In FakeTensorMode a loss mask selects an unknown number of rows; MemTracker refuses a module that
is called twice without a common root, as an unrolled draft does. So this is a mode of our own over FakeTensorMode.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from draftsmith.modules.types import InputError
from draftsmith.train.data_module import Part
from draftsmith.train.lit_head import LitHead

aten = torch.ops.aten
# Elements of the largest real tensor: token ids of the largest batch, but not who sees whom in a long text.
MOST_REAL = 2**22
# What bytes are of.
FROZEN, WEIGHTS, GRADIENTS, OPTIMIZER, BATCH, WORKING = (
    "frozen", "weights", "gradients", "optimizer", "batch", "working",
)  # fmt: skip
SELECTS = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class NotRehearsed(InputError):
    """Code that goes by numbers, and so cannot run without them."""


@dataclass
class _Block:
    """A tensor's storage while it is alive."""

    part: str
    size: int


class DryRun(TorchDispatchMode):
    """A mode: while it is on, floating-point tensors are fake. Integers and booleans are real, as code goes by their
    values (token ids, masks, places), and so are single numbers. Weights that were made outside may be used.

    part: what tensors that are made now are counted as. now: bytes of each part. made: of all that was ever made.
    peaks: of each phase, bytes by part at its moment of most.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._blocks = WeakIdKeyDictionary()
        self._phase = ""
        self.part = WORKING
        self.now: dict[str, int] = {}
        self.peaks: dict[str, dict[str, int]] = {}
        self.made = 0

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
        self._phase, self.peaks[phase] = phase, dict(self.now)

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
        self.made += block.size
        self.now[block.part] = self.now.get(block.part, 0) + block.size
        weakref.finalize(storage, self._freed, block).atexit = False
        if sum(self.now.values()) > sum(self.peaks.get(self._phase, {}).values()):
            self.peaks[self._phase] = dict(self.now)

    def _freed(self, block: _Block) -> None:
        self.now[block.part] -= block.size


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


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that a training takes in one process.

    libraries: and the interpreter, where the device is the CPU. frozen: frozen models as they stay; loading: most while
    they are read, themselves included. weights: of what is trained. optimizer: its averages. batch: of the samples of
    one part. peaks: of forward, backward and update, each the moment of most, by part.
    """

    libraries: int
    frozen: int
    loading: int
    weights: int
    optimizer: int
    batch: int
    peaks: dict[str, dict[str, int]]


def dry_step(run: DryRun, module: LitHead, part: Part, lengths: Sequence[int], accumulates: bool, on_gpu: bool) -> int:
    """Take two steps, so that the peaks are the second one's: in the first one there are no averages yet. Returns the
    bytes of these. part: with `lengths` tokens."""
    trained = [parameter for parameter in module.head.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(lambda p: run.count_as(GRADIENTS, p.grad))
    optimizer = module.configure_optimizers()["optimizer"]
    for group in optimizer.param_groups:
        if on_gpu and "foreach" in group:
            group["foreach"] = True  # as torch chooses on a GPU: all temporaries at once
    trainer: Any = SimpleNamespace(global_step=module.total_steps)  # when all passes run
    trainer.datamodule = SimpleNamespace(train=SimpleNamespace(lengths=list(lengths)))
    module.trainer = trainer
    for number in range(2):
        for first in (True, False) if accumulates else (True,):
            run.begin("forward")
            with module.autocast():
                loss = module.part_loss(part).loss
            if first:
                optimizer.zero_grad()  # Lightning does it here: the last step's gradients are there until then
            run.begin("backward")
            loss.backward()
            del loss
        run.begin("update")
        norm = torch.nn.utils.get_total_norm([p.grad for p in trained if p.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(trained, 1.0, norm)
        with run.making(OPTIMIZER if number == 0 else run.part):
            optimizer.step()
    return averages(optimizer)


def averages(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state, counters aside."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor) and value.ndim)
