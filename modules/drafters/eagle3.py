"""EAGLE-3 head (Li et al. 2025; SafeAILab/EAGLE eagle/traineagle3): its network; its loss is in unrolled.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.modules.drafters.base import DocumentParts, TargetWeights
from draftsmith.modules.drafters.eagle import rope_of
from draftsmith.modules.drafters.settings import Eagle3Settings, Options
from draftsmith.modules.drafters.unrolled import UnrolledHead
from draftsmith.modules.drafters.vocabulary import VocabularyHead, draft_vocabulary
from draftsmith.modules.layers import DecoderLayer, Layer, Pair, PairLayer, RMSNorm
from draftsmith.modules.llama_config import (
    MOST_LAYERS,
    PLAIN,
    CaptureConfig,
    LlamaConfig,
    RopeScaling,
    captured_layers,
    layers_of,
)
from draftsmith.modules.rotary import add_rope_table
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.types import InputError, check_config, check_range


@dataclass(frozen=True)
class Eagle3Config(CaptureConfig):
    """Config of an EAGLE-3 head. Rotary positions are its own: those of published heads differ from their targets'.

    draft_vocab_size: tokens that it can draft, the rows of its lm_head; the target's vocabulary if that is whole.
    fc_norm: each of these states is normed before they are joined (EAGLE-3.1).
    norm_before_fc: they are normed side by side, as one vector of n H, before they are joined.
    norm_output: its own states are normed before it reads them again (EAGLE-3.1).
    norm_before_residual: the residual of its first layer is the normed state; only heads of other trainers have it.
    own_embedding: it reads an embedding of its own, which its trainer trained, in place of the target's.
    """

    draft_vocab_size: int
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    own_embedding: bool = False
    windowed = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_config(self, draft_vocab_size=(1, self.vocab_size))
        check_range("num_layers", self.llama.num_layers, 1, MOST_LAYERS)
        if self.fc_norm and self.norm_before_fc:
            raise InputError("norm_before_fc", "true with fc_norm", "one norm of the states", "Correct it.")

    @property
    def reduced(self) -> bool:
        """It can draft only some of the target's tokens."""
        return self.draft_vocab_size < self.llama.vocab_size


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers that every system reads by default; they collapse for a target of fewer than seven.

    Source: SafeAILab/EAGLE eagle/traineagle3/modeling_llama_kv.py.
    """
    return 2, num_layers // 2, num_layers - 3


def layer_like(target: LlamaConfig, rope_theta: float | None = None, plain_rope: bool = False) -> LlamaConfig:
    """Return a layer like the target's, as far as servers support it: no biases or q/k norms, attending to all."""
    theta = target.rope_theta if rope_theta is None else rope_theta
    scaling = RopeScaling() if plain_rope else target.rope_scaling
    return layers_of(target, num_layers=1, rope_theta=theta, rope_scaling=scaling, **PLAIN)


# Version -> fc_norm, norm_before_fc, norm_output of its config.
VERSIONS = {"3": (False, False, False), "3-norm": (False, True, False), "3.1": (True, False, True)}
DRAFT_VOCAB = 32_000


