"""Chains that a GPU drafts ahead, against the same chains token by token."""

from __future__ import annotations

import torch

from draftsmith.modules.decoding.chain import draft_ahead, draft_chain
from draftsmith.modules.decoding.drafter import Level
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.types import SamplingParams

VOCAB, END = 6, 2


def test_chains_of_known_lengths_use_up_the_numbers_of_the_tokens_that_are_kept():
    """An end token ends a chain: the numbers behind it are left for the verification."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def expand(tokens, parents, depth):
        (token,) = tokens
        return Level(table[int(token)][None], table[int(token)][None])

    ended = 0
    for seed, length in zip(range(36), (5, 3, 4) * 12, strict=True):
        found, root = [], expand([seed % 3], None, 0)
        for ahead in (False, True):
            source = TorchSource(seed)
            sampler = Sampler(SamplingParams(1.0), source)
            if ahead:
                tree = draft_ahead(root, expand, length, sampler, (END,))
            else:
                tree = draft_chain(root, expand, FixedLengthStop(9), length, sampler, [0], (END,))
            prob = torch.stack(list(tree.draft_prob))
            found.append((tree.tokens, tree.draft_calls, prob.tolist(), source.uniform()))
        assert found[0] == found[1]
        ended += len(found[0][0]) < length
    assert ended > 5
