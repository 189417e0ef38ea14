"""Client and command line of a llama.cpp server, with the rounds of its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.engines.server import Server
from draftsmith.data.settings import ServerConfig
from draftsmith.modules.types import InputError

TOKENS = {"tokens": [int]}


@dataclass(frozen=True)
class ServedModels:
    """GGUF files that a server loads. kind: llama.cpp's name of the drafter's method, such as draft-eagle3."""

    target: Path
    drafter: Path | None = None
    kind: str = ""


@dataclass(frozen=True)
class Round:
    """Drafted and accepted tokens of one call of the target after a draft."""

    drafted: int
    accepted: int


@dataclass(frozen=True)
class ServerAnswer:
    """Answer to one prompt: its tokens, its rounds, and the seconds of reading the prompt and of generating.

    unsent: tokens that end inside of a character, as those of an emoji do. llama.cpp streams no event for them: their
    ids are not among `tokens`, and rounds that emitted only such tokens are counted as part of the next one.
    """

    tokens: tuple[int, ...]
    rounds: tuple[Round, ...]
    prompt_s: float
    generation_s: float
    unsent: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) + self.unsent


def server_words(
    binary: Path,
    models: ServedModels,
    context: int,
    num_drafted: int = 0,
    p_min: float = 0.0,
    slots: int = 1,
    threads: int = 1,
    exact: bool = False,
) -> list[str]:
    """Return the command of a server for measurements: no reuse of prompts, nothing fitted to free memory.

    context: longest sequence of a slot. exact: keys and values in float32 and no flash attention, for answers that
    float32 weights give elsewhere too; otherwise llama.cpp's defaults.
    """
    words = [str(binary), "--model", str(models.target), "--ctx-size", str(context * slots), "--parallel", str(slots)]
    words += ["--threads", str(threads), "--threads-batch", str(threads), "--fit", "off", "--no-warmup"]
    words += ["--no-cache-prompt", "--cache-ram", "0", "--metrics"]
    if exact:
        words += ["--flash-attn", "off", "--cache-type-k", "f32", "--cache-type-v", "f32", "--no-repack"]
    if models.drafter is not None:
        # Without --spec-type the drafter is loaded and never used, and no message says so.
        words += ["--model-draft", str(models.drafter), "--spec-type", models.kind]
        words += ["--spec-draft-n-max", str(num_drafted), "--spec-draft-p-min", str(p_min)]
        if exact:
            words += ["--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32"]
    return words


class LlamaCppClient:
    """Client of a running server that sends token ids and receives token ids. url: such as http://127.0.0.1:8080."""

    def __init__(self, url: str, max_new_tokens: int, temperature: float = 0.0):
        self._server = Server(ServerConfig(url=url), "a llama.cpp server")
        self.url, self.max_new_tokens, self.temperature = self._server.url, max_new_tokens, temperature

    def complete(self, prompt: Sequence[int], seed: int = 0) -> ServerAnswer:
        """Ask for the answer to a prompt, with nothing but the temperature in the sampler.

        Raises:
            InputError: no whole answer, or counts that fit no rounds.
        """
        tokens: list[int] = []
        rounds: list[Round] = []
        drafted = accepted = 0
        timings: dict[str, Any] = {}
        body = self._request(prompt, seed) | {"stream": True, "timings_per_token": True}
        for event in self._server.events("completion", body):
            tokens += event.get("tokens") or []
            timings = event.get("timings") or timings
            # The counts of a round are raised before its first token is sent.
            step = Round(timings.get("draft_n", 0) - drafted, timings.get("draft_n_accepted", 0) - accepted)
            if step.drafted:
                rounds.append(step)
                drafted, accepted = drafted + step.drafted, accepted + step.accepted
        if not timings or not all(0 <= one.accepted <= one.drafted for one in rounds):
            raise InputError("server", f"{self.url}: counts {timings}", "those of a whole answer", "Read its log.")
        seconds = timings["prompt_ms"] / 1e3, timings.get("predicted_ms", 0.0) / 1e3
        return ServerAnswer(
            tuple(tokens), tuple(rounds), *seconds, timings.get("predicted_n", len(tokens)) - len(tokens)
        )

    def tokens_of(self, prompt: Sequence[int], seed: int = 0) -> tuple[int, ...]:
        """Return all tokens of the answer to a prompt, also those that are not streamed."""
        return tuple(self._server.json("completion", TOKENS, self._request(prompt, seed))["tokens"])

    def tokenize(self, text: str) -> list[int]:
        """Return the server's token ids of a text, special tokens in it included."""
        body = {"content": text, "add_special": False, "parse_special": True}
        return list(self._server.json("tokenize", TOKENS, body)["tokens"])

    def build(self) -> str:
        """Return the server's version."""
        return str(self._server.json("props", {}).get("build_info", "?"))[:80]

    def apply_template(self, text: str) -> str:
        """Return a question as the server's chat template writes it."""
        body = {"messages": [{"role": "user", "content": text}]}
        return str(self._server.json("apply-template", {"prompt": str}, body)["prompt"])

    def _request(self, prompt: Sequence[int], seed: int) -> dict[str, Any]:
        """Return the body of a request for an answer."""
        return {
            "prompt": list(prompt),
            "n_predict": self.max_new_tokens,
            "temperature": self.temperature,
            # Without this list: top-k, top-p and min-p too.
            "samplers": ["temperature"],
            "seed": seed,
            "cache_prompt": False,
            "return_tokens": True,
        }
