"""Heads that are trained on drafts from every row of a text at once, each read behind the head's own states
(training-time test: EAGLE-3, section 3.2): alignment, passes and loss that EAGLE heads and MTP modules share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from draftsmith.modules.attention import Documents, Entry, attend_entries
from draftsmith.modules.drafters.base import TrainStep, documents_of
from draftsmith.modules.drafters.feature_heads import FeatureHead
from draftsmith.modules.drafters.settings import Mask, UnrolledSettings
from draftsmith.modules.layers import Pair
from draftsmith.modules.llama_config import LlamaHeadConfig
from draftsmith.modules.losses import Divergence, LmHead, distances
from draftsmith.modules.rotary import rope_at
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.transfer import to_device, true_places
from draftsmith.modules.types import FeatureBatch, LossOutput


# Alignment. In pass j row t has read x_{t+1} .. x_{t+1+j} behind the target's states up to t. It predicts the target's
# distribution at position s = t+1+j, which the final state there gives:
#
#   position s            0    1    2    3    4   ...
#   row of pass 0         -    0    1    2    3        reads x_s behind the states up to s-1
#   row of pass 1         -    -    0    1    2        reads x_{s-1}, x_s behind the states up to s-2
#   row of pass 2         -    -    -    0    1        reads x_{s-2}, x_{s-1}, x_s behind the states up to s-3
@dataclass(frozen=True)
class UnrolledInputs:
    """A `FeatureBatch`, or the rows of a span of it, paired for the head; N positions s count, in any pass.

    next_ids: [B, T + K - 1], x_{t+1} at t, for K passes. states: [B, T, n H]. Of the N positions: sequence and
    position [N] among these rows, place [N] in their own sequence, owner [N], the number of that sequence, and
    wanted [N, H], the final state. first: the batch's row that row 0 is. earlier: rows of the batch before, whose keys
    of pass 0 the rows see. documents: of the rows; None if each is a sequence, or all are part of one.
    """

    next_ids: Tensor
    states: Tensor
    first: int
    earlier: slice
    documents: Documents | None
    sequence: Tensor
    position: Tensor
    place: Tensor
    owner: Tensor
    wanted: Tensor

    def rows(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the rows [N] of pass `number`, among all B * T, that predict at the positions, and whether they exist.

        Drafts begin inside their sequence.
        """
        row = (self.position - 1 - number).clamp_min(0)
        return self.sequence * self.states.shape[1] + row, self.place > number


def read_states(features: Tensor, config: LlamaHeadConfig) -> Tensor:
    """Return the states [.., F] that a head reads among features [.., F + H], whose last ones are the final state.

    A head that reads the final state alone has features [.., H].
    """
    return features[..., : -config.hidden_size] if features.shape[-1] > config.hidden_size else features


def counted(batch: FeatureBatch, mask: Mask) -> Tensor:
    """Return the positions s [B, T] (bool) whose predictions count. Position 0 of a sequence never does."""
    chosen, first = batch.loss_mask, batch.position_ids == 0
    if mask == "previous":
        chosen = F.pad(chosen[:, :-1], (1, 0))
    elif mask == "next":
        # No position has a next one behind its sequence.
        chosen = F.pad((chosen & ~first)[:, 1:], (0, 1))
    chosen = chosen & ~first
    return chosen if batch.attention_mask is None else chosen & batch.attention_mask


def owners(batch: FeatureBatch) -> Tensor:
    """Return the number of the sequence that each token belongs to, [B, T]."""
    if batch.lengths is None:
        return torch.arange(len(batch.input_ids), device=batch.input_ids.device)[:, None].expand_as(batch.input_ids)
    sizes = torch.tensor(batch.lengths)
    return to_device(torch.arange(len(sizes)).repeat_interleave(sizes)[None], batch.input_ids.device)


def paired(
    batch: FeatureBatch, mask: Mask, config: LlamaHeadConfig, ttt_steps: int, step: TrainStep | None = None
) -> UnrolledInputs:
    """Pair tokens and states; features are the states that the head reads and, last, the final one."""
    assert batch.features is not None, "the target reads the batch first"
    size, width, device = config.hidden_size, batch.input_ids.shape[1], batch.input_ids.device
    own, lengths, logit_rows = counted(batch, mask), batch.lengths, None if step is None else step.logit_rows
    first, stop, earlier = 0, width, 0
    if step is not None and step.span is not None:
        start, stop = step.span
        begin, lengths = documents_of(batch, step.span)
        # Of a text's part: drafts of later passes began before it, and their first rows see keys before them.
        first, reach = max(begin, start - ttt_steps), config.llama.sliding_window or width
        # What a row of the last layer sees has seen as much in the layer before.
        earlier = max(begin, first - config.llama.num_layers * (reach - 1))
        place = torch.arange(width, device=device)
        own, logit_rows = own & (place >= start) & (place < stop), None
    chosen = true_places(own, logit_rows)  # [N]
    return UnrolledInputs(
        next_ids=F.pad(batch.input_ids, (0, ttt_steps))[:, first + 1 : stop + ttt_steps],
        states=read_states(batch.features, config)[:, first:stop],
        first=first,
        earlier=slice(earlier, first),
        documents=None if lengths is None else Documents.of(lengths, device),
        sequence=chosen // width,
        position=chosen % width - first,
        place=batch.position_ids.flatten().index_select(0, chosen),
        owner=owners(batch).flatten().index_select(0, chosen),
        wanted=batch.features[..., -size:].flatten(0, 1).index_select(0, chosen),
    )


