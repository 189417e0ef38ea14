"""Medusa-1 heads (Cai et al. 2024): each guesses a token further ahead from the target's last state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.acceptance.head import ResidualBlock
from draftsmith.modules.decoding.drafter import Level
from draftsmith.modules.decoding.tree import MAX_NODES
from draftsmith.modules.drafters.base import DraftHead, TargetWeights, TrainStep
from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.drafters.settings import HeadSettings
from draftsmith.modules.llama_config import MOST_POSITIONS, MOST_SIZE, LlamaConfig
from draftsmith.modules.losses import LmHead, chunked, compare, softmax_
from draftsmith.modules.sampling import wide
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput, check_config, check_ranges

# Head i, counted from 0, reads state t and guesses token t + AHEAD + i; token t + 1 comes from the target's lm_head.
AHEAD = 2


@dataclass(frozen=True)
class MedusaConfig:
    """Config of Medusa heads: the target's sizes, and num_heads heads of one residual block each.

    own_lm_head: each head has an lm_head of its own (section 2.1.1 of the paper); else all share the target's.
    """

    hidden_size: int
    vocab_size: int
    max_position: int
    num_heads: int = 5
    own_lm_head: bool = False

    def __post_init__(self) -> None:
        check_config(
            self,
            hidden_size=(1, MOST_SIZE),
            vocab_size=(1, MOST_SIZE),
            max_position=(2, MOST_POSITIONS),
            # No round has room for the tokens of more heads.
            num_heads=(1, MAX_NODES),
        )


@dataclass(frozen=True, kw_only=True)
class MedusaSettings(HeadSettings):
    """Train Medusa heads. The target stays as it is, its lm_head too.

    Attributes:
        num_heads: Heads, and so the tokens of the longest draft. Default: 5, or those of the heads to train on.
        lm_head: own, one for each head, which begins as the target's and is trained, as published; or target, whose
            lm_head all heads share. Default: target, or what the heads to train on have.
        head_decay: Loss weight of a head, relative to the one before.
        loss: What the heads learn from: hard, the tokens of the text; or soft, the target's own distributions there,
            at temperature 1 (Hydra++'s teacher loss).
    """

    defaults = {"epochs": 2, "lr": 1e-3}

    num_heads: int | None = None
    lm_head: Literal["own", "target"] | None = None
    head_decay: float = 0.8
    loss: Literal["hard", "soft"] = "hard"

    def __post_init__(self) -> None:
        check_ranges(self, num_heads=1, head_decay=(0.0, 1.0, "(]"))


class MedusaHead(DraftHead):
    """Guesses each of the next tokens from the target's last state alone, by a head for each (Medusa-1, Cai et al.
    2024). They have an lm_head each, or read the target's, which is not in this directory."""

    kind, title = "medusa", "Medusa heads"
    drafts = ("chain", "static")
    default_k = MAX_NODES  # a token of each head
    Config = MedusaConfig
    Settings: ClassVar[type] = MedusaSettings
    default_heads: ClassVar[int] = 5
    num_lost_rows = AHEAD
    # Whether lm_heads of their own have a bias.
    lm_head_bias: ClassVar[bool] = False

    @classmethod
    def needs_gathered_weights(cls, settings: Any) -> bool:
        # Only lm_heads of its own are read so.
        return settings.lm_head == "own"

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.heads = nn.ModuleList(self.make_head(config, i) for i in range(config.num_heads))
        size, own = (config.hidden_size, config.vocab_size), config.num_heads if config.own_lm_head else 0
        self.lm_heads = nn.ModuleList(nn.Linear(*size, bias=self.lm_head_bias) for _ in range(own))

    @classmethod
    def make_head(cls, config: Any, number: int) -> nn.Module:
        """Build the network of a head, counted from 0: from its input to its state."""
        return ResidualBlock(config.hidden_size)

    def forward(self, features: Tensor) -> list[Tensor]:
        """Return the state [.., H] of every head, from the target's features [.., H]."""
        return [head(features) for head in self.heads]

    # -- a new head

    @classmethod
    def new_config(cls, settings: MedusaSettings, target: LlamaConfig) -> Any:
        sizes = target.hidden_size, target.vocab_size, target.max_position
        return MedusaConfig(*sizes, settings.num_heads or cls.default_heads, settings.lm_head == "own")

    @classmethod
    def shape(cls, config: Any) -> dict[str, Any]:
        return super().shape(config) | {"lm_head": "own" if config.own_lm_head else "target"}

    def start(self, weights: TargetWeights) -> None:
        for layer in self.lm_heads:
            layer.get_parameter("weight").data.copy_(weights.lm_head() * weights.logit_scale)
            if self.lm_head_bias:
                layer.get_parameter("bias").data.zero_()

    # -- loss

    @classmethod
    def loss_count(cls, batch: FeatureBatch, settings: Any) -> int:
        return int(pairs(batch, 0).sum())

    def inputs(self, number: int, states: Tensor, counted: Tensor, batch: FeatureBatch, target: CausalLM) -> Tensor:
        """Return a head's inputs [N, R] at the positions that count (`pairs`); states: the target's [B, T, H]."""
        return states[:, : counted.shape[1]][counted]

    def loss(
        self, batch: FeatureBatch, target: CausalLM, settings: MedusaSettings, step: TrainStep | None
    ) -> LossOutput:
        """Return sum_i head_decay^i x the cross-entropy of head i (section 2.2.1), per token of the first head.

        It is the cross-entropy with the tokens of the text, or with the target's distributions there.
        """
        assert batch.features is not None, "the target reads the batch first"
        states, own_lm_head = batch.features.to(next(self.parameters()).dtype), self.config.own_lm_head  # [B, T, H]
        loss, sums, counts = states.new_zeros(()), {}, {}

        def target_lm_head(hidden: Tensor) -> Tensor:
            return target.lm_head(hidden.to(target.dtype))

        for i, head in enumerate(self.heads):
            counted = pairs(batch, i)  # [B, T - 2 - i]
            labels = batch.input_ids[:, AHEAD + i :][counted]  # [N]
            teacher = None
            if settings.loss == "soft":
                # State t + 1 + i gives the target's distribution of token t + 2 + i.
                teacher = target_lm_head, batch.features[:, AHEAD - 1 + i : -1][counted].detach()
            hidden = head(self.inputs(i, states, counted, batch, target))  # [N, H]
            lm_head, own = (F.linear, [*self.lm_heads[i].parameters()]) if own_lm_head else (target_lm_head, [])
            entropy, hits = token_loss(lm_head, self.config.vocab_size, hidden, labels, own, teacher)
            loss = loss + settings.head_decay**i * entropy
            name = "top1" if i == 0 else f"top1_{i + 1}"
            sums[name], counts[name] = hits, counted.sum()
        sums["loss"], counts["loss"] = loss.detach(), counts["top1"]
        return LossOutput(loss / counts["top1"].clamp_min(1), sums, counts)

    # -- drafter

    def outputs(self, shared: LmHead) -> Sequence[LmHead]:
        """Return the lm_head of each head; `shared` if they have none of their own."""
        return list(self.lm_heads) if self.config.own_lm_head else [shared] * self.config.num_heads

    @property
    def longest_draft(self) -> int:
        return self.config.num_heads

    def net(self, target: CausalLM) -> DraftNet:
        return MedusaNet(self, target)


