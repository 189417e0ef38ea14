"""Client and command line of a llama.cpp server, with the rounds of its drafts."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data.engines.server import READ_LOG, Server
from draftsmith.data.stages import ServerConfig
from draftsmith.eval.engines.chain import Counted, Counts, EngineAnswer, counts_of
from draftsmith.modules.types import InputError

TOKENS = {"tokens": [int]}
EVENT = {"tokens?": ([int], None), "timings?": ({"draft_n?": int, "draft_n_accepted?": int, "predicted_n?": int}, None)}
# Tokens that the server reads at once. For targets whose memory cannot drop any token (recurrent or convolution states,
# sliding windows) it ends a part, and keeps a checkpoint, so many tokens before the end of a prompt.
BATCH, CHECKPOINTS = 2048, (516, 4)


@dataclass(frozen=True)
class ServedModels:
    """GGUF files that a server loads. kind: llama.cpp's name of the drafter's method, such as draft-eagle3."""

    target: Path
    drafter: Path | None = None
    kind: str = ""


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


def moved_states(length: int, checkpoints: bool) -> list[tuple[int, int]]:
    """Return the rows of a prompt at which EAGLE-3 in llama.cpp reads another token's state, and that token.

    The draft's row before a part of the prompt has a pointer to the state to read, which is overwritten with that of
    the part's last token before the row is computed (common/speculative.cpp, `process`). checkpoints: the target is one
    whose prompts end in parts.
    """
    rows, start = list[tuple[int, int]](), 0
    while start < length:
        ends = [length - offset for offset in CHECKPOINTS if checkpoints and length - offset > start]
        end = min(start + BATCH, length, *ends)
        rows += [(start - 1, end - 1)] if start else []
        start = end
    return rows


class LlamaCppClient:
    """Client of a running server that sends token ids and receives token ids.

    url: such as http://127.0.0.1:8080. num_drafted: tokens of a draft, where they are known. length: the longest
    sequence; 0 for unknown.
    """

    length = 0

    def __init__(self, url: str, max_new_tokens: int, temperature: float = 0.0, num_drafted: int = 0):
        self._server, self.num_drafted = Server(ServerConfig(server=url), "a llama.cpp server", root=True), num_drafted
        self.url, self.max_new_tokens, self.temperature = self._server.url, max_new_tokens, temperature

    def complete(self, prompt: Sequence[int], seed: int = 0, stop: threading.Event | None = None) -> EngineAnswer:
        """Stream the answer to a prompt, with nothing but the temperature in the sampler, and count its rounds.

        llama.cpp streams no event for tokens that end inside of a character, as those of an emoji do: they are unsent,
        and rounds that emitted only such tokens are counted as part of the next one.

        stop: once set, the answer ends where it is.

        Raises:
            InputError: no whole answer, or counts that fit no rounds.
        """
        tokens: list[int] = []
        accepted: list[int] = []
        num_drafted = num_accepted = longest = 0
        timings: dict[str, Any] = {}
        started = first = last = time.perf_counter()
        body = self._request(prompt, seed) | {"stream": True, "timings_per_token": True}
        with contextlib.closing(self._server.events("completion", body, EVENT)) as events:
            for event in events:
                last = time.perf_counter()
                first = first if timings else last
                tokens += event.get("tokens") or []
                timings = event.get("timings") or timings
                # The counts of a round are raised before its first token is sent.
                drafted = timings.get("draft_n", 0) - num_drafted
                if drafted:
                    accepted.append(timings.get("draft_n_accepted", 0) - num_accepted)
                    num_drafted, num_accepted, longest = num_drafted + drafted, sum(accepted), max(longest, drafted)
                if stop is not None and stop.is_set():
                    break
        if not timings or not all(0 <= count <= longest for count in accepted):
            raise InputError("server", f"{self.url}: counts {timings}", "those of a whole answer", READ_LOG)
        unsent = timings.get("predicted_n", len(tokens)) - len(tokens)
        counts = counts_of(accepted, longest)
        return EngineAnswer(
            tuple(tokens), counts, last - first, num_drafted, first_s=first - started, unsent=max(unsent, 0)
        )

    def counts(self) -> None:
        """Return nothing: a server's answers hold their own counts."""

    def counts_since(self, before: None, answers: Sequence[EngineAnswer], whole: int) -> Counts:
        """Return the sums of the answers' counts."""
        return Counted.of(answers).counts

    def answer(self, number: int, prompt: Sequence[int]) -> EngineAnswer:
        """Ask for the greedy answer to a prompt; its rounds are counted by place where all tokens are streamed."""
        reply = self.complete(prompt)
        if reply.unsent:
            tokens = self._server.json("completion", TOKENS, self._request(prompt, 0))["tokens"]
            return EngineAnswer(tuple(tokens), (0, reply.accepted), drafted=reply.drafted, by_place=False)
        # The answer's drafts may all have been shorter.
        places = (0,) * (1 + self.num_drafted - len(reply.counts))
        return dataclasses.replace(reply, counts=(*reply.counts, *places))

    @property
    def version(self) -> str:
        return str(self._server.json("props", {}).get("build_info", "?"))[:80]

    def templated(self, question: str) -> list[int]:
        """Return the token ids of a question by the server's own chat template and tokenizer."""
        asked = {"messages": [{"role": "user", "content": question}]}
        text = self._server.json("apply-template", {"prompt": str}, asked)["prompt"]
        body = {"content": text, "add_special": False, "parse_special": True}
        tokens: list[int] = self._server.json("tokenize", TOKENS, body)["tokens"]
        return tokens

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
