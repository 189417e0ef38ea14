"""Chains that a GPU drafts ahead, against the same chains token by token."""

from __future__ import annotations

import torch

from draftsmith.modules.decoding.chain import draft_chains, draft_fixed_length
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.sampling import Sampler, TorchSource
from draftsmith.modules.types import SamplingParams

VOCAB, END = 6, 2


def test_chains_of_known_lengths_use_up_the_numbers_of_the_tokens_that_are_kept():
    """An end token ends a chain: the numbers behind it are left for the verification."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def step(tokens, place):
        last = torch.tensor([own[-1] if own else 0 for own in tokens]) if isinstance(tokens, list) else tokens[:, 0]
        return table[last], table[last]

    ended = 0
    for seed in range(12):
        lengths, found = [5, 3, 4], []
        for ahead in (False, True):
            sources = [TorchSource(3 * seed + row) for row in range(3)]
            sampler, logits = Sampler(SamplingParams(1.0), sources), table[:3]
            if ahead:
                trees = draft_fixed_length(logits, step, lengths, sampler, (END,))
            else:
                stops = [FixedLengthStop(9) for _ in lengths]
                trees = draft_chains(logits, logits, step, stops, lengths, sampler, [[0]] * 3, (END,))
            found.append([(tree.tokens, source.uniform()) for tree, source in zip(trees, sources, strict=True)])
        assert found[0] == found[1]
        ended += sum(len(tokens) < length for (tokens, _), length in zip(found[0], lengths, strict=True))
    assert ended > 5
