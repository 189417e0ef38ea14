"""Roll back layers that keep a state of fixed size, not keys of each token: recurrences and convolutions.

Their states are saved before drafted tokens are read, and the inputs of their mixers are recorded meanwhile. To drop
tokens, the states are restored and the mixers alone read the kept tokens' inputs again (replay).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# More tokens than a round reads. A session that drops none saves its states anew after so many.
MOST_RECORDED = 256


@dataclass
class Mixers:
    """The modules of a model that compute the states of its linear layers, and how `self_test` found them to behave.

    hybrid: the model has such layers. modules: empty before the first read. stepwise: they continue from a state by
    single tokens only, and read several one by one. replay: they give the same states when they read recorded inputs
    again.
    """

    hybrid: bool
    modules: list[nn.Module] = field(default_factory=list)
    stepwise: bool = False
    replay: bool = True


@dataclass(frozen=True)
class Call:
    """The arguments of a mixer that read `count` tokens."""

    mixer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    count: int

    def part(self, start: int, stop: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for the tokens from `start` to `stop`: tensors [B, count, ..] have these only."""

        def cut(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            by_token = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == self.count
            return value[:, start:stop] if by_token else value

        return cut(self.args), {name: cut(value) for name, value in self.kwargs.items()}

    def run(self, start: int, stop: int, step: int) -> list[Tensor]:
        """Read the tokens from `start` to `stop`, `step` at a time, and return the mixer's outputs."""
        outputs = []
        for first in range(start, stop, step):
            args, kwargs = self.part(first, min(first + step, stop))
            # Not by calling the module: its hooks record.
            outputs.append(self.mixer.forward(*args, **kwargs))
        return outputs


class LinearStates:
    """The states of the linear layers in a cache of one row, which can return to those of fewer tokens."""

    def __init__(self, model: nn.Module, cache: Any, mixers: Mixers):
        self._model, self._cache, self._mixers = model, cache, mixers
        self._layers = [layer for layer in cache.layers if is_linear(layer)]
        self._ids: Tensor | None = None  # [length] tokens in the cache
        self.commit()

    def commit(self) -> None:
        """Forget the saved states: the next read saves them anew."""
        self._start, self._saved, self._reads = 0, list[Tensor](), list[tuple[int, list[Call]]]()

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[None]:
        """Record a forward that reads tokens, int64 [T]; one into an empty cache finds the mixers."""
        mixers, calls = self._mixers, list[Call]()
        length, count = 0 if self._ids is None else len(self._ids), len(ids)
        stepwise, num_filled = mixers.stepwise and count > 1, 0

        def find(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # Modules end from the innermost to the outermost: the first one with the cache has filled the states.
            nonlocal num_filled
            if any(value is self._cache for value in (*args, *kwargs.values())) and self._num_filled() > num_filled:
                num_filled = self._num_filled()
                mixers.modules.append(module)

        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls.append(Call(module, args, kwargs, count))
            return calls[-1].part(0, 1) if stepwise else None

        def finish(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return torch.cat([output, *calls[-1].run(1, count, 1)], 1)

        with ExitStack() as hooks:
            if length == 0:
                for module in () if mixers.modules else self._model.modules():
                    hooks.callback(module.register_forward_hook(find, with_kwargs=True).remove)
            else:
                if not self._saved or length + count - self._start > MOST_RECORDED:
                    self._start, self._reads, self._saved = length, [], [state.clone() for state in self._states()]
                for module in mixers.modules:
                    hooks.callback(module.register_forward_pre_hook(record, with_kwargs=True).remove)
                    if stepwise:
                        hooks.callback(module.register_forward_hook(finish).remove)
                self._reads.append((count, calls))
            yield
        self._ids = ids if self._ids is None else torch.cat([self._ids, ids])

    def rewind(self, length: int) -> Tensor:
        """Return to the states of the first `length` tokens. Returns those of them that have to be read again.

        These are none; or those after the saved states, if the mixers cannot be replayed; or all, into an empty cache,
        if `length` lies before the saved states.
        """
        kept = 0
        if self._saved and length >= self._start:
            for state, saved in zip(self._states(), self._saved, strict=True):
                state.copy_(saved)
            kept = self._replay(length) if self._mixers.replay else self._start
        assert self._ids is not None
        unread, self._ids = self._ids[kept:length], self._ids[:kept]
        return unread

    def _replay(self, length: int) -> int:
        """Let the mixers read the recorded inputs up to `length` tokens, and return that."""
        left = length - self._start
        for count, calls in self._reads:
            for call in calls if left > 0 else ():
                call.run(0, min(left, count), 1 if self._mixers.stepwise else count)
            left -= count
        return length

    def _states(self) -> list[Tensor]:
        kinds = [kind for layer in self._layers for kind in (layer.conv_states, layer.recurrent_states)]
        return [state for kind in kinds for state in kind.values() if state is not None]

    def _num_filled(self) -> int:
        return len(self._states())


def is_linear(layer: Any) -> bool:
    """Return whether a cache's layer has a state of fixed size."""
    return hasattr(layer, "recurrent_states")
