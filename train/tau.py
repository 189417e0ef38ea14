"""tau while training: emitted tokens per target call, read off answers that the target gave once.

A greedy answer does not depend on what drafts it. So the target answers the held-out prompts when the training begins;
every validation drafts along these answers (modules/along.py) and finds the rounds that decoding would have.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from draftsmith.data.engines.own import generate_rows
from draftsmith.data.store.manifest import open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.answers import spans
from draftsmith.data.text.template import prompt_ids
from draftsmith.modules.along import Answer, TargetText, along_head, read
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.branches import as_decoding
from draftsmith.modules.pretrained.checkpoint import checkpoint_of
from draftsmith.modules.pretrained.hub import EMBEDDED, resolve_model
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.data import HeadDataModule, Samples
from draftsmith.train.metrics import num_ranks, rank, say_on_rank_zero, sum_over_ranks
from draftsmith.train.module import LitDrafter, LitHead

# Prompts of tau_general: chat, code, maths.
GENERAL = f"{EMBEDDED}chat-prompts"
GREEDY = SamplingParams()
ANSWERED_TOGETHER = 16


class TauProbe:
    """Measures tau of greedy chains along the target's answers, on all ranks, at validations; tau then picks best/.

    Beside it stands `tau_general`, on general prompts that ship: tau on held-out training data does not predict other
    text.

    measured: description of the measurement, for the log.
    """

    def __init__(
        self,
        target: CausalLM,
        prompts: Sequence[Sequence[int]],
        config: TrainDrafterConfig,
        every: int,
        general: Sequence[Sequence[int]] = (),
    ):
        """prompts, general: the same on every rank; each rank reads its share. every: steps between measurements."""
        self.target, self.every, self.k = target, every, config.tau_k
        self.counts, self._answers = (len(prompts), len(general)), config.tau_max_new_tokens
        self._prompts = [own[rank() :: num_ranks()] for own in (prompts, general)]
        self._texts: list[list[TargetText]] = []
        lengths, shipped = list(map(len, prompts)), f", tau_general on {len(general)} that ship" if general else ""
        sizes = f"{len(prompts)} prompt(s) of {min(lengths):,} to {max(lengths):,} tokens"
        answers = f"{self._answers} each, end tokens ignored, chains of {self.k}"
        self.measured = f"tau on {sizes}{shipped}, {answers}"

    def __call__(
        self, head: DraftHead, device: torch.device, before_each: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Return tau over all prompts of all ranks, tau_general, and the share of tau's tokens behind an end token.

        device: that ranks communicate through. before_each: called on all ranks before each prompt.
        """
        with as_decoding(self.target.device):
            if not self._texts:
                self._texts = [self._read(prompts, head.aux_layers) for prompts in self._prompts]
            emitted, calls, behind = self._measure(head, 0, device, before_each)
            measured = {"tau": emitted / calls, "tau_behind_end": behind / emitted}
            if self.counts[1]:
                emitted, calls, _ = self._measure(head, 1, device, before_each)
                measured["tau_general"] = emitted / calls
        return measured

    def _read(self, prompts: Sequence[Sequence[int]], layers: Sequence[int]) -> list[TargetText]:
        """Let the target answer these prompts, and read the texts with the states of these layers."""
        if not prompts:
            return []
        made = dict(generate_rows(self.target, prompts, GREEDY, self._answers, ANSWERED_TOGETHER, eos_ids=()))
        texts = []
        for number, prompt in enumerate(prompts):
            answer = Answer(len(prompt), len(prompt) + len(made[number]), len(prompt) + len(made[number]))
            seen = read(self.target, [*prompt, *made[number]], [answer], GREEDY, layers)
            states = {layer: states for layer, states in seen.states.items() if layer in (*layers, max(seen.states))}
            texts.append(dataclasses.replace(seen, states=states))
        return texts

    def _measure(
        self, head: DraftHead, group: int, device: torch.device, before_each: Callable[[], None]
    ) -> list[float]:
        """Return the emitted tokens, calls of the target, and tokens behind an end token, of one group of prompts."""
        counts = torch.zeros(3, dtype=torch.float64)
        net, longest = head.net(self.target), cast(Any, head.config).max_position
        k = min(self.k, net.longest_draft)
        along = along_head(k, net, longest, shorter=False)
        for place in range(-(-self.counts[group] // num_ranks())):
            before_each()
            if place < len(self._texts[group]):
                text = self._texts[group][place]
                ((walk,),) = along.walk(text, [k])
                answer = text.ids[walk.answer.begin :]
                ends = (i for i, token in enumerate(answer) if token in self.target.info.eos_ids)
                behind = len(answer) - 1 - next(ends, len(answer) - 1)
                counts += torch.tensor([walk.num_tokens, float(walk.calls[-1]), behind], dtype=torch.float64)
        return sum_over_ranks(counts.to(device)).tolist()


def tau_probe(module: LitHead, data: HeadDataModule) -> TauProbe | None:
    """Return the probe of a training; None for heads that do not draft, or without prompts.

    Raises:
        InputError: as `probe_prompts`.
    """
    if not isinstance(module, LitDrafter):
        return None
    config, context = module.config, min(module.target.info.max_position, cast(Any, module.head.config).max_position)
    prompts = probe_prompts(config, module.target, data.val, context)
    if not prompts:
        return None
    every = config.tau_every or config.val_every or data.order.steps_per_epoch
    probe = TauProbe(module.target, prompts, config, every, general_prompts(config, module.target, context))
    say_on_rank_zero(probe.measured)
    return probe


def probe_prompts(config: TrainDrafterConfig, target: CausalLM, val: Samples, context: int) -> list[list[int]]:
    """Return prompts to measure tau on, preferring those that leave room for an answer in the context.

    Raises:
        InputError: `tau_data` holds no prompts, or those of another tokenizer.
    """
    count = config.tau_prompts
    if not count:
        return []
    if config.tau_data is None:
        prompts = held_out_prompts(val)
    else:
        manifest = open_artifact(config.tau_data, "prompts", checkpoint_of(target).text_identity())
        rows = Rows(manifest.directory, manifest, ["prompt_ids"], vocab_size=target.info.vocab_size)
        prompts = (row["prompt_ids"] for row in rows.iterate())
    chosen: list[list[int]] = []
    tight: list[list[int]] = []
    for prompt in prompts:
        if len(prompt) <= context - config.tau_max_new_tokens:
            chosen.append(prompt)
        elif len(prompt) < context and len(tight) < count:
            tight.append(prompt)
        if len(chosen) == count:
            break
    return chosen or tight


def general_prompts(config: TrainDrafterConfig, target: CausalLM, context: int) -> list[list[int]]:
    """Return the general prompts that ship (chat, code, maths; those not for tests), as the target's template has them.

    Return [] if --tau-data is given, the target has no chat template (logged), or it is an embedded model.
    """
    if not config.tau_prompts or config.tau_data is not None or config.target.startswith(EMBEDDED):
        return []
    tokenizer = checkpoint_of(target).tokenizer
    if not tokenizer.chat_template:
        say_on_rank_zero("note: no tau_general: the target has no chat template")
        return []
    rows = (json.loads(line) for line in Path(resolve_model(GENERAL)).read_text("utf-8").splitlines())
    asked = [[{"role": "user", "content": row["prompt"]}] for row in rows if row["split"] == "dev"]
    prompts = [list(prompt_ids(tokenizer, messages)) for messages in asked]
    return [prompt for prompt in prompts if len(prompt) <= context - config.tau_max_new_tokens][: config.tau_prompts]


def held_out_prompts(samples: Samples) -> Iterator[list[int]]:
    """Yield the text before an answer of each validation text, then before the texts' other answers.

    It is the first answer of the first text, the second of the second, and so on, so that prompts are as long as
    conversations get. Texts are whole: an answer in a piece of one has lost its context.
    """
    whole = samples.dataset.whole_texts(samples.indices)
    texts = [(ids, [start for start, _ in spans(mask) if start > 0]) for ids, mask in whole]
    for more in range(max((len(starts) for _, starts in texts), default=0)):
        for i, (ids, starts) in enumerate(texts):
            if more < len(starts):
                yield ids[: starts[(i + more) % len(starts)]].tolist()
