"""Draft models: a small language model drafts chains (Leviathan et al. 2023; Chen et al. 2023).

The head is made of some of the target's layers and distilled on its answers (DistillSpec, Zhou et al. 2023).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.modules.attention import Documents
from draftsmith.modules.decoding.drafter import Level
from draftsmith.modules.drafters.base import DraftHead, TargetWeights, TrainStep
from draftsmith.modules.drafters.branches import BranchedText
from draftsmith.modules.drafters.net import DraftNet
from draftsmith.modules.drafters.settings import DraftModelSettings, Options
from draftsmith.modules.layers import LlamaModel
from draftsmith.modules.llama_config import LlamaConfig, LlamaHeadConfig, layers_of
from draftsmith.modules.losses import Divergence, distances
from draftsmith.modules.targets.base import CausalLM, ModelInfo
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.transfer import true_places
from draftsmith.modules.types import FeatureBatch, InputError, LossOutput


class DraftModelNet(DraftNet):
    """Reads emitted tokens into the model's own cache, where accepted drafts stay.

    One token is unread after a rejection, and two after a fully accepted draft, whose last token was never fed. They go
    into one forward with the first draft step, so no call is spent on catching up.
    """

    reads_features = False
    first_start = 1

    def __init__(self, lm: CausalLM):
        super().__init__("draft", lm.device, lm.embed)
        self._lm = lm
        self._num_read = 0  # tokens of the text that are in the cache
        self._text: BranchedText | None = None

    # -- a sequence

    def allocate(self, capacity: int, depth: int, slots: int = 0, static: bool | None = None) -> None:
        # The draft's context may be shorter than the target's: past it there are no drafts, rather than bad ones.
        most = self._lm.info.max_position
        self.longest_text = most + 1
        self._session = self._lm.session(1, min(capacity, most), static=static)

    def begin(self) -> None:
        self._num_read = 0
        self._session.reset(1)

    def start(self, tokens: Sequence[int], features: Tensor) -> Level:
        unread, self._num_read = tokens[self._num_read :], len(tokens)
        scores = self._session.extend([unread])
        return Level(scores.features[0, len(unread) - 1 : len(unread)], scores.logits[0])

    def expand(self, tokens: Sequence[int] | Tensor, parents: Tensor | None, depth: int) -> Level:
        logits, hidden = self._session.step(tokens[None] if isinstance(tokens, Tensor) else [tokens])
        return Level(hidden, logits)

    def finish(self, accepted: int) -> None:
        self._num_read += accepted
        self._session.keep([self._num_read])

    def rewind(self, length: int) -> None:
        self._num_read = min(self._num_read, length)
        self._session.keep([self._num_read])

    # -- branches

    def open(self, tokens: Sequence[int], features: Tensor | None, depth: int) -> None:
        self._text = self._text or BranchedText(self._lm, depth)
        self._text.open(tokens)

    def branch(self, starts: Tensor) -> Tensor:
        assert self._text is not None, "open a text first"
        self._starts = starts
        return self._text.features[starts.to(self.device) - self.first_start]

    def read(self, tokens: Tensor, depth: int) -> Tensor:
        assert self._text is not None, "open a text first"
        return self._text.level(self._starts, depth - 1, tokens[:, None])[:, 0]

    def read_drafts(self, tokens: Tensor) -> Tensor:
        # Unlike a drafter that reads its own states, a language model reads whole branches at once.
        assert self._text is not None, "open a text first"
        return self._text.level(self._starts, 0, tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._lm.lm_head(hidden)

    def drop(self) -> None:
        assert self._text is not None, "open a text first"
        self._text.drop()


@dataclass(frozen=True)
class DraftConfig(LlamaHeadConfig):
    """Config of a draft model.

    llama: its sizes. kept: the layers that it began as, counted from 0 in the model it was made from. source: directory
    of that model, whose config.json and tokenizer it takes.
    """

    windowed: ClassVar[bool] = True

    kept: tuple[int, ...]
    source: str = ""


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return one of six layers, at least two, evenly spaced, with the first and the last."""
    count = min(num_layers, max(2, round(num_layers / 6)))
    return tuple(round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count))


