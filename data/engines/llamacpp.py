"""Responses from a running llama.cpp server."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from draftsmith.data.engines.openai import ServerEngine, check_sampled
from draftsmith.data.engines.server import Server
from draftsmith.data.stages import ServerConfig
from draftsmith.data.text.template import RowError
from draftsmith.data.text.turns import AnswerSettings, TargetTurn
from draftsmith.modules.pretrained.reading import misfits
from draftsmith.modules.types import InputError

DEFAULT_BINARY = Path(".engines/llamacpp/bin/llama-server")  # made by `make engines ENGINES=llamacpp`
FACTS = {"build_info": str, "default_generation_settings": {"n_ctx": int}}
REPLY = {"tokens": [int], "stop_type": str, "tokens_evaluated": int, "truncated": bool}


def server_binary(path: Path | None = None) -> Path:
    """Return llama-server: `path`, or that of `make engines` in this directory, or one on the PATH.

    Raises:
        InputError: there is none.
    """
    on_path = shutil.which("llama-server")
    binary = path or (DEFAULT_BINARY if DEFAULT_BINARY.is_file() else Path(on_path) if on_path else None)
    if binary is None or not binary.is_file():
        remedy = "Run `make engines ENGINES=llamacpp`, or pass --engine-path."
        raise InputError("engine_path", path or "none", "llama-server of llama.cpp", remedy)
    return binary.absolute()


class LlamaCppEngine(ServerEngine):
    """Requests to llama.cpp's own endpoint, which takes and returns token ids.

    Raises:
        InputError: no llama.cpp server is at the address.
    """

    def __init__(self, server: ServerConfig, settings: AnswerSettings):
        super().__init__(server, settings, "")
        # Its own endpoint lies beside /v1.
        self.connection = Server(server, "a llama.cpp server", root=True)
        facts = self.connection.json("props", FACTS)
        answered_by = {"llamacpp": facts["build_info"][:80]}
        self.identity = {"target": settings.target.identity, "answered_by": answered_by}
        served = facts["default_generation_settings"]["n_ctx"]
        self.context = min(served, self.context or served)

    def request(self, number: int, row: dict[str, Any], turn: int = 1) -> tuple[str, dict[str, Any]]:
        params = self.params
        return "completion", {
            "prompt": row["prompt_ids"],
            "n_predict": self.limit(row),
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            # In the order in which we apply them; by default there are others too.
            "samplers": ["temperature", "top_k", "top_p"],
            "seed": self.settings.row_seed(number, turn),
            "ignore_eos": self.settings.ignore_eos,
            "cache_prompt": False,
            "return_tokens": True,
        }

    def read(self, number: int, row: dict[str, Any], reply: Any) -> TargetTurn:
        for wrong, expected in misfits(reply, REPLY):
            raise RowError(f"a reply with {wrong}, expected {expected}")
        if reply["truncated"]:
            raise RowError("a prompt or answer that the server truncated; start it with a larger context")
        if reply["tokens_evaluated"] != len(row["prompt_ids"]):
            raise RowError(f"{reply['tokens_evaluated']} tokens of the prompt read, expected {len(row['prompt_ids'])}")
        ids = reply["tokens"]
        check_sampled(ids, self.limit(row), self.vocab_size)
        if not ids:
            raise RowError("an empty response")
        self.check_end(ids)
        return TargetTurn(ids, reply["stop_type"] == "eos")
