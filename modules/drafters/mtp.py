"""MTP module: the multi-token-prediction layer that ships with a target (DeepSeek-V3, section 2.2; Qwen3-Next), trained
on drafts as EAGLE-3 is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from draftsmith.modules.drafters.base import DocumentParts, TargetWeights
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.drafters.unrolled import UnrolledHead
from draftsmith.modules.layers import Layer
from draftsmith.modules.llama_config import PLAIN, LlamaConfig, LlamaHeadConfig, RopeScaling, layers_of
from draftsmith.modules.targets.native import NativeLayer, layer_settings, native_layer, native_sizes
from draftsmith.modules.targets.shape import TargetShape
from draftsmith.modules.types import InputError

# Families whose modules servers draft with, by the type of their text model: the layer of the module among the kinds of
# layers that the family has. Sources: vLLM 0.33 (qwen3_next_mtp.py, qwen3_5_mtp.py, glm4_moe_mtp.py, deepseek_mtp.py,
# mimo_v2_mtp.py) and SGLang 0.5.23, which agree.
LAYERS: Mapping[str, Mapping[str, object]] = {
    "qwen3_next": {"layer_types": ["full_attention"], "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen3_5_text": {"layer_types": ["full_attention"]},
    "qwen3_5_moe_text": {"layer_types": ["full_attention"]},
    "glm4_moe": {"first_k_dense_replace": 0},
    "deepseek_v3": {"first_k_dense_replace": 0},
    "mimo_v2_flash": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
}


@dataclass(frozen=True)
class MtpConfig(LlamaHeadConfig):
    """Config of an MTP module.

    llama: sizes, with the heads of its attention. layer: settings of its decoder layer (`targets.native`).
    """

    layer: dict
    windowed = True


class MtpHead(UnrolledHead[MtpConfig, MtpSettings]):
    """MTP module: it reads the target's final state and then its own, through one decoder layer of the target's own
    kind. Embedding and lm_head are the target's and not in this directory.

    Network h_t = norm(layer(eh_proj([enorm(embed(x_{t+1})); hnorm(f_t)]))), whose lm_head, the target's, predicts
    x_{t+2}. Later in a draft h takes the place of f: one module drafts all tokens, as servers run it.
    """

    kind, title = "mtp", "MTP module"
    drafts = ("chain", "tree", "static")
    Config, Settings = MtpConfig, MtpSettings
    own_layer: ClassVar[bool] = True
    # Experts are chosen on the host.
    recurs: ClassVar[bool] = False

    # -- network

    def __init__(self, config: MtpConfig):
        super().__init__()
        self.config = config
        size = config.hidden_size
        # The norms are those of the architecture: their gain is w, or 1 + w.
        native = native_layer(config.layer, config.max_position)
        self.layer, self.norm = native.layer.layer, native.norm
        self.register_buffer("cos", native.cos, persistent=False)
        self.register_buffer("sin", native.sin, persistent=False)
        self.enorm, self.hnorm = copy.deepcopy(self.norm), copy.deepcopy(self.norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)

    @property
    def decoder_layers(self) -> Sequence[Layer]:
        return [NativeLayer(self.layer)]

    @property
    def rotary_tables(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin

    def fuse(self, embeds: Tensor, states: Tensor) -> Tensor:
        return self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(states)], -1))

    def normed(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    # -- a new head

    @classmethod
    def new_config(cls, settings: MtpSettings, target: LlamaConfig) -> MtpConfig:
        text = target.text if isinstance(target, TargetShape) else {}
        if text.get("model_type") not in LAYERS:
            expected = f"one of {', '.join(LAYERS)}, whose MTP modules servers draft with"
            raise InputError("target", text.get("model_type", "a nameless family"), expected, "Train an eagle3 head.")
        layer = layer_settings(text, LAYERS[text["model_type"]])
        changes = PLAIN | native_sizes(layer) | {"rope_scaling": RopeScaling()}
        return MtpConfig(layers_of(target, num_layers=1, **changes), layer)

    def start(self, weights: TargetWeights) -> None:
        """Begin as the module that the target's files hold, if they hold one.

        Raises:
            InputError: it is another module than the target's settings describe.
        """
        if not (state := weights.mtp()):
            return
        try:
            self.load_state_dict(state)
            self.trained = True
        except RuntimeError as error:
            # torch says in many lines which parts are missing, unknown or of another shape.
            found = " ".join(str(error).partition(":")[2].split())[:300]
            remedy = "Correct the checkpoint, or train from a head with --init."
            found = f"an MTP module with {found}"
            raise InputError("target", found, "the one that config.json describes", remedy) from error

    # -- loss

    def loss_memory(self, settings: MtpSettings, parts: DocumentParts, share: float, width: int) -> tuple[float, float]:
        kept, predictions = super().loss_memory(settings, parts, share, width)
        inner = self.config.layer.get("moe_intermediate_size", 0) * self.config.layer.get("num_experts_per_tok", 0)
        rows = sum(stop - start for start, stop, _ in parts)
        # Of each chosen expert its gate, its up projection and their product.
        return kept + width * 3 * inner * rows * settings.ttt_steps, predictions
