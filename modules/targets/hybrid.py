"""Roll back layers that keep a state of fixed size, not keys of each token: recurrences and convolutions.

Their states are saved before drafted tokens are read. To drop tokens, the states are restored and the model reads the
kept tokens again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# More tokens than a round reads. A session that drops none saves its states anew after so many.
MOST_UNSAVED = 256


@dataclass
class Mixers:
    """The modules of a model that compute the states of its linear layers, and how `self_test` found them to behave.

    hybrid: the model has such layers. modules: empty before the first read. stepwise: they continue from a state by
    single tokens only, and read several one by one.
    """

    hybrid: bool
    modules: list[nn.Module] = field(default_factory=list)
    stepwise: bool = False


class LinearStates:
    """The states of the linear layers in a cache of one row, which can return to those of fewer tokens."""

    def __init__(self, model: nn.Module, cache: Any, mixers: Mixers):
        self._model, self._cache, self._mixers = model, cache, mixers
        self._layers = [layer for layer in cache.layers if is_linear(layer)]
        self._ids: Tensor | None = None  # [length] tokens in the cache
        self.commit()

    def commit(self) -> None:
        """Forget the saved states: the next read saves them anew."""
        self._start, self._saved = 0, list[Tensor]()

    @contextmanager
    def reading(self, ids: Tensor) -> Iterator[None]:
        """Save the states before a forward that reads tokens, int64 [T]; one into an empty cache finds the mixers."""
        mixers, num_filled = self._mixers, 0
        length, count = 0 if self._ids is None else len(self._ids), len(ids)

        def find(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # Modules end from the innermost to the outermost: the first one with the cache has filled the states.
            nonlocal num_filled
            if any(value is self._cache for value in (*args, *kwargs.values())) and self._num_filled() > num_filled:
                num_filled = self._num_filled()
                mixers.modules.append(module)

        with ExitStack() as hooks:
            if length == 0:
                for module in () if mixers.modules else self._model.modules():
                    hooks.callback(module.register_forward_hook(find, with_kwargs=True).remove)
            else:
                if not self._saved or length + count - self._start > MOST_UNSAVED:
                    self._start, self._saved = length, [state.clone() for state in self._states()]
                for module in mixers.modules if mixers.stepwise and count > 1 else ():
                    hooks.enter_context(_by_token(module, count))
            yield
        self._ids = ids if self._ids is None else torch.cat([self._ids, ids])

    def rewind(self, length: int) -> Tensor:
        """Return to the saved states. Returns those of the first `length` tokens that have to be read again: those
        after the saved states; or all, into an empty cache, if `length` lies before these."""
        kept = 0
        if self._saved and length >= self._start:
            for state, saved in zip(self._states(), self._saved, strict=True):
                state.copy_(saved)
            kept = self._start
        assert self._ids is not None
        unread, self._ids = self._ids[kept:length], self._ids[:kept]
        return unread

    def _states(self) -> list[Tensor]:
        kinds = [kind for layer in self._layers for kind in (layer.conv_states, layer.recurrent_states)]
        return [state for kind in kinds for state in kind.values() if state is not None]

    def _num_filled(self) -> int:
        return len(self._states())


@contextmanager
def _by_token(mixer: nn.Module, count: int) -> Iterator[None]:
    """Let a mixer read its next `count` tokens one by one: of its arguments, tensors [B, count, ..] have one each."""
    given = list[Any]()

    def token(value: Any, number: int) -> Any:
        if isinstance(value, tuple):
            return tuple(token(own, number) for own in value)
        if isinstance(value, dict):
            return {name: token(own, number) for name, own in value.items()}
        by_token = isinstance(value, Tensor) and value.ndim > 1 and value.shape[1] == count
        return value[:, number : number + 1] if by_token else value

    def first(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given[:] = args, kwargs
        return token((args, kwargs), 0)

    def others(_: nn.Module, __: object, output: Tensor) -> Tensor:
        rest = [token(tuple(given), number) for number in range(1, count)]
        # Not by calling the module: its hooks are these.
        return torch.cat([output, *(mixer.forward(*args, **kwargs) for args, kwargs in rest)], 1)

    with ExitStack() as hooks:
        hooks.callback(mixer.register_forward_pre_hook(first, with_kwargs=True).remove)
        hooks.callback(mixer.register_forward_hook(others).remove)
        yield


def is_linear(layer: Any) -> bool:
    """Return whether a cache's layer has a state of fixed size."""
    return hasattr(layer, "recurrent_states")