class Eagle3Head(VocabularyHead, UnrolledHead[Eagle3Config, Eagle3Settings]):
    """EAGLE-3: it reads the inputs of some of the target's layers, and its own state in the place of the next ones. It
    has an lm_head of its own, often over fewer tokens than the target's; the embedding is the target's and not in this
    directory, unless another trainer trained it.

    Network g_t = fc([states of the layers at t]); h_t = layers(embed(x_{t+1}), g_t); lm_head(norm(h_t)) ~ x_{t+2}.

    Later in a draft h takes the place of g. The first layer reads both, any others are plain ones behind it.
    """

    kind, title = "eagle3", "EAGLE-3 head"
    drafts = ("chain", "tree", "static")
    Config, Settings = Eagle3Config, Eagle3Settings

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.config.aux_layers

    # -- network

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.llama.rms_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embedding else None
        self.fc = nn.Linear(len(config.aux_layers) * size, size, bias=False)
        norms = len(config.aux_layers) if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(norms))
        self.input_norm = RMSNorm(len(config.aux_layers) * size, eps) if config.norm_before_fc else None
        self.layer = PairLayer(config.llama, config.norm_before_residual)
        # By the numbers that they have in files.
        later = {str(number): DecoderLayer(config.llama) for number in range(1, config.llama.num_layers)}
        self.layers = nn.ModuleDict(later)
        self.norm = RMSNorm(size, eps)
        self.add_lm_head(config, config.draft_vocab_size)
        add_rope_table(self, config.llama, config.max_position)

    def embedding(self, target: CausalLM) -> Callable[[Tensor | Sequence[int]], Tensor]:
        if self.embed_tokens is None:
            return target.embed
        weight = self.embed_tokens.weight
        return lambda ids: F.embedding(torch.as_tensor(ids, device=weight.device), weight)

    def read(self, states: Tensor) -> Tensor:
        """Join the states [.., n H] of the target's n layers to g [.., H]."""
        if len(self.fc_norm):
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        if self.input_norm is not None:
            states = self.input_norm(states)
        return self.fc(states)

    @property
    def decoder_layers(self) -> Sequence[Layer]:
        return [self.layer, *cast("Iterable[DecoderLayer]", self.layers.values())]

    def fuse(self, embeds: Tensor, states: Tensor) -> Tensor:
        """Return the first layer's input [.., 2H] of embeddings and states [.., H]; it norms both."""
        return torch.cat([embeds, states], -1)

    def read_embeds(self, embeds: Tensor) -> Tensor:
        # Once for all passes, each of which would keep the norm's input.
        return self.layer.input_layernorm(embeds)

    def pair(self, embeds: Tensor, states: Tensor) -> Pair:
        # Side by side every pass would keep them once more, and widen half precision to that of the embeddings.
        return embeds, states

    def normed(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits_input(self, hidden: Tensor) -> Tensor:
        return hidden if self.config.norm_output else self.norm(hidden)

    def logits(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return logits [.., V] of states [.., H] by the head's own lm_head; -inf for tokens that it cannot draft."""
        return self.over_target(self.lm_head(self.logits_input(hidden)))

    @property
    def output_weight(self) -> Tensor:
        return self.lm_head.weight

    # -- a new head

    @classmethod
    def new_config(cls, settings: Eagle3Settings, target: LlamaConfig) -> Eagle3Config:
        asked = DRAFT_VOCAB if settings.draft_vocab is None else settings.draft_vocab
        vocabulary = min(asked or target.vocab_size, target.vocab_size)
        layer = layer_like(target, settings.rope_theta, settings.rope == "plain")
        layer = dataclasses.replace(layer, sliding_window=settings.window or None, num_layers=settings.num_layers or 1)
        aux_layers = captured_layers(settings.layers, default_layers(target.num_layers), target)
        norms = VERSIONS[settings.version or "3-norm"]
        return Eagle3Config(layer, aux_layers, vocabulary, *norms)

    @classmethod
    def shape(cls, config: Eagle3Config) -> Options:
        norms = config.fc_norm, config.norm_before_fc, config.norm_output
        return {
            "layers": config.aux_layers,
            "num_layers": config.llama.num_layers,
            "draft_vocab": config.draft_vocab_size if config.reduced else 0,
            "rope": rope_of(config.llama),
            "rope_theta": config.llama.rope_theta,
            "window": config.llama.sliding_window or 0,
            # An imported head may have other norms than these versions.
            "version": next((version for version, those in VERSIONS.items() if those == norms), None),
        }

    def start(self, weights: TargetWeights) -> None:
        tokens = self.d2t
        if self.config.reduced:
            tokens = draft_vocabulary(weights.token_counts(), self.config.draft_vocab_size, weights.end_ids)
        self.use_draft_vocabulary(tokens, weights.lm_head())
        # Its own logits are not scaled, as in every server.
        self.norm.weight.data.mul_(weights.logit_scale)
        self.tied_to_target = ("lm_head.weight",)

    def freeze(self, settings: Eagle3Settings) -> None:
        if self.embed_tokens is not None:
            self.embed_tokens.requires_grad_(False)
        self.lm_head.requires_grad_(settings.train_lm_head)
        if settings.train_lm_head:
            self.tied_to_target = ()

    # -- loss

    @classmethod
    def drops_unknown(cls, settings: Eagle3Settings) -> bool:
        return settings.unknown == "drop"

    @classmethod
    def loss_layers(cls, config: Eagle3Config, num_layers: int) -> tuple[int, ...]:
        """Return its layers and, last, the final state, which gives the target's distributions."""
        return (*config.aux_layers, final_state(num_layers))

    def loss_memory(
        self, settings: Eagle3Settings, parts: DocumentParts, share: float, width: int
    ) -> tuple[float, float]:
        llama, size, window = self.config.llama, self.config.hidden_size, self.config.llama.sliding_window
        queries, keys, count = llama.num_heads * llama.head_dim, llama.num_kv_heads * llama.head_dim, llama.num_layers
        # A norm keeps its input and the normalized one, a product its input.
        norm, rows = 4 + width, sum(stop - start for start, stop, _ in parts)
        earlier = sum(min(start, count * window if window else start) for start, _, _ in parts)
        once = norm * len(self.config.aux_layers) * size + (8 + 4 * share) * size
        layer: float = width * (size + 3 * queries + 2 * keys + 4 * llama.intermediate_size + 2 * llama.head_dim)
        layer += (2 * norm + width) * size
        # The first layer reads embeddings too. Some rows give logits.
        layers = count * layer + width * size + share * (norm + 4) * size
        # Besides, gradients of the first pass's keys and values: their sum, and those of a pass.
        kept = rows * (once + settings.ttt_steps * layers + 4 * width * keys * count)
        kept += earlier * (4 * size + 6 * width * keys * count)
        return kept, share * rows
