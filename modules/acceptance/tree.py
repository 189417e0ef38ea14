"""What an acceptance head predicts for the nodes of a tree: all children of a level at once, while decoding."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.acceptance.head import AcceptanceHead
from draftsmith.modules.acceptance.predictor import LARGEST_TABLE
from draftsmith.modules.decoding.confidence import SMALLEST, TokenConfidences
from draftsmith.modules.sampling import probabilities
from draftsmith.modules.types import SamplingParams


class TreePredictor:
    """log P^ that the target, at a node, goes on with one of its children.

    The head's arithmetic with its first layer taken apart: the state's part is worked out once a node, and the token's
    beforehand where the vocabulary is not too large.
    """

    def __init__(self, head: AcceptanceHead, embed: Callable[[Tensor], Tensor], vocab_size: int):
        """embed: the drafter's token embeddings [.., H]."""
        config = head.config
        assert config.judges == "tree" and config.state == "before" and head.join is not None
        size = config.hidden_size
        weight, self._bias = head.join.weight.detach().float(), head.join.bias.detach().float()
        self._of_state, self._of_token, self._of_features = weight.tensor_split([size, 2 * size], 1)
        self._head, self._embed = head, embed
        self._table: Tensor | None = None
        if vocab_size * config.inner_size <= LARGEST_TABLE:
            with torch.inference_mode():
                self._table = self._by_token(torch.arange(vocab_size, device=weight.device))

    def log_prob(
        self, hidden: Tensor, logits: Tensor, log_q: Tensor, tokens: Tensor, depth: int, params: SamplingParams
    ) -> Tensor:
        """[n, k] of children `tokens` [n, k] at `depth`, of n nodes with states [n, H] and raw logits [n, V], whose
        log-softmax is log_q."""
        head, features = self._head, None
        of_token = self._by_token(tokens) if self._table is None else F.embedding(tokens, self._table)
        x = of_token + F.linear(hidden.float(), self._of_state)[:, None]
        if head.config.features:
            # A head is told of the distribution that a token would be drawn from, as it was when it was trained.
            if not (params.greedy or (params.temperature == 1 and params.top_k == 0 and params.top_p == 1)):
                log_q = probabilities(logits, params).log()
            log_q = log_q.clamp_min(math.log(SMALLEST))
            entropy = -torch.linalg.vecdot(log_q.exp(), log_q)[:, None]
            place, heat = (log_q.new_full((1, 1), value) for value in (depth, params.temperature))
            largest = log_q.amax(-1, keepdim=True)
            known = TokenConfidences(log_q.gather(-1, tokens), largest, entropy, place, heat)
            features = head.feature_values(known).float()
            x = x + F.linear(features, self._of_features)
        return F.logsigmoid(head.calibrated(head.rest(x, features)))

    def _by_token(self, tokens: Tensor) -> Tensor:
        """The part of the first layer that the token decides, its bias included, [.., W]."""
        return F.linear(self._embed(tokens).float(), self._of_token, self._bias)
