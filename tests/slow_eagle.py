"""Greedy EAGLE decoding at its plainest: an exported directory, transformers' target and layers, no code of ours.

No cache and no tree: every round reads everything again. It is what the decoder's tau is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


@dataclass
class Counts:
    """Over prompts: emitted tokens, and target calls with the prefill."""

    tokens: int = 0
    target_calls: int = 0

    @property
    def tau(self) -> float:
        return self.tokens / self.target_calls


class SlowEagle:
    """A target by transformers, and an EAGLE-1 head in the layout of vLLM and SafeAILab (without biases)."""

    def __init__(self, target: str | Path, head: str | Path):
        self.target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        config = AutoConfig.from_pretrained(head)
        config._attn_implementation = "eager"
        self.rope = LlamaRotaryEmbedding(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(LlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()
        state = load_file(Path(head) / "model.safetensors")
        own = nn.ModuleDict({"fc": self.fc, "layers": self.layers})
        own.load_state_dict(state, strict=True)

    def head(self, ids: Tensor, features: Tensor) -> Tensor:
        """ids [T], the token after each feature; features [T, H] -> hidden states [T, H]."""
        embeds = self.target.get_input_embeddings()(ids)
        x = self.fc(torch.cat([embeds, features], -1))[None]
        length = x.shape[1]
        rotary = self.rope(x, torch.arange(length)[None])
        mask = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)[None, None]
        for layer in self.layers:
            x = layer(x, attention_mask=mask, position_embeddings=rotary)
        return x[0]

    def read(self, ids: list[int]) -> tuple[Tensor, list[int]]:
        """Features [T, H] after the final norm, and the target's greedy choice after each token."""
        features = self.target.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        return features, self.target.get_output_embeddings()(features).argmax(-1).tolist()

    @torch.no_grad()
    def decode(self, prompt: list[int], k: int, max_new_tokens: int, eos: set[int], counts: Counts) -> list[int]:
        """The answer, with its end token; `counts` goes up by what it cost."""
        features, choices = self.read(prompt)
        calls, answer = 1, [choices[-1]]
        while len(answer) < max_new_tokens and not eos & set(answer):
            drafted = self.draft([*prompt, *answer], features, k)
            features, choices = self.read([*prompt, *answer, *drafted])
            calls += 1
            known = len(prompt) + len(answer)
            accepted = 0
            while accepted < k and drafted[accepted] == choices[known - 1 + accepted]:
                accepted += 1
            answer += [*drafted[:accepted], choices[known - 1 + accepted]]
            features = features[: known + accepted]
        ends = [i for i, token in enumerate(answer) if token in eos]
        answer = answer[: min([max_new_tokens, *(i + 1 for i in ends)])]
        counts.tokens += len(answer)
        counts.target_calls += calls
        return answer

    def draft(self, ids: list[int], features: Tensor, k: int) -> list[int]:
        """features: true ones of all tokens but the last."""
        drafted: list[int] = []
        for _ in range(k):
            fed = torch.tensor([*ids[1:], *drafted])
            hidden = self.head(fed, features)
            drafted.append(int(self.target.get_output_embeddings()(hidden[-1]).argmax()))
            features = torch.cat([features, hidden[-1:]])
        return drafted
