"""MTP modules in llama.cpp: copies of targets, converted by its own converter and served, whose drafts are those of
transformers' layer, token by token. Run by `make test-engines`, by our own python.

llama.cpp pairs the first token with a state of zeros (common/speculative.cpp, `pending_h`), a row that other servers do
not have.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from llamacpp_targets import COMMON, TARGETS, convert, write_target
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from draftsmith.data.engines.process import running
from draftsmith.eval.engines.llamacpp import LlamaCppClient, ServedModels, server_words
from draftsmith.launch.export.export import run as export
from draftsmith.launch.export.settings import ExportConfig
from draftsmith.modules.drafters.mtp import MtpHead
from draftsmith.modules.drafters.settings import MtpSettings
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.heads import load_head, save_head
from draftsmith.modules.pretrained.models import load_lm

torch.set_num_threads(1)
SERVER = Path(os.environ["DRAFTSMITH_LLAMA_SERVER"])
K, NEW_TOKENS = 3, 40
DRAFTED = re.compile(r"- seq_id 0, draft candidate   0, pos +(\d+): +(\d+) ")
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32}  # fmt: skip
# The converter reads it with the family's class of tokenizers, which may add tokens.
QWEN = {**TARGETS["qwen3_5"][1], "vocab_size": 320}
TARGETS.update(
    {
        "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**QWEN, **QWEN_EXPERTS}),
        "qwen3_next": ("Qwen3NextForCausalLM", {
            **QWEN, **QWEN_EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                        "partial_rotary_factor": 0.25},
        }),
        "glm4_moe": ("Glm4MoeForCausalLM", {
            **COMMON, "vocab_size": 320, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        }),
    }
)  # fmt: skip


def drafts_by_hand(model: Any, head: MtpHead, text: list[int]) -> list[list[int]]:
    """Draft behind every prefix of a text with transformers' own layer, whole drafts again and again."""
    config = AutoConfig.for_model(**head.config.layer)
    layer = AutoModel.from_config(config, attn_implementation="eager").eval()
    layer.layers[0].load_state_dict(head.layer.state_dict())
    layer.norm.load_state_dict(head.norm.state_dict())
    embed, ids = model.get_input_embeddings(), torch.tensor(text)
    states = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    behind = torch.cat([torch.zeros_like(states[:1]), states[:-1]])  # [T, H]

    def last(ids: Tensor, behind: Tensor) -> Tensor:
        inputs = head.eh_proj(torch.cat([head.enorm(embed(ids)), head.hnorm(behind)], -1))
        return layer(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0, -1:]

    drafts = []
    for length in range(1, len(text) + 1):
        read, fed = ids[:length], behind[:length]
        for _ in range(K):
            own = last(read, fed)
            read, fed = torch.cat([read, model.lm_head(own).argmax(-1)]), torch.cat([fed, own])
        drafts.append(read[length:].tolist())
    return drafts


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next", "glm4_moe"])
@torch.no_grad()
def test_drafts_are_those_of_transformers_layer(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = write_target(family, tmp_path / "target")
    torch.manual_seed(4)
    head = MtpHead(MtpHead.new_config(MtpSettings(), Checkpoint(target).shape))
    for weight in head.parameters():
        weight.data += 0.15 * torch.randn_like(weight)
    manifest = {"target": load_lm(str(target)).info.identity, "config": {"target": str(target)}}
    save_head(tmp_path / "head", head, manifest, "")
    assert export(ExportConfig(format="mtp", head=tmp_path / "head", output=tmp_path / "copy")) == 0
    file, log = convert(SERVER.parents[1] / "converter", tmp_path / "copy", tmp_path / "copy.gguf"), tmp_path / "log"

    words = server_words(SERVER, ServedModels(file), 256, exact=True)
    words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(K), "--log-file", str(log), "--verbosity", "5"]
    words += ["--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32"]
    prompt = torch.randint(3, 90, (24,), generator=torch.Generator().manual_seed(2)).tolist()
    with running(words, {}) as url:
        answer = LlamaCppClient(url, NEW_TOKENS).complete(prompt)
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    text = [*prompt, *answer.tokens]
    firsts = model(input_ids=torch.tensor([text]), use_cache=False).logits[0].argmax(-1).tolist()
    assert firsts[len(prompt) - 1 : -1] == list(answer.tokens)

    served: list[list[int]] = []
    for place, token in DRAFTED.findall(log.read_text()):
        if place == "0":
            served.append([])
        served[-1].append(int(token))
    ours = drafts_by_hand(model, load_head(tmp_path / "head"), text)
    # Rounds follow one another: each emits what was accepted of it and one more token. Qwen3-Next's states cannot drop
    # tokens: behind a rejected draft the server restores them, reads the kept tokens again, and emits one without a
    # draft. It does not restore the state that the module's next row is paired with, so a part of the drafts differs.
    place, equal = len(prompt) + 1, 0
    for drafted in served:
        if family == "qwen3_next" and drafted != ours[place - 1][: len(drafted)]:
            place += 1
        equal += drafted == ours[place - 1][: len(drafted)]
        right = 0
        while right < len(drafted) and place + right < len(text) and text[place + right] == drafted[right]:
            right += 1
        place += right + 1
    with capsys.disabled():
        print(f"\n{family}: {equal} of {len(served)} drafts equal, {answer.accepted} tokens accepted")
    assert equal >= (0.6 if family == "qwen3_next" else 1) * len(served) and len(served) >= NEW_TOKENS // (K + 1)
