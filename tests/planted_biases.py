"""Samplers made wrong on purpose, in the decoder's real loop: what `eval certify` must find.

Each entry of PLANTED is planted with pytest's monkeypatch; its name says what it does, its loop where it acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from draftsmith.modules.decoding import chain, loop, verify
from draftsmith.modules.decoding.tree import DraftTree
from draftsmith.modules.drafters import net
from draftsmith.modules.sampling import Sampler, TorchSource, pick, probabilities
from draftsmith.modules.types import SamplingParams


def at(params: SamplingParams, factor: float) -> SamplingParams:
    return SamplingParams(params.temperature * factor, params.top_k, params.top_p)


def no_residual(patch) -> None:
    patch.setattr(verify, "residual", lambda p, q: p)


def flattened(distribution, factor: float):
    """The distribution that a draft drawn at `factor` of the temperature should have stated at the temperature
    itself."""
    if distribution is None:  # greedy
        return None
    powered = distribution.double().pow(factor)
    return (powered / powered.sum(-1, keepdim=True)).to(distribution.dtype)


def wrong_q(patch) -> None:
    """Drafts are drawn at 0.8 of the temperature that their q is stated at."""
    real = chain.draft_chains

    def drafted(logits, states, step, stops, limits, sampler, *others):
        cooler = Sampler(at(sampler.params, 0.8), sampler.sources)
        made = real(logits, states, step, stops, limits, cooler, *others)
        drawn = [tree.draft_prob if tree.draft_prob is None else torch.stack(list(tree.draft_prob)) for tree in made]
        stated = [flattened(q, 0.8) for q in drawn]
        return [DraftTree(tree.tokens, tree.parents, q) for tree, q in zip(made, stated, strict=True)]

    patch.setattr(net, "draft_chains", drafted)


def unlikely_drafts_dropped(patch) -> None:
    """A draft is cut before a token of little q, which the decision has seen: as if by the confidence behind it. The
    models of the test are flat: two times a token's mean probability is little."""
    real = chain.draft_chains

    def cut(tree):
        if tree.draft_prob is None or not tree.tokens:
            return tree
        likely = torch.stack(list(tree.draft_prob)).gather(1, torch.tensor(tree.tokens)[:, None])[:, 0] >= 0.03
        count = int(likely.cumprod(0).sum())
        return DraftTree(tree.tokens[:count], tree.parents[:count], tree.draft_prob[:count])

    patch.setattr(net, "draft_chains", lambda *args: [cut(tree) for tree in real(*args)])


def accepts_too_often(patch) -> None:
    patch.setattr(TorchSource, "accept", lambda self, prob: self.uniform() < 1.25 * prob)


def reused_accept_draws(patch) -> None:
    """The acceptance of a token is decided by the uniform number that drew it."""

    def draw(self, probs):
        value = self.uniform()
        self.drawn = [*getattr(self, "drawn", []), value]
        if getattr(self, "verifying", False):  # the target's own token: the round is over
            self.drawn, self.verifying = [], False
        return pick(probs, value)

    def accept(self, prob):
        self.verifying = True
        return self.drawn.pop(0) < prob

    patch.setattr(TorchSource, "draw", draw)
    patch.setattr(TorchSource, "accept", accept)


def own_draw_reused(patch) -> None:
    """The target's own token is drawn by the number that decided on the first drafted one."""

    def draw(self, probs):
        first, self.first = getattr(self, "first", None), None
        return pick(probs, self.uniform() if first is None else first)

    def accept(self, prob):
        value = self.uniform()
        if getattr(self, "first", None) is None:
            self.first = value
        return value < prob

    patch.setattr(TorchSource, "draw", draw)
    patch.setattr(TorchSource, "accept", accept)


def wrong_temperature(patch) -> None:
    patch.setattr(verify, "probabilities", lambda logits, params: probabilities(logits, at(params, 0.9)))


def child_twice(patch) -> None:
    """A token that is none of a tree node's children is drawn once more."""
    real = verify._walk

    def walked(tree, numbers, row):
        children = set(zip(tree.parents, tree.tokens, strict=True))

        def twice(row, node):
            token = numbers.choice(row, node)
            return token if (node - 1, token) in children else numbers.choice(row, node)

        return real(tree, SimpleNamespace(choice=twice, what=numbers.what), row)

    patch.setattr(verify, "_walk", walked)


def same_seed(patch) -> None:
    real = TorchSource.__init__
    patch.setattr(TorchSource, "__init__", lambda self, seed: real(self, 0))


def past_the_end(patch) -> None:
    """A drafted end token does not end the answer where it is not the last of its round."""
    real = loop.RowAnswer.emit

    def emit(self, tokens):
        tokens = tokens[: self.room - len(self.tokens)]
        if any(token in self.ends for token in tokens[:-1]):
            self.tokens += tokens
            return tokens
        return real(self, tokens)

    patch.setattr(loop.RowAnswer, "emit", emit)


@dataclass(frozen=True)
class Planted:
    """plant: puts it into the code. method, loop: where it acts."""

    plant: object
    method: str = "spec:k=5"
    loop: str = "single"


PLANTED = {
    "replaced from p": Planted(no_residual),
    "q at 0.8 of its temperature, batched": Planted(wrong_q, loop="batched"),
    "drops drafts by the drawn token": Planted(unlikely_drafts_dropped),
    "accepts with 1.25 p/q": Planted(accepts_too_often),
    "accept draw is the draft's, batched": Planted(reused_accept_draws, loop="batched"),
    "own token from the accept draw, batched": Planted(own_draw_reused, loop="batched"),
    "rows share their numbers, batched": Planted(same_seed, loop="batched"),
    "target at 0.9 of its temperature": Planted(wrong_temperature),
}