class DraftModelHead(DraftHead[DraftConfig, DraftModelSettings]):
    """A small language model of the target's tokenizer that begins as some of its layers, with its embedding and
    lm_head, and learns its distributions on its answers (DistillSpec, Zhou et al. 2023)."""

    kind, title = "draft", "Draft model"
    drafts = ()  # methods take any language model
    Config, Settings = DraftConfig, DraftModelSettings
    saved_as_model = True

    @classmethod
    def needs_gathered_weights(cls, settings: DraftModelSettings) -> bool:
        # Its lm_head.
        return True

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config, self.model = config, LlamaModel(config.llama)

    # -- a new head

    @classmethod
    def new_config(cls, settings: DraftModelSettings, target: LlamaConfig) -> DraftConfig:
        if target.reasons:
            remedy = "Pass --init with a small model of the target's tokenizer that has such layers, or train a head."
            raise InputError("target", target.reasons[0], "layers of Llama, Mistral, Qwen2 or Qwen3 to keep", remedy)
        kept = tuple(settings.keep_layers) or default_layers(target.num_layers)
        if list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < target.num_layers:
            expected = f"ascending numbers from 0 to {target.num_layers - 1}, the model's layers"
            raise InputError("keep_layers", " ".join(map(str, kept)), expected, "Change it.")
        return DraftConfig(layers_of(target, num_layers=len(kept)), kept)

    @classmethod
    def shape(cls, config: DraftConfig) -> Options:
        return {"keep_layers": config.kept}

    def start(self, weights: TargetWeights) -> None:
        """Take everything but the layers that are not kept."""
        theirs = {f"layers.{old}.": f"model.layers.{new}." for new, old in enumerate(self.config.kept)}
        theirs |= {name: f"model.{name}" for name in ("embed_tokens.", "norm.", "lm_head.")}
        own = dict(self.named_parameters())
        for name, tensor in weights.tensors(tuple(theirs)).items():
            prefix = next(prefix for prefix in theirs if name.startswith(prefix))
            ours = theirs[prefix] + name.removeprefix(prefix)
            # A tied lm_head is the embedding, whether the files hold it or not.
            if ours in own:
                weight = own.pop(ours).data
                # Models of one tokenizer may pad their embeddings to other sizes than the target.
                weight[: len(tensor)] = tensor[: len(weight)]
                weight[len(tensor) :] = 0
        if own:
            found = f"{weights.path} without {', '.join(sorted(own)[:4])}"
            raise InputError("target", found, "all tensors config.json asks for", "Check the checkpoint.")
        self.config = dataclasses.replace(self.config, source=weights.path)

    def freeze(self, settings: DraftModelSettings) -> None:
        for layer in (self.model.embed_tokens, self.model.lm_head):
            layer.requires_grad_(settings.train_embeddings)

    # -- loss

    @classmethod
    def loss_count(cls, batch: FeatureBatch, settings: DraftModelSettings) -> int:
        return int(counted(batch).sum())

    def loss(
        self, batch: FeatureBatch, target: CausalLM, settings: DraftModelSettings, step: TrainStep | None
    ) -> LossOutput:
        """Return the mean divergence over the answers' tokens; `accepted` is the mean of sum_v min(p_v, q_v)."""
        ids, documents, states = batch.input_ids, None, batch.features
        assert states is not None, "the target reads the batch first"
        if batch.lengths is not None:
            documents = Documents.of(batch.lengths, ids.device)
            ids = documents.pad(ids)  # [D, L]
        hidden = self.model.features(ids)  # [B, T, H]
        if documents is not None:
            hidden = documents.unpad(hidden)  # [1, N, H]

        # Logits are made for the rows that count only.
        rows = true_places(counted(batch), None if step is None else step.logit_rows)  # [N]
        measured = step is None or step.logged
        own, wanted = (each.flatten(0, 1).index_select(0, rows) for each in (hidden, states))  # [N, H] each
        weights = torch.ones(len(rows), 1, dtype=torch.promote_types(own.dtype, torch.float32), device=own.device)
        compared = distances(
            target.lm_head, self.config.vocab_size, wanted.to(target.dtype), self.model.lm_head.weight, None, [own],
            weights, measured=measured, divergence=cast(Divergence, settings.loss),
        )  # fmt: skip
        total, sums = compared.total, {"loss": compared.total.detach()}
        if measured:
            sums |= {"top1": compared.right.sum(), "accepted": compared.accepted.sum()}
        count = torch.full((), len(rows), device=own.device)
        return LossOutput(total / count.clamp_min(1), sums, dict.fromkeys(sums, count))

    # -- drafter

    def language_model(self, target: CausalLM) -> CausalLM:
        """Return a frozen copy for decoding, in the target's type and on its device."""
        llama = self.config.llama
        model = copy.deepcopy(self.model).to(target.device, target.dtype).eval().requires_grad_(False)
        info = ModelInfo(llama.hidden_size, llama.vocab_size, llama.num_layers, llama.max_position, (), {})
        return LlamaLM(model, info, target.packed)

    def net(self, target: CausalLM) -> DraftModelNet:
        return DraftModelNet(self.language_model(target))


# Alignment. Row t has read x_t, as the target's state f_t has, and both predict x_{t+1}. It counts if x_{t+1} is of an
# answer, and of the same document.
def counted(batch: FeatureBatch) -> Tensor:
    """Return the rows [B, T] (bool) whose predictions count."""
    return F.pad(batch.loss_mask[:, 1:] & (batch.position_ids[:, 1:] > 0), (0, 1))