# Alignment. Head i reads state f_t and guesses token x_{t+2+i}, if that is a response token of the same text:
#
#   state         f0    f1    f2    f3    ...
#   head 0        x2    x3    x4    x5
#   head 1        x3    x4    x5    x6          (Hydra's reads x_{t+1} .. x_{t+1+i} beside the state)
#   head 2        x4    x5    x6    x7
def pairs(batch: FeatureBatch, head: int) -> Tensor:
    """Return the states [B, T - 2 - i] (bool) whose token t + 2 + i counts."""
    ahead = AHEAD + head
    same = batch.position_ids[:, ahead:] == batch.position_ids[:, : max(batch.input_ids.shape[1] - ahead, 0)] + ahead
    return same & batch.loss_mask[:, ahead:]


def token_loss(
    lm_head: Callable[..., Tensor],
    vocab_size: int,
    hidden: Tensor,
    labels: Tensor,
    weights: Sequence[Tensor] = (),
    teacher: tuple[LmHead, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the cross-entropies of lm_head(hidden [N, H], *weights) with labels [N], and count the labels it ranks first.

    weights: get a gradient if they require one. teacher: an lm_head and its states [N, H'], whose distribution takes
    the labels' place in the cross-entropy.
    """
    hits = torch.zeros((), dtype=torch.int64, device=labels.device)
    rows = [hidden, labels] if teacher is None else [hidden, labels, teacher[1]]

    def loss(hidden: Tensor, labels: Tensor, *given: Tensor) -> Iterator[Tensor]:
        logits = wide(lm_head(hidden, *given[len(rows) - 2 :]))  # [C, V]
        hits.add_((logits.argmax(-1) == labels).sum())
        if teacher is None:
            yield compare(logits, None, labels)[0].sum()
        else:
            with torch.no_grad():
                p = softmax_(wide(teacher[0](given[0])))  # [C, V]
            yield compare(logits, p)[0].sum()

    return chunked(loss, vocab_size, rows, weights), hits


class MedusaNet(DraftNet):
    """Drafts each level by a head of its own, from the target's last state alone.

    Of branches a state is that of its head, [H], and with lm_heads of their own its level beside it, [H + 1].
    """

    one_pass = True

    def __init__(self, head: MedusaHead, target: CausalLM):
        super().__init__(head.kind, target.device, target.embed)
        self.head = head.lean(target)
        self.heads, self.lm_heads = list(self.head.heads), self.head.outputs(head.output or target.lm_head)
        self.longest_draft, self.aux_layers = head.config.num_heads, head.aux_layers
        self._own_lm_head = head.config.own_lm_head

    def start(self, tokens: Sequence[int], features: Tensor) -> Level:
        self._inputs = features[-1:]  # [1, H]
        return self.expand(tokens[-1:], None, 0)

    def expand(self, tokens: Sequence[int] | Tensor, parents: Tensor | None, depth: int) -> Level:
        hidden = self.heads[depth](self._inputs)
        return Level(hidden.expand(len(tokens), -1), self.lm_heads[depth](hidden).expand(len(tokens), -1))

    def open(self, tokens: Sequence[int], features: Tensor | None, depth: int) -> None:
        assert features is not None and len(features) == len(tokens)
        self._text = features

    def branch(self, starts: Tensor) -> Tensor:
        self._inputs = self._text[starts.to(self.device) - self.first_start]
        return self.state(self.heads[0](self._inputs), 0)

    def read(self, tokens: Tensor, depth: int) -> Tensor:
        self.check_depth(depth)
        return self.state(self.heads[depth](self._inputs), depth)

    def state(self, hidden: Tensor, depth: int) -> Tensor:
        """Return the state of branches from that of the head of a level [.., H]."""
        return F.pad(hidden, (0, 1), value=depth) if self._own_lm_head else hidden

    def check_depth(self, depth: int) -> None:
        """Raise InputError if no head predicts what follows this many drafted tokens."""
        if depth == self.longest_draft:
            expected = f"at most {depth - 1} for a head that reads the state after a token"
            raise InputError("depth", depth, expected, "Make labels of shorter drafts, or pass --state before.")

    def logits(self, hidden: Tensor) -> Tensor:
        if not self._own_lm_head:
            return self.lm_heads[0](hidden)
        hidden, levels = hidden[..., :-1], hidden[..., -1]
        logits = hidden.new_empty((*levels.shape, self.head.config.vocab_size))
        for number, lm_head in enumerate(self.lm_heads):
            logits[levels == number] = lm_head(hidden[levels == number])
        return logits


HEADS = (MedusaHead,)
