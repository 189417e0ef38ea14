"""What gives the hidden states that a head reads, and real text of it to try the head on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from draftsmith.data.engines.own import generate_all
from draftsmith.data.heads.frozen_drafter import FrozenDrafter, load_drafter
from draftsmith.data.models.loading import load_lm, load_tokenizer, read_config
from draftsmith.data.text.template import RowError, prompt_ids
from draftsmith.modules.acceptance.head import Feature, feature_value
from draftsmith.modules.decoding.confidence import confidences_of
from draftsmith.modules.engine.cache import NoCache
from draftsmith.modules.formats.base import HeadFormat, Probe, Reading, TargetFacts, Trial
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.targets.hf import HFLM
from draftsmith.modules.targets.llama import LlamaLM
from draftsmith.modules.types import InputError, SamplingParams

# Editing tasks, which any model can do and answers at some length: a head shows what it is worth on its target's text.
PROMPTS = (
    """Remove the type hints:

def total(prices: list[float], rate: float = 0.2) -> float:
    subtotal = sum(prices)
    if rate < 0:
        raise ValueError("the rate must not be negative")
    return subtotal * (1 + rate)""",
    """Rename items to records:

def first_match(items, wanted):
    for number, item in enumerate(items):
        if item.name == wanted:
            return number
    return len(items)""",
    """Add the docstring: Close the file and forget its path.

def close(self):
    if self._file is not None:
        self._file.close()
    self._file = None
    self.path = None""",
)
MAX_NEW_TOKENS = 80
DEPTHS = 8


@dataclass(frozen=True)
class StateSource:
    """What gives the hidden states that a head reads.

    path: of the model. drafter: that model, with a drafting head on it where a predictor reads that one's states.
    facts: of the model. head_path: of the drafting head.
    """

    path: str
    drafter: FrozenDrafter
    facts: TargetFacts
    head_path: str | None = None


def state_source(format: HeadFormat, target: str | None, draft: str | Path | None, loading: Any) -> StateSource:
    """What a head of this format reads: a drafter the target; a predictor the draft, which is a model, or the directory
    of a drafting head for the target. loading: how, as arguments of `load_lm`.

    Raises:
        InputError: a model that is needed was not given.
    """

    def load(path: str) -> CausalLM:
        return load_lm(path, **loading)

    def target_path() -> str:
        if target is None:
            raise InputError("target", "none", "the target", "Pass --target.")
        return target

    if not format.predicts:
        lm = load(target_path())
        return StateSource(target_path(), FrozenDrafter(lm, lm.info.identity), facts_of(target_path(), lm))
    if draft is None:
        whose = "the draft model whose hidden states the head reads"
        raise InputError("draft", "none", whose, "Pass --draft.")
    drafter = load_drafter(draft, lambda: load(target_path()), load)
    path, head_path = (str(draft), None) if drafter.head is None else (target_path(), str(draft))
    return StateSource(path, drafter, facts_of(path, drafter.lm), head_path)


def facts_of(path: str, lm: CausalLM) -> TargetFacts:
    """What the public formats need to know of a loaded model. path: what `lm` was loaded from.

    The tables are the model's own weights in the dtype it was loaded in, as other systems read them from its files, and
    not what `lm.embed` makes of them; on the CPU.
    """
    assert not lm.packed, "packed models have given their tables up"
    model = cast(Any, lm).model  # a LlamaModel, or one of transformers
    if hasattr(model, "get_output_embeddings"):
        embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    else:
        embed, head = model.embed_tokens, model.lm_head
    return TargetFacts(read_config(path), embed.weight.detach().cpu(), head.weight.detach().cpu())


def make_trial(format: HeadFormat, source: StateSource, head: Any, reading: Reading) -> Trial:
    """Text that the model itself wrote, for what a format compares. head: one of ours. reading: the system's."""
    longest, lm = source.drafter.max_position, source.drafter.lm
    if format.predicts:
        return Trial(source.facts, inputs=predictor_inputs(make_probes(source.path, lm, longest), source))
    longest = min(head.config.max_position, longest) - format.probe_room
    layers = format.layers(reading, head, lm.info.num_layers)
    return Trial(source.facts, make_probes(source.path, lm, longest, layers))


