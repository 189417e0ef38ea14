"""A target that a vLLM server runs, for commands that need its states, distributions and answers, but do not decode."""

from __future__ import annotations

import asyncio
import math
import tempfile
import uuid
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.console import log_note
from draftsmith.data.engines.openai import ServerEngine
from draftsmith.data.engines.served_proof import Recorded, check_log_probs, prove_served
from draftsmith.data.engines.vllm_states import ServedStates
from draftsmith.data.stages import ServerConfig
from draftsmith.data.store.feature_codec import decode
from draftsmith.data.text.template import RowError
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.modules.pretrained.checkpoint import Checkpoint, opened
from draftsmith.modules.pretrained.models import load_lm, load_outer
from draftsmith.modules.targets.base import CausalLM, final_state
from draftsmith.modules.targets.outer import OuterLM
from draftsmith.modules.targets.proof import TOP
from draftsmith.modules.targets.readout import Readout
from draftsmith.modules.types import InputError, SamplingParams

# Log-probabilities of a place that are asked for, if the server allows as many: 70 kB of JSON. vLLM's default is TOP.
MOST = 1024


def load_target(model: str | Checkpoint, server: str | None = None, **loading: Any) -> CausalLM:
    """Load a target, or only what surrounds its layers if a server runs it. loading: arguments of `load_lm`."""
    if server is None:
        return load_lm(model, **loading)
    return ServedLM(opened(model), server, loading["dtype"], loading["device"])


