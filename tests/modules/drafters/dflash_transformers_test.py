"""A DFlash head in transformers' `generate(speculation_type="dflash")`, a decoder by others, and in ours."""

from __future__ import annotations

from typing import Any

import torch
from oracles.heads import PlainBlock
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from transformers.modeling_outputs import BaseModelOutput
from worlds import quick_block_head, run_models, tiny_llama_dir

from draftsmith.eval.check.states import answered_prompts
from draftsmith.modules.decoding.loop import generate, generate_one
from draftsmith.modules.drafters.methods import parse_method
from draftsmith.modules.formats import formats
from draftsmith.modules.pretrained.models import load_lm
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.types import SamplingParams

NEW_TOKENS = 48


class Assistant(PreTrainedModel):
    """Exported block drafter in plain torch, as `generate` calls it. Returns the states of the slots.

    calls: context rows of each call, one more than the tokens that the call before had accepted.
    """

    config_class = Qwen3Config

    def __init__(self, config: Qwen3Config, plain: PlainBlock):
        super().__init__(config)
        self.plain, self.anchor = plain, nn.Parameter(torch.zeros(1))
        self.states, self.calls = torch.zeros(0), list[int]()

    def forward(
        self, noise_embeds: Tensor, context_hidden_states: Tensor, past_key_values: Any, **_: Any
    ) -> BaseModelOutput:
        context, slots = context_hidden_states[0].double(), noise_embeds.shape[1]
        first = past_key_values.get_seq_length() == 0
        self.states = context if first else torch.cat([self.states, context])
        self.calls.append(len(context))
        rows = torch.zeros(1, 1, len(context) + slots, 1)
        for layer in range(self.config.num_hidden_layers):
            past_key_values.update(rows, rows, layer)
        (anchor,) = (self.plain.embedding.float() == noise_embeds[0, 0]).all(-1).nonzero()[0].tolist()
        return BaseModelOutput(self.plain.slots(anchor, self.states, slots)[None].float())


def test_transformers_drafts_and_accepts_as_our_chain(tmp_path):
    path = str(tiny_llama_dir(tmp_path / "target", layers=8, hidden=48))
    target = load_lm(path)
    texts = [text["input_ids"] for text in answered_prompts(path, target, target.info.max_position)]
    prompts = [text[:length] for text in texts for length in (12, 20)]
    greedy, sources = SamplingParams(), [TorchSource(0) for _ in prompts]
    answers = generate(target, None, prompts, greedy, NEW_TOKENS, sources, ())
    rows = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
    head = quick_block_head(target, rows, 60, "dflash", layers=(1, 3, 5), block=4, anchors=128)
    package = formats()["vllm", "dflash"].write(head.config, dict(head.named_parameters()), torch.float32)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    hf.generation_config.eos_token_id = None
    config = Qwen3Config(
        hidden_size=48, num_hidden_layers=1, block_size=package.config["block_size"], **package.config["dflash_config"]
    )
    accepted = 0
    for prompt in prompts:
        plain = PlainBlock(package.tensors, head.config, target.model.embed_tokens.weight, target.model.lm_head.weight)
        assistant = Assistant(config, plain)
        answer = hf.generate(
            torch.tensor([prompt]), assistant_model=assistant, speculation_type="dflash", max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )  # fmt: skip
        chain = parse_method("dflash:k=4").build(run_models(target, dflash=head, capacity=128))
        ours = generate_one(target, chain, prompt, greedy, NEW_TOKENS, TorchSource(0), ())
        assert answer[0, len(prompt) :].tolist() == ours.tokens
        # Where one token is left neither drafts.
        steps = [step for step in ours.trace.steps if step.num_drafted]
        assert assistant.calls == [len(prompt), *(1 + step.num_accepted for step in steps[:-1])]
        accepted += sum(step.num_accepted for step in steps)
    assert accepted > 10