ConfigT = TypeVar("ConfigT", bound=LlamaHeadConfig)
SettingsT = TypeVar("SettingsT", bound=UnrolledSettings)


class UnrolledHead(FeatureHead[ConfigT, SettingsT]):
    """A head whose loss is that of whole drafts, each token behind the head's own states.

    cos, sin: rotary tables of its layers, [positions, rotary_dim].
    """

    cos: Tensor
    sin: Tensor
    fc: nn.Linear

    depth_option: ClassVar[str] = "ttt_steps"
    takes_spans: ClassVar[bool] = True

    @property
    def tokens(self) -> Tensor | None:
        """The target's id of each token that it can draft, int64 ascending; None: all."""
        return None

    @classmethod
    def drops_unknown(cls, settings: SettingsT) -> bool:
        """Return whether tokens do not count where the target's first choice cannot be drafted."""
        return False

    @classmethod
    def needs_gathered_weights(cls, settings: SettingsT) -> bool:
        # Its lm_head.
        return True

    @property
    def output_weight(self) -> Tensor | None:
        """Weight [tokens, H] of the head's own lm_head; None: it has the target's."""
        return None

    def logits_input(self, hidden: Tensor) -> Tensor:
        """Return the input [.., H] of lm_head for states [.., H]."""
        return hidden

    def read_embeds(self, embeds: Tensor) -> Tensor:
        """Return what all passes read of the embeddings [B, T, H]."""
        return embeds

    def pair(self, embeds: Tensor, states: Tensor) -> Tensor | Pair:
        """Return the first layer's input for what is read of embeddings and states [B, T, H]."""
        return self.fuse(embeds, states)

    # -- passes

    def unroll(
        self,
        embeds: Tensor,
        states: Tensor,
        num_passes: int,
        position_ids: Tensor | None = None,
        documents: Documents | None = None,
        earlier: Sequence[Entry] = (),
    ) -> list[Tensor]:
        """Run drafts of num_passes tokens from every row at once (training-time test, section 3.2; HASS, section 3.2).

        Returns h [B, T, H] of each pass: row t of pass j has read x_{t+1} .. x_{t+1+j} behind the states up to t.

        embeds: [B, T + num_passes - 1, H], of x_{t+1} at t. states: [B, T, F]. position_ids: [B, T]; 0, 1, .. by
        default. documents: of a flat batch [1, N, ..], which needs position_ids; drafts that leave their document mean
        nothing. earlier: in each layer, keys and values of the rows before those of a text's part (`read_keys`).
        """
        hidden, rows, passes = self.read(states), states.shape[1], list[Tensor]()
        if position_ids is None:
            position_ids = torch.arange(rows, device=states.device)[None]
        window, layers = self.config.llama.sliding_window, list(self.decoder_layers)
        entries: list[list[Entry]] = [[] for _ in layers]
        keys_before: Sequence[Entry | None] = earlier or [None] * len(layers)
        embeds = self.read_embeds(embeds)
        for j in range(num_passes):
            x = cast(Tensor, self.pair(embeds[:, j : j + rows], hidden))  # [B, T, H'], or a `Pair`
            cos, sin = rope_at(self.cos, self.sin, position_ids + j, embeds.dtype)
            for layer, own, before in zip(layers, entries, keys_before, strict=True):
                attend = partial(attend_entries, entries=own, documents=documents, window=window, earlier=before)
                x = layer(x, cos, sin, attend)
            hidden = self.normed(x)  # [B, T, H]
            passes.append(hidden)
        return passes

    def read_keys(self, embeds: Tensor, states: Tensor, position_ids: Tensor) -> list[Entry]:
        """Return each layer's key and value [B, T, kv_heads, D] of pass 0, for rows that only later ones see.

        Arguments as of `unroll`, all [B, T, ..].
        """
        *before, last = self.decoder_layers
        x = cast(Tensor, self.pair(self.read_embeds(embeds), self.read(states)))
        cos, sin = rope_at(self.cos, self.sin, position_ids, embeds.dtype)
        found = list[Entry]()
        for layer in before:
            own = list[Entry]()
            x = layer(x, cos, sin, partial(attend_entries, entries=own, window=self.config.llama.sliding_window))
            found += [(key.transpose(1, 2), value.transpose(1, 2)) for key, value in own]
        return [*found, last.keys_values(x, cos, sin)]

    # -- loss

    @classmethod
    def loss_count(cls, batch: FeatureBatch, settings: SettingsT) -> float:
        if settings.normalizer == "padded":
            return batch.input_ids.numel()
        chosen = counted(batch, settings.token_mask)
        return int(chosen.sum() if settings.normalizer == "tokens" else owners(batch)[chosen].unique().numel())

    @classmethod
    def logit_rows(cls, batch: FeatureBatch, settings: SettingsT) -> int:
        return int(counted(batch, settings.token_mask).sum())

    def training_states(self, states: Tensor, batch: FeatureBatch, settings: SettingsT, step: TrainStep) -> Tensor:
        """Return what a training step reads in the place of the batch's states [B, T, F]."""
        return states

    def combine(
        self, by_tokens: Tensor, hidden: Sequence[Tensor], wanted: Tensor, weights: Tensor, settings: SettingsT
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted loss, and parts of it to log, from that of the distributions.

        hidden: [N, H] of each pass. wanted: [N, H], the target's states there. weights: [N, passes].
        """
        return by_tokens, {}

    def loss(self, batch: FeatureBatch, target: CausalLM, settings: SettingsT, step: TrainStep | None) -> LossOutput:
        """Run the passes, compare their predictions with the target's, and return the weighted mean of the passes.

        In validation it also says what drafts of `ttt_steps` tokens would come to.
        """
        dtype = next(self.parameters()).dtype
        ttt_steps, measured = settings.num_ttt_steps(step), step is None or step.logged
        pairs = paired(batch, settings.token_mask, self.config, ttt_steps, step)
        device, rows = batch.input_ids.device, slice(pairs.first, pairs.first + pairs.states.shape[1])
        embed = self.embedding(target)
        embeds = embed(pairs.next_ids).to(dtype)  # [B, T + ttt_steps - 1, H]
        earlier, before = list[Entry](), pairs.earlier
        if before.start < before.stop:
            ids, states = (
                batch.input_ids[:, before.start + 1 : before.stop + 1],
                cast(Tensor, batch.features)[:, before],
            )
            own = embed(ids).to(dtype), read_states(states, self.config).to(dtype)
            # They are most of a long text, and cheap to compute again.
            earlier = checkpoint(self.read_keys, *own, batch.position_ids[:, before], use_reentrant=False)
        states = pairs.states.to(dtype)  # [B, T, F]
        if step is not None:
            states = self.training_states(states, batch, settings, step)
        passes = self.unroll(embeds, states, ttt_steps, batch.position_ids[:, rows], pairs.documents, earlier)

        # Only the rows that predict at a position that counts go on to lm_head.
        predictions, inside = [], []
        for number, hidden in enumerate(passes):
            own_rows, exists = pairs.rows(number)  # [N], [N]
            predictions.append(self.logits_input(hidden.flatten(0, 1).index_select(0, own_rows)))  # [N, H]
            inside.append(exists)
        weights = torch.stack(inside, -1).to(torch.promote_types(dtype, torch.float32))  # [N, ttt_steps]
        if settings.normalizer == "sequence":
            # `bincount` would wait for the device.
            sizes = weights.new_zeros(len(batch.input_ids if batch.lengths is None else batch.lengths))
            whole = counted(batch, settings.token_mask).flatten()
            sizes = sizes.index_add_(0, owners(batch).flatten(), whole.to(weights.dtype))
            weights = weights / sizes[pairs.owner, None]
        decay = torch.tensor([settings.ttt_step_decay**i for i in range(ttt_steps)], dtype=weights.dtype)
        scale = to_device(decay, device)
        weights = weights * (scale / scale.sum() if settings.ttt_step_weights == "mean" else scale)
        lm_head: LmHead = target.lm_head
        vocab_size, tokens = self.config.vocab_size, self.tokens
        drop_unknown = tokens is not None and self.drops_unknown(settings)
        if tokens is not None and not drop_unknown and not measured:
            # The loss alone compares distributions over the draft vocabulary.
            lm_head, vocab_size, tokens = target.lm_head_of(tokens), len(tokens), None
        compared = distances(
            lm_head,
            vocab_size,
            pairs.wanted.to(target.dtype),
            self.output_weight,
            tokens,
            predictions,
            weights,
            drop_unknown,
            measured,
            cast(Divergence, settings.loss or "forward"),
        )

        total, parts = self.combine(compared.total, predictions, pairs.wanted, weights, settings)
        sums = {"loss": total.detach(), **parts}
        if measured:
            sums |= {"top1": compared.right[:, 0].sum(), "accepted": compared.accepted[:, 0].sum()}
            if self.tokens is not None:
                sums["known"] = compared.known.sum()
        counts = dict.fromkeys(sums, torch.full((), len(pairs.place), device=device))
        count = self.loss_count(batch, settings) if step is None or step.loss_count is None else step.loss_count
        counts["loss"] = torch.full((), int(count), device=device)
        if step is not None and step.span is not None:
            # Shares add up to the whole.
            counts["loss"] = counts["loss"].double() * ((step.span[1] - step.span[0]) / batch.input_ids.numel())
        return LossOutput(total / max(count, 1), sums, counts)
