"""A server that speaks what a vLLM server with our connector speaks, with our own engine behind it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from servers import Request, Server

from draftsmith.data.engines.own import generate_all
from draftsmith.data.store import feature_codec
from draftsmith.data.store.spool import SpoolWriter, row_name
from draftsmith.modules.types import SamplingParams


class StatesServer(Server):
    """Serves states of rows.

    stored: row name -> states [T, F] to serve as they are. on_row: called with each row before its reply; what it
    raises breaks the connection.
    """

    def __init__(
        self,
        lm: Any,
        layers: tuple[int, ...],
        directory: Path,
        stored: Mapping[str, torch.Tensor] | None = None,
        on_row: Callable[[list[int]], None] = lambda row: None,
        connector: bool = True,
        max_logprobs: int = 2**20,
        max_model_len: int | None = None,
    ):
        super().__init__(self.respond)
        self.lm, self.layers, self.stored, self.on_row, self.connector = lm, layers, stored or {}, on_row, connector
        self.max_logprobs, self.max_model_len = max_logprobs, max_model_len
        self.directory, self.writer = directory, SpoolWriter(directory, print)
        self.lock, self.rows = threading.Lock(), list[str]()
        self.model = "served"  # that its replies are of

    def states(self, row: list[int]) -> torch.Tensor:
        known = self.stored.get(row_name(row))
        return self.lm.features(torch.tensor([row]), aux_layers=self.layers)[0] if known is None else known

    def respond(self, request: Request) -> Any:
        try:
            return self.reply(request.path, request.body)
        except ValueError as error:
            return 400, {}, str(error)

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/version":
            return {"version": "0.32.0"}
        if path == "/v1/models":
            return {"data": [{"id": "served", **({"max_model_len": self.max_model_len} if self.max_model_len else {})}]}
        row = body["prompt"]
        if self.max_model_len and len(row) + body["max_tokens"] > self.max_model_len:
            raise ValueError(f"{len(row)} tokens and {body['max_tokens']} to come, more than {self.max_model_len}")
        self.on_row(row)
        if "kv_transfer_params" not in body:
            return {"choices": [self.choice(row, body)], "model": self.model}
        if not self.connector:
            return {"choices": []}
        layers = list(self.layers) or [self.lm.info.num_layers + 1]
        own = {"row": row_name(row), "directory": str(self.directory), "layers": layers}
        said: dict[str, Any] = {"kv_transfer_params": own}
        params = body["kv_transfer_params"]
        if params["only_ask"]:
            return said
        with self.lock:
            self.rows.append(row_name(row))
            states = self.states(row)
            stored = feature_codec.encode(states, "bf16") if not params["unrounded"] else {"": states}
            encoded = stored if "norm" in params else {"": self.before_norm(states)}
            if "prompt_logprobs" in body:
                said["choices"] = [{"prompt_logprobs": [None, *self.log_probs(row, body["prompt_logprobs"])]}]
        assert params.get("norm", "rms") == "rms"
        self.writer.put(params["spool"], row_name(row), encoded, lambda: None)
        return said

    def choice(self, row: list[int], body: dict[str, Any]) -> dict[str, Any]:
        """Reply as any vLLM server: with log-probabilities of the prompt, or a greedy answer to it."""
        if "prompt_logprobs" in body:
            return {"prompt_logprobs": [None, *self.log_probs(row, body["prompt_logprobs"])]}
        ends = () if body["ignore_eos"] else self.lm.info.eos_ids
        (tokens,) = generate_all(self.lm, [row], SamplingParams(), body["max_tokens"], 1, eos_ids=ends)
        ended = tokens[-1] in ends
        return {"finish_reason": "stop" if ended else "length", "text": "", "token_ids": tokens}

    def before_norm(self, states: torch.Tensor) -> torch.Tensor:
        """Put a state that the final norm maps to the last one of states [T, F] in its place."""
        weights = self.lm.model.named_parameters()
        weight = next(own for name, own in weights if name.endswith("norm.weight") and "layers" not in name)
        return torch.cat([states[:, : -len(weight)], states[:, -len(weight) :] / weight], -1)

    def log_probs(self, row: list[int], top: int) -> list[dict[str, dict[str, float]]]:
        if not top <= self.max_logprobs:
            raise ValueError(f"Requested prompt logprobs of {top}, which is greater than max allowed")
        logits = self.lm.lm_head(self.lm.features(torch.tensor([row]))[0, :-1])
        return [
            {
                str(token): {"logprob": place[token].item()}
                for token in {*place.topk(len(place) if top < 0 else top).indices.tolist(), following}
            }
            for place, following in zip(logits.log_softmax(-1), row[1:], strict=True)
        ]
