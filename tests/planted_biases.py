"""Samplers made wrong on purpose, in the decoder's real loops: what `eval lossless` must find.

Each entry of PLANTED is planted with pytest's monkeypatch; its name says what it does, its loop where it acts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftsmith.modules.decoding import batch, chain, chains, loop, verify
from draftsmith.modules.decoding.protocols import DraftTree
from draftsmith.modules.drafters import draft_model
from draftsmith.modules.sampling import TorchSource, probabilities
from draftsmith.modules.types import SamplingParams


def at(params: SamplingParams, factor: float) -> SamplingParams:
    return SamplingParams(params.temperature * factor, params.top_k, params.top_p)


def no_residual(patch) -> None:
    patch.setattr(verify, "residual", lambda p, q: p)


def batched_no_residual(patch) -> None:
    patch.setattr(chains, "residual", lambda p, q: p)


def flattened(law, factor: float):
    """The law that a draft drawn at `factor` of the temperature should have stated at the temperature itself."""
    if law is None:  # greedy
        return None
    powered = law.double().pow(factor)
    return (powered / powered.sum(-1, keepdim=True)).to(law.dtype)


def wrong_q(patch) -> None:
    """Drafts are drawn at 0.8 of the temperature that their q is stated at."""
    real = chain.draft_chain

    def drafted(logits, states, step, stop, max_drafted, params, source, context=()):
        tree = real(logits, states, step, stop, max_drafted, at(params, 0.8), source, context)
        return DraftTree(tree.tokens, tree.parents, flattened(tree.draft_prob, 0.8))

    patch.setattr(draft_model, "draft_chain", drafted)


def batched_wrong_q(patch) -> None:
    from draftsmith.modules.drafters import draft_model_batch

    real = chains.draft_chains

    def drafted(logits, hidden, step, stops, limits, params, uniforms, contexts):
        made = real(logits, hidden, step, stops, limits, at(params, 0.8), uniforms, contexts)
        return chains.Chains(made.tokens, made.num_drafted, flattened(made.draft_prob, 0.8))

    patch.setattr(draft_model_batch, "draft_chains", drafted)


def dropping(patch, low) -> None:
    """A policy takes its last token back because of the token's own value."""
    real = chain.draft_chain

    def drafted(*args, **kwargs):
        tree = real(*args, **kwargs)
        if tree.tokens and tree.draft_prob is not None and low(tree.tokens[-1], tree.draft_prob[-1]):
            return DraftTree(tree.tokens[:-1], tree.parents[:-1], tree.draft_prob[:-1])
        return tree

    patch.setattr(draft_model, "draft_chain", drafted)


def drops_unlikely(patch) -> None:
    dropping(patch, lambda token, law: law[token] < 0.15)


def accepts_too_often(patch) -> None:
    patch.setattr(TorchSource, "accept", lambda self, prob: self.uniform() < 1.25 * prob)


def batched_reused_accept_draws(patch) -> None:
    """The acceptance of a token is decided by the uniform number that drew it."""
    real = batch._Batch._uniforms

    def uniforms(self):
        found, longest = real(self).clone(), self._longest_chain
        found[:, longest : 2 * longest] = found[:, :longest]
        return found

    patch.setattr(batch._Batch, "_uniforms", uniforms)


def batched_own_draw_reused(patch) -> None:
    """The target's own token is drawn by the number that decided on the first drafted one."""
    real = chains.verify_chains

    def verified(tokens, num_drafted, draft_prob, logits, params, uniforms):
        if tokens.shape[1] and not params.greedy:
            uniforms = torch.cat([uniforms[:, :-1], uniforms[:, :1]], 1)
        return real(tokens, num_drafted, draft_prob, logits, params, uniforms)

    patch.setattr(batch, "verify_chains", verified)


def batched_rows_share_numbers(patch) -> None:
    real = batch._Batch._uniforms

    def uniforms(self):
        found = real(self)
        return found[:1].expand_as(found)

    patch.setattr(batch._Batch, "_uniforms", uniforms)


def wrong_temperature(patch) -> None:
    patch.setattr(verify, "probabilities", lambda logits, params: probabilities(logits, at(params, 0.9)))


def child_twice(patch) -> None:
    """A token that is none of a tree node's children is drawn once more."""
    real = verify._walk_drawn

    class Twice:
        def __init__(self, source, tree):
            self._source, self._tree, self._node = source, tree, -1

        def draw(self, law):
            children = {
                token: node
                for node, (above, token) in enumerate(zip(self._tree.parents, self._tree.tokens, strict=True))
                if above == self._node
            }
            token = self._source.draw(law)
            if token not in children:
                token = self._source.draw(law)
            self._node = children.get(token, -2)
            return token

    def walked(tree, logits, params, source):
        return real(tree, logits, params, Twice(source, tree))

    patch.setattr(verify, "_walk_drawn", walked)


def same_seed(patch) -> None:
    real = TorchSource.__init__
    patch.setattr(TorchSource, "__init__", lambda self, seed: real(self, 0))


def past_the_end(patch) -> None:
    """A drafted end token does not end the answer where it is not the last of its round."""
    real = loop.Answer.emit

    def emit(self, tokens):
        tokens = tokens[: self.room - len(self.tokens)]
        if any(token in self.ends for token in tokens[:-1]):
            self.tokens += tokens
            return tokens
        return real(self, tokens)

    patch.setattr(loop.Answer, "emit", emit)


@dataclass(frozen=True)
class Planted:
    """plant: puts it into the code. method, loop: where it acts."""

    plant: object
    method: str = "spec:k=5"
    loop: str = "single"


PLANTED = {
    "replaced from p": Planted(no_residual),
    "replaced from p, batched": Planted(batched_no_residual, loop="batched"),
    "q at 0.8 of its temperature": Planted(wrong_q),
    "q at 0.8 of its temperature, batched": Planted(batched_wrong_q, loop="batched"),
    "q at 0.8 of its temperature, k=1": Planted(wrong_q, "spec:k=1"),
    "drops a token of q < 0.15": Planted(drops_unlikely),
    "drops a token of q < 0.15, k=1": Planted(drops_unlikely, "spec:k=1"),
    "accepts with 1.25 p/q": Planted(accepts_too_often),
    "accept draw is the draft's, batched": Planted(batched_reused_accept_draws, loop="batched"),
    "own token from the accept draw, batched": Planted(batched_own_draw_reused, loop="batched"),
    "rows share their numbers, batched": Planted(batched_rows_share_numbers, loop="batched"),
    "target at 0.9 of its temperature": Planted(wrong_temperature),
    "every answer from one seed": Planted(same_seed),
}