def predictor_inputs(probes: Sequence[Probe], source: StateSource) -> dict[str, Tensor]:
    """All that a predictor may read of the N tokens of the answers, name -> [N, size] in float32 by the names of
    `formats.acceptance.inputs_of`: each token as the first one of a draft.

    Places in the draft are counted from 1 to DEPTHS and again, as no draft was made.
    """
    lm, branches, parts = source.drafter.lm, source.drafter.branches(1), list[tuple[Tensor, Tensor, Tensor]]()
    for probe in probes:
        ids = probe.ids.to(lm.device)
        starts = list(range(max(probe.start, branches.min_start), len(ids)))
        branches.open(ids.tolist(), source.drafter.features(ids.tolist()))
        before, after = branches.states(starts, ids[starts, None]).unbind(1)
        parts.append((before, after, ids[starts]))
    before, after, ids = (torch.cat(part) for part in zip(*parts, strict=True))
    depth = torch.arange(len(ids), device=lm.device) % DEPTHS + 1
    known = confidences_of(branches.lm_head(before).float().softmax(-1), ids, depth, torch.ones_like(depth))
    # What the texts repeat does not matter: any numbers will do that a head may meet.
    known = dataclasses.replace(known, repeat=(ids % 5 - 2).float(), repeat_mean=(ids % 7 - 3).float())
    states = {"state_before": before, "state_after": after, "embedding": branches.embed(ids)}
    numbers = {name: feature_value(name, known)[:, None] for name in get_args(Feature)}
    return {name: values.float().cpu() for name, values in (states | numbers).items()}


@torch.inference_mode()
def make_probes(path: str, lm: CausalLM, longest: int, layers: tuple[int, ...] = ()) -> list[Probe]:
    """path: of the model, for its tokenizer. longest: most tokens of a probe, so that a head has positions for it.
    layers: ascending, those whose states are asked for."""
    longest = min(longest, lm.info.max_position)
    room = min(MAX_NEW_TOKENS, longest // 2)
    prompts = [ids[: longest - room] for ids in encoded(load_tokenizer(path), PROMPTS)]
    answers = generate_all(lm, prompts, SamplingParams(), room, len(prompts))
    probes = []
    for prompt, reply in zip(prompts, answers, strict=True):
        ids = torch.tensor([*prompt, *reply])
        features = lm.features(ids[None].to(lm.device))[0]
        choices = lm.lm_head(features).argmax(-1).cpu()
        states: dict[int, Tensor] = {}
        if layers:
            parts = lm.features(ids[None].to(lm.device), capture=layers)[0].float().cpu().chunk(len(layers), -1)
            states = dict(zip(layers, parts, strict=True))
        probes.append(Probe(ids, len(prompt), choices, features.float().cpu(), before_final_norm(lm, ids), states))
    return probes


def encoded(tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids, by the chat template where there is one: that is the text the model is served on."""
    if tokenizer.chat_template:
        try:
            return [prompt_ids(tokenizer, [{"role": "user", "content": text}]) for text in prompts]
        except RowError as error:
            found = f"an error on a plain question ({error})"
            raise InputError("chat_template", found, "a working template", "Save one that works.") from error
    return [list(tokenizer(text)["input_ids"]) for text in prompts]


def before_final_norm(lm: CausalLM, ids: Tensor) -> Tensor | None:
    """Hidden states [T, H] that the final norm reads: what a head must NOT be fed."""
    batch = ids[None].to(lm.device)
    if isinstance(lm, LlamaLM):
        return lm.stack.chain(lm.embed(batch), NoCache())[0].float().cpu()
    norm = getattr(lm.model.base_model, "norm", None) if isinstance(lm, HFLM) else None
    if norm is None:
        return None
    seen: list[Tensor] = []
    hook = norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        lm.features(batch)
    finally:
        hook.remove()
    return seen[-1][0].float().cpu()
