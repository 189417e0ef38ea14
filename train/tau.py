"""Tau of a drafter in training: emitted tokens per target call, by real decoding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from draftsmith.data.store.manifest import open_artifact
from draftsmith.data.store.rows import Rows
from draftsmith.data.text.answers import spans
from draftsmith.data.text.template import prompt_ids
from draftsmith.modules.decoding.loop import DecodeOptions, generate_one
from draftsmith.modules.decoding.stop import FixedLengthStop
from draftsmith.modules.drafters.base import DraftHead
from draftsmith.modules.drafters.net import ChainDrafter
from draftsmith.modules.pretrained.hub import EMBEDDED, resolve_model
from draftsmith.modules.pretrained.models import vocabulary_size
from draftsmith.modules.pretrained.tokenizers import load_tokenizer, text_identity
from draftsmith.modules.sampling import TorchSource
from draftsmith.modules.targets.base import CausalLM
from draftsmith.modules.types import SamplingParams
from draftsmith.train.config import TrainDrafterConfig
from draftsmith.train.data import HeadDataModule, Samples
from draftsmith.train.metrics import num_ranks, rank, say_on_rank_zero, sum_over_ranks

GENERAL = f"{EMBEDDED}chat-prompts"


class TauProbe:
    """Measures tau by greedy chain decoding of prompts, on all ranks, at validations; tau then picks best/.

    Beside it stands `tau_general`, on general prompts that ship: tau on held-out training data does not predict other
    text.

    measured: description of the measurement, for the log.
    """

    monitor = "tau"

    def __init__(
        self,
        target: CausalLM,
        prompts: Sequence[Sequence[int]],
        config: TrainDrafterConfig,
        every: int,
        general: Sequence[Sequence[int]] = (),
    ):
        """prompts, general: the same on every rank; each rank decodes its share. every: steps between measurements."""
        self.target, self.prompts, self.every, self.general = target, prompts, every, general
        self.k, self.max_new_tokens = config.tau_k, config.tau_max_new_tokens
        lengths = sorted(map(len, prompts))
        sizes = f"{lengths[0]:,}" if lengths[0] == lengths[-1] else f"{lengths[0]:,} to {lengths[-1]:,}"
        answers = f"{self.max_new_tokens} each, end tokens ignored, chains of {self.k}"
        shipped = f", tau_general on {len(general)} that ship" if general else ""
        self.measured = f"tau on {len(prompts)} prompt(s) of {sizes} tokens{shipped}, {answers}"

    def __call__(self, head: DraftHead, device: torch.device) -> dict[str, float]:
        """Return tau over all prompts of all ranks, tau_general, and the share of tau's tokens behind an end token.

        device: that ranks communicate through.
        """
        tau, behind = self._decode(head, self.prompts, device)
        general, _ = self._decode(head, self.general, device)
        measured = {"tau": tau, "tau_general": general, "tau_behind_end": behind}
        return {name: value for name, value in measured.items() if value is not None}

    def _decode(
        self, head: DraftHead, prompts: Sequence[Sequence[int]], device: torch.device
    ) -> tuple[float | None, float | None]:
        """Decode these prompts: return tau, and the share of the tokens behind an end token; None without prompts."""
        if not prompts:
            return None, None
        target = self.target
        counts = torch.zeros(3, dtype=torch.float64)
        own = prompts[rank() :: num_ranks()]
        with torch.autocast(target.device.type, enabled=False):
            # One drafter and session for all prompts: capturing their CUDA graphs takes longer than an answer.
            capacity = max(map(len, own), default=0) + self.max_new_tokens + self.k + 2
            drafter = ChainDrafter(head.net(target), [FixedLengthStop(self.k)], capacity)
            setup = DecodeOptions(session=target.session(1, capacity, head.aux_layers), max_nodes=self.k)
            for prompt in own:
                done = generate_one(
                    target, drafter, prompt, SamplingParams(), self.max_new_tokens, TorchSource(0), (), setup
                )
                tokens, trace = done.tokens, done.trace
                first_end = next((i for i, token in enumerate(tokens) if token in target.info.eos_ids), len(tokens) - 1)
                behind = len(tokens) - 1 - first_end
                counts += torch.tensor([trace.num_tokens, trace.num_target_calls, behind], dtype=torch.float64)
        emitted, calls, behind = sum_over_ranks(counts.to(device)).tolist()
        return emitted / calls, behind / emitted


def tau_probe(config: TrainDrafterConfig, target: CausalLM, data: HeadDataModule, context: int) -> TauProbe | None:
    """Return the probe of a training, or None without prompts.

    Raises:
        InputError: as `probe_prompts`.
    """
    prompts = probe_prompts(config, data.val, context)
    every = config.tau_every or config.val_every or data.order.steps_per_epoch
    return TauProbe(target, prompts, config, every, general_prompts(config, context)) if prompts else None


def probe_prompts(config: TrainDrafterConfig, val: Samples, context: int) -> list[list[int]]:
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
        manifest = open_artifact(config.tau_data, "prompts", text_identity(config.target))
        rows = Rows(config.tau_data, manifest, ["prompt_ids"], vocab_size=vocabulary_size(config.target))
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


def general_prompts(config: TrainDrafterConfig, context: int) -> list[list[int]]:
    """Return the general prompts that ship (chat, code, maths; those not for tests), as the target's template has them.

    Return [] if --tau-data is given, the target has no chat template (logged), or it is an embedded model.
    """
    if not config.tau_prompts or config.tau_data is not None or config.target.startswith(EMBEDDED):
        return []
    tokenizer = load_tokenizer(config.target)
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
    texts = list(samples.dataset.whole_texts(samples.indices))
    begins: dict[int, list[int]] = {}
    for more in itertools.count():
        for i in range(len(texts)) if more == 0 else list(begins):
            ids, mask = texts[i]
            starts = begins.setdefault(i, [start for start, _ in spans(mask) if start > 0])
            if more < len(starts):
                yield ids[: starts[(i + more) % len(starts)]].tolist()
        begins = {i: starts for i, starts in begins.items() if more + 1 < len(starts)}
        if not begins:
            return
