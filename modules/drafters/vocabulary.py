"""Heads with an lm_head of their own, often over fewer tokens than the target's: EAGLE-3 and block drafters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from draftsmith.modules.drafters.base import HeadConfig, TargetWeights
from draftsmith.modules.types import InputError


class VocabularyHead(nn.Module):
    """Part of a head that has its own lm_head (`add_lm_head`).

    lm_head: [draft vocabulary, H]. d2t: [draft vocabulary] int64, the target's id of each token that the head can
    draft, ascending.
    """

    lm_head: nn.Linear
    d2t: Tensor
    tied_to_target: tuple[str, ...] = ()
    _vocab_size: int | None = None  # of the target, if the head drafts a part of it

    def add_lm_head(self, config: HeadConfig, size: int) -> None:
        """Add a frozen lm_head over `size` tokens."""
        reduced = size < config.vocab_size
        self._vocab_size = config.vocab_size if reduced else None
        self.lm_head = nn.Linear(config.hidden_size, size, bias=False).requires_grad_(False)
        self.register_buffer("d2t", torch.arange(size), persistent=reduced)
        self.register_load_state_dict_post_hook(_check_d2t)

    def over_target(self, logits: Tensor) -> Tensor:
        """Return logits over the target's vocabulary [.., V], of those [.., draft vocabulary] over the head's own; -inf
        for tokens that it cannot draft."""
        if self._vocab_size is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self._vocab_size), -torch.inf)
        return whole.index_copy_(-1, self.d2t, logits)

    @property
    def tokens(self) -> Tensor | None:
        return None if self._vocab_size is None else self.d2t

    def use_draft_vocabulary(self, tokens: Tensor, lm_head: Tensor | None = None) -> None:
        """Restrict drafts to these tokens (int64 [draft vocabulary], ascending).

        lm_head: [V, H] of the target, whose rows of these tokens become the head's own.
        """
        self.d2t.copy_(tokens)
        if lm_head is not None:
            with torch.no_grad():
                self.lm_head.weight.copy_(lm_head[tokens.to(lm_head.device)])

    def update_from_target(self, weights: TargetWeights) -> None:
        if self.tied_to_target:
            self.use_draft_vocabulary(self.d2t, weights.lm_head())


def _check_d2t(net: VocabularyHead, _: object) -> None:
    """Raise InputError unless `d2t` holds ids of the target, each once, ascending."""
    ids, vocab_size = net.d2t, net._vocab_size or len(net.d2t)
    if not bool((ids[1:] > ids[:-1]).all()) or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        span = f"ids from {int(ids.min())} to {int(ids.max())} in no order"
        raise InputError(
            "d2t", span, f"ascending ids below {vocab_size}", "Take the head's directory from where it was trained."
        )


def draft_vocabulary(counts: Tensor, size: int, always: Sequence[int] = ()) -> Tensor:
    """Return the ids [size], ascending, of the most frequent tokens of counts [V].

    Of equally frequent tokens the lower ids are taken; those of `always` in any case.
    """
    wanted = counts.clone()
    wanted[list(always)] = wanted.max() + 1
    return wanted.sort(descending=True, stable=True).indices[:size].sort().values
