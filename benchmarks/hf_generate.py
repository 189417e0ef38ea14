"""transformers' own `generate`, plain and assisted, with our counts: no code of it is ours (latency.py)."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.modules.decoding.loop import Generation
from draftsmith.modules.decoding.trace import DecodeStep, DecodeTrace
from draftsmith.modules.pretrained.checkpoint import Checkpoint
from draftsmith.modules.pretrained.models import DTYPES, load_transformers
from draftsmith.modules.targets.shape import max_position
from draftsmith.modules.types import SamplingParams

Call = tuple[int, Tensor]  # of the target: how many tokens were in its cache, and the tokens [T] that it read


@dataclass(frozen=True)
class HFRunner:
    """`generate` of one transformers model, assisted by another when `assistant` is given.

    eos_ids: tokens that end the answer; () never ends. num_assistant_tokens: most drafted tokens of a round, without a
    schedule. confidence_threshold: a round ends early after a drafted token of lower probability; 0 never.
    """

    model: Any
    params: SamplingParams
    eos_ids: Sequence[int]
    assistant: Any | None = None
    num_assistant_tokens: int = 5
    confidence_threshold: float = 0.0

    def __call__(self, prompt: Sequence[int], max_new_tokens: int, seed: int) -> Generation:
        """Generate, count target calls with a hook, and cut at the first end token before counting."""
        from transformers import GenerationConfig

        # Options of `generate`.
        params = self.params
        sampling: dict[str, Any] = {"do_sample": False}
        if not params.greedy:
            # 0 and 1 switch the filters off in transformers as here; None would bring its default top_k of 50 back.
            sampling = {"do_sample": True, "temperature": params.temperature, "top_k": params.top_k,
                        "top_p": params.top_p}  # fmt: skip
        end = {"eos_token_id": list(self.eos_ids) or None, "pad_token_id": self.eos_ids[0] if self.eos_ids else 0}
        if self.assistant is not None:
            # `generate` reads these three from the assistant, and one assistant serves all settings of a run.
            self.assistant.generation_config = GenerationConfig(
                num_assistant_tokens=self.num_assistant_tokens,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=self.confidence_threshold,
                **end,
            )
        room = min(max_new_tokens, max_position(self.model.config.get_text_config().to_dict()) - len(prompt))
        config = GenerationConfig(max_new_tokens=room, **sampling, **end)

        calls: list[Call] = []

        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            cache = kwargs.get("past_key_values")
            calls.append((int(cache.get_seq_length()) if cache is not None else 0, kwargs["input_ids"][0]))

        input_ids = torch.tensor([list(prompt)], device=self.model.device)  # [1, T]
        # A hook leaves the signature of `forward` alone. Behind a wrapper `generate` stops passing position ids.
        hook = self.model.register_forward_pre_hook(record, with_kwargs=True)
        try:
            with torch.random.fork_rng(enabled=not params.greedy):
                if not params.greedy:
                    torch.manual_seed(seed)
                output = self.model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    generation_config=config,
                    assistant_model=self.assistant,
                )
        finally:
            hook.remove()
        tokens = output[0, len(prompt) :].tolist()
        end_at = next((i for i, token in enumerate(tokens) if token in self.eos_ids), None)
        tokens = tokens if end_at is None else tokens[: end_at + 1]
        return Generation(tokens, trace_of(calls, len(prompt), tokens), end_at is not None)


def trace_of(calls: Sequence[Call], prompt_length: int, tokens: Sequence[int]) -> DecodeTrace:
    """Derive the counts of one generation from what its target calls read.

    Before the first call the prompt is known; before a later one, one token more than is cached. What was read beyond
    the known tokens was drafted; the growth of the known tokens until the next call was emitted. Assisted generation
    drafts before its first target call, so the prefill is a round like any other.

    The common beginning of a draft and of what was emitted was accepted: a rejected token is never drawn again in its
    own place, because the residual distribution gives it no mass.
    """
    known = [0, *(num_cached + 1 - prompt_length for num_cached, _ in calls[1:]), len(tokens)]
    steps = []
    for i, (num_cached, read) in enumerate(calls):
        drafted, emitted = read[prompt_length + known[i] - num_cached :].tolist(), tokens[known[i] : known[i + 1]]
        equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(drafted, emitted, strict=False))
        steps.append(DecodeStep(len(drafted), sum(1 for _ in equal), len(emitted), len(drafted)))
    return DecodeTrace(steps, prefill_calls=0)


def load_hf_model(path: str, dtype: str, device: str, trust_remote_code: bool = False) -> Any:
    """Load a transformers model without generation defaults of its own, which `generate` would apply unasked."""
    from transformers import GenerationConfig

    # Assisted generation warns about the arguments that it passes to itself.
    logging.getLogger("transformers.generation.utils").setLevel(logging.ERROR)
    wanted = "auto" if dtype == "auto" else DTYPES[dtype]
    model = load_transformers(Checkpoint(path, trust_remote_code), wanted)
    model.generation_config = GenerationConfig()
    return model.to(device).eval()
