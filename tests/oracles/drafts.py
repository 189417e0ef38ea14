"""What the tests of drafters share: batches of texts, a target's two tables, uniforms, and a stop that keeps drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from draftsmith.modules.decoding.stop import DraftView, FixedLengthStop
from draftsmith.modules.sampling import pick
from draftsmith.modules.targets.base import ModelInfo
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import FeatureBatch


def batch_of(ids: Tensor, features: Tensor, mask: Tensor, lengths: Sequence[int], packed: bool) -> FeatureBatch:
    """Lay texts [N, T] with an answer where `mask` holds side by side, padded, or end to end, as data sets do."""
    places = torch.arange(ids.shape[1]).expand(ids.shape)
    real = places < torch.tensor(lengths)[:, None]
    fields = (ids, features, mask & real, places, real)
    if packed:
        return FeatureBatch(*(field[real][None] for field in fields), lengths=tuple(lengths))
    return FeatureBatch(*fields)


class Linear:
    """A target whose embedding and lm_head [V, H] are all that is asked for."""

    device, packed, readout = torch.device("cpu"), False, Readout()

    def __init__(self, vocab: int, size: int, dtype: torch.dtype = torch.float64):
        self.embedding, self.output = torch.randn(2, vocab, size, generator=torch.Generator().manual_seed(5)).to(dtype)
        self.dtype, self.info = dtype, ModelInfo(size, vocab, 4, 32, (), {})

    def embed(self, ids: Tensor | Sequence[int]) -> Tensor:
        return self.embedding[torch.as_tensor(ids)]

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.output.T

    def lm_head_of(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda hidden: hidden @ self.output[tokens].T

    def lm_head_weight(self) -> Tensor:
        return self.output


class Given:
    """A `Source` of given uniforms."""

    def __init__(self, uniforms: Sequence[float]):
        self.uniforms = list(uniforms)

    def draw(self, probs: Tensor) -> int:
        return pick(probs, self.uniforms.pop(0))


class Spy(FixedLengthStop):
    """Keeps of every round what predicted its tokens, and the results of rounds."""

    def __init__(self, k: int):
        super().__init__(k)
        self.rounds, self.results = list[list[tuple[int, Tensor, Tensor]]](), list[tuple[int, int]]()

    def start_round(self) -> None:
        self.rounds.append([])

    def should_stop(self, view: DraftView) -> bool:
        self.rounds[-1].append((view.token, view.hidden.clone(), view.logits.clone()))
        return super().should_stop(view)

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self.results.append((num_drafted, num_accepted))