class ServedLM(OuterLM):
    """A target whose states come from a server of `draftsmith launch vllm`; any vLLM server gives its distributions.

    The final norm, lm_head and embedding are applied here, in `dtype`. The first text proves that this gives the
    server's own distributions, and those of the target's files (`prove_served`).
    """

    def __init__(self, target: Checkpoint, url: str, dtype: str, device: str):
        outer = load_outer(target, dtype, device)
        super().__init__(outer.weights, outer.info, outer.readout)
        # A folder of its own: several commands may ask one server about one head.
        self._states = ServedStates(url, Path(tempfile.gettempdir(), uuid.uuid4().hex))
        weakref.finalize(self, self._states.close)
        self._target, self._most = target, MOST
        self._norm: Readout | None = None

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers whose states the server gives, ascending."""
        return self._states.layers

    def start(self, layers: Iterable[int]) -> str:
        """Return the command that serves the states of these layers."""
        words = " ".join(map(str, sorted({*layers} - {final_state(self.info.num_layers)})))
        return f"draftsmith launch vllm --target {self._target.path}" + (f" --layers {words}" if words else "")

    def features(
        self, input_ids: Tensor, position_ids: Tensor | None = None, aux_layers: tuple[int, ...] = ()
    ) -> Tensor:
        """Return features [B, T, F] of texts [B, T] in float32 or the weights' type; no positions of their own.

        Raises:
            InputError: the server has no states, or not of these layers, or gives other distributions.
        """
        assert position_ids is None, "a server numbers positions itself"
        layers = aux_layers or (final_state(self.info.num_layers),)
        if missing := set(layers) - set(self.layers):
            found = f"a server without states of layers {', '.join(map(str, sorted(missing)))}"
            raise InputError("server", found, "those that the head reads", f"Start it: {self.start(layers)}")
        rows = input_ids.tolist()
        if self._norm is None:
            proof = prove_served(self._states, self, Recorded(rows[:1], [[False] * len(rows[0])], None), self.layers)
            # From here on as vLLM has them: not rounded to bf16.
            self._norm, self._states.readout = proof.readout, None
            log_note(str(proof))
        states = [self._read(stored, layers) for _, stored in self._states.read(rows)]
        return torch.stack(states)  # [B, T, F]

    def _read(self, stored: dict[str, Tensor], layers: Sequence[int]) -> Tensor:
        """Return states [T, F] of these layers."""
        assert self._norm is not None
        parts = dict(zip(self.layers, decode(stored).unflatten(-1, (len(self.layers), -1)).unbind(1), strict=True))
        if (final := final_state(self.info.num_layers)) in layers:
            states = parts[final].to(self.device)
            parts[final] = self._norm.normed(states, self.weights.norm, self.weights.norm_bias)
        return torch.cat([parts[layer].to(self.device, self.dtype) for layer in layers], -1)

    def logits(self, input_ids: Tensor, keep: int) -> Tensor:
        return self.lm_head(self.features(input_ids[None])[0, -keep:])

    def log_probs(self, text: Sequence[int], first: int, params: SamplingParams) -> tuple[Tensor, Tensor]:
        """Return the target's log-probabilities [N, V] of what stands at `first` and behind it in a text, at
        temperature 1, and which of them [N, V] are known whatever stands there. Others but the text's own are -inf.

        Those of the likeliest tokens are asked for: at temperature 1 the others' mass follows, with a top-k it is not
        needed. Else all are, which a server gives with `--max-logprobs -1`.

        Raises:
            InputError: the server gives fewer, of which none is known whatever stands there, or no readable ones.
        """
        uncut = params.temperature == 1 and not params.top_k and params.top_p == 1
        most = min(self._most, self.info.vocab_size)
        some = params.greedy or uncut or 0 < params.top_k <= most
        asked = most if some else self.info.vocab_size
        try:
            places = self._states.log_probs(text, most if some else -1)[first - 1 :]
            if (least := min(map(len, places))) < asked:
                found, remedy = f"{least:,} log-probabilities of a token", "Serve with a larger --max-logprobs."
                raise InputError("server", found, f"{asked:,}, as asked for", remedy)
        except InputError:
            if not some or most <= TOP:
                raise
            log_note(f"the server gives less than {most:,} log-probabilities (--max-logprobs): {TOP} are asked for")
            self._most = TOP
            return self.log_probs(text, first, params)
        check_log_probs(places, self.info.vocab_size)
        logits = torch.full((len(places), self.info.vocab_size), -math.inf, dtype=torch.float64)
        known = torch.zeros_like(logits, dtype=torch.bool)
        for row, (place, own) in enumerate(zip(places, text[first:], strict=True)):
            logits[row, list(place)] = torch.tensor(list(place.values()), dtype=torch.float64)
            # The text's own token may come in addition to the likeliest ones: it stands behind equal ones.
            known[row, sorted(sorted(place, key=own.__eq__), key=place.__getitem__, reverse=True)[:asked]] = True
        return logits.to(self.device), known.to(self.device)

    def answers(self, prompts: Sequence[Sequence[int]], params: SamplingParams, max_new_tokens: int) -> list[list[int]]:
        """Let the server answer prompts.

        Raises:
            InputError: it refuses one.
        """
        return served_answers(self._states, self._target, prompts, params, max_new_tokens)


def served_answers(
    states: ServedStates,
    target: Checkpoint,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    max_new_tokens: int,
    ignore_eos: bool = False,
) -> list[list[int]]:
    """Let the server of these states answer prompts. ignore_eos: go on behind end tokens.

    Raises:
        InputError: it refuses one.
    """
    server = ServerConfig(server=f"{states.url}/v1", server_model=states.model)
    engine = ServerEngine(server, AnswerSettings(target, params, max_new_tokens, ignore_eos, 0), "")
    if states.context is not None and engine.context is not None:
        engine.context = min(engine.context, states.context)

    async def answer(number: int) -> list[int]:
        row = {"prompt_ids": list(prompts[number])}
        reply = await engine.connection.ask(*engine.request(number, row))
        return list(engine.read(number, row, reply).tokens)

    async def answer_all() -> list[list[int]]:
        try:
            return await asyncio.gather(*map(answer, range(len(prompts))))
        finally:
            await engine.connection.close()

    try:
        return asyncio.run(answer_all())
    except RowError as error:
        raise InputError("server", str(error), "an answer", "Read the server's log.") from error
