"""Answers from an OpenAI-compatible server: vLLM, SGLang, `transformers serve` or any other.

What a server samples is its own: a rebuilt shard can hold other tokens, seeds or not. Where it returns token ids they
are stored; where it returns only text, the text is tokenised again and the row is marked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.data.manifest import volatile
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    import httpx

    from draftsmith.data.progress import Advance
    from draftsmith.data.responses import ResponsesConfig
    from draftsmith.data.shards import Rows, Shard, ShardContent

RETRIED_STATUS = {408, 409, 425, 429}  # and all of 500 and above: busy, restarting, overloaded
LONGEST_WAIT_S = 60.0
SHOWN_CHARS = 200


@dataclass(frozen=True)
class ServerConfig:
    """An OpenAI-compatible server.

    Attributes:
        url: Base address with its version, such as http://127.0.0.1:8000/v1.
        model: The model's name at the server; without it, what `target` says.
        dialect: vllm sends token ids and asks for token ids; transformers (its `serve`) and openai send messages to the
            chat endpoint and get text. openai knows no top_k.
        concurrency: Requests under way at once.
        timeout_s: Longest wait for one answer, in seconds.
        retries: Further attempts after a failure, with waits that double from half a second.
        api_key_env: Name of the environment variable that holds the key, where the server wants one.
    """

    url: str = volatile("http://127.0.0.1:8000/v1")
    model: str | None = volatile(None)
    dialect: Literal["vllm", "transformers", "openai"] = "vllm"
    concurrency: int = volatile(32)
    timeout_s: float = volatile(600.0)
    retries: int = volatile(6)
    api_key_env: str = volatile("OPENAI_API_KEY")

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InputError("server.concurrency", self.concurrency, "1 or more", "Pass a positive number.")
        if not self.timeout_s > 0:
            raise InputError("server.timeout_s", self.timeout_s, "a positive number of seconds", "Raise it.")
        if self.retries < 0:
            raise InputError("server.retries", self.retries, "0 or more", "Pass a number that is not negative.")


class Unavailable(Exception):
    """The server refused for now; asking again may help."""


class ServerEngine:
    """Answers prompts through a server.

    template: hash of the chat template that the prompts were made with; messages go through the server's own.
    """

    def __init__(self, config: ResponsesConfig, template: str):
        from draftsmith.data.models import config_hash, end_tokens, load_tokenizer, model_directory, read_config
        from draftsmith.data.template import context_length, template_hash

        _need_extra()
        self.config, self.server, self.params = config, config.server, config.params
        self.tokenizer = load_tokenizer(config.target)
        directory = model_directory(config.target)
        raw = read_config(config.target)
        self.eos_ids, self.context = end_tokens(directory, raw), context_length(config.target)
        # The weights are at the server: all that is known of them is their configuration.
        self.identity = {"config": config_hash(raw)}
        self.seed = config.seed
        if self.server.dialect == "openai" and self.params.top_k:
            remedy = "Pass --top-k 0, or another --server.dialect."
            raise InputError("top_k", self.params.top_k, "0: the OpenAI protocol has no top_k", remedy)
        if self.server.dialect != "vllm" and template != template_hash(self.tokenizer):
            remedy = "Pass --server.dialect vllm, which sends token ids, or save the template with the model."
            raise InputError("chat_template", "prompts with another one than the server's", "the target's own", remedy)

    def make(self, prompts: Rows) -> Callable[[Shard, Advance], ShardContent]:
        """What makes a shard: all its rows concurrently, at most `concurrency` at once."""
        from draftsmith.data.responses import check_context, count
        from draftsmith.data.shards import ShardContent

        def make_shard(shard: Shard, advance: Advance) -> ShardContent:
            rows = prompts.read(shard.start, shard.stop)
            if self.context is not None:
                for offset, row in enumerate(rows):
                    check_context(shard.start + offset, len(row["prompt_ids"]), self.context)
            made = asyncio.run(self._answer_all(shard.start, rows, advance))
            return ShardContent(made, count(made))

        return make_shard

    async def _answer_all(self, start: int, rows: list[dict[str, Any]], advance: Advance) -> list[dict[str, Any]]:
        import httpx

        gate = asyncio.Semaphore(self.server.concurrency)
        key = os.environ.get(self.server.api_key_env)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=self.server.concurrency)

        async with httpx.AsyncClient(headers=headers, timeout=self.server.timeout_s, limits=limits) as client:

            async def one(number: int, row: dict[str, Any]) -> dict[str, Any]:
                async with gate:
                    reply = await self._ask(client, self.request(number, row))
                advance(1)
                return self.read(number, row, reply)

            tasks = [asyncio.ensure_future(one(start + i, row)) for i, row in enumerate(rows)]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # after one failure the others' answers are of no use
                    task.cancel()

    def request(self, number: int, row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Endpoint and body for one prompt."""
        params, limit = self.params, self.config.max_new_tokens
        if self.context is not None:
            limit = min(limit, self.context - len(row["prompt_ids"]))
        body: dict[str, Any] = {"model": self.server.model or self.config.target, "seed": self.row_seed(number)}
        if self.server.dialect == "vllm":
            top_k = params.top_k or -1
            body |= {"prompt": row["prompt_ids"], "max_tokens": limit, "temperature": params.temperature}
            body |= {"top_p": params.top_p, "top_k": top_k, "return_token_ids": True, "repetition_penalty": 1.0}
            return "completions", body
        body["messages"] = json.loads(row["messages"])
        if self.server.dialect == "openai":
            body |= {"max_tokens": limit, "temperature": params.temperature, "top_p": params.top_p}
            return "chat/completions", body
        # `transformers serve` samples only where the model's own generation config does, and ignores the temperature
        # otherwise; a whole generation config is the way to be obeyed.
        settings: dict[str, Any] = {"max_new_tokens": limit, "do_sample": not params.greedy}
        if not params.greedy:
            settings |= {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
        settings |= {"eos_token_id": list(self.eos_ids), "pad_token_id": self.tokenizer.pad_token_id}
        body["generation_config"] = json.dumps(settings)
        return "chat/completions", body

    def row_seed(self, number: int) -> int:
        """31 bits, of this row alone."""
        return int.from_bytes(hashlib.sha256(f"{self.seed}/{number}".encode()).digest()[:4], "big") >> 1

    def read(self, number: int, row: dict[str, Any], reply: dict[str, Any]) -> dict[str, Any]:
        """A row of responses from a server's reply.

        Raises:
            InputError: a reply of another shape, or a prompt that the server counts otherwise: another template.
        """
        try:
            choice = reply["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
            ended = choice["finish_reason"] == "stop"
            ids, usage = choice.get("token_ids"), reply.get("usage") or {}
        except (KeyError, IndexError, TypeError) as error:
            found = f"{json.dumps(reply)[:SHOWN_CHARS]}"
            raise InputError("server", found, "an OpenAI completion", "Check --server.url and dialect.") from error
        prompt, counted = row["prompt_ids"], usage.get("prompt_tokens")
        if counted is not None and counted != len(prompt):
            remedy = "Serve the same model and chat template as --target, or pass --server.dialect vllm."
            raise InputError(f"prompt {number}", f"{counted} tokens at the server", f"{len(prompt)}, as here", remedy)
        retokenised = ids is None
        if ids is None:
            ids = self.tokenizer(text or "", add_special_tokens=False)["input_ids"]
        if ended and self.eos_ids and (not ids or ids[-1] not in self.eos_ids):
            ids = [*ids, self.eos_ids[0]]
        if not ids:
            raise InputError(f"prompt {number}", "an empty answer", "at least one token", "Check the server's model.")
        return {
            "id": row["id"],
            "input_ids": prompt + ids,
            "prompt_length": len(prompt),
            "ended": ids[-1] in self.eos_ids,
            "retokenised": retokenised,
            "task": row["task"],
            "text": text,
            "server_tokens": usage.get("completion_tokens"),
        }

    async def _ask(self, client: httpx.AsyncClient, request: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        """One reply, asked for again while the server is not available."""
        import httpx
        from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt
        from tenacity import wait_random_exponential as back_off

        endpoint, body = request
        url = f"{self.server.url.rstrip('/')}/{endpoint}"
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(self.server.retries + 1),
                wait=back_off(multiplier=0.5, max=LONGEST_WAIT_S),
                retry=retry_if_exception_type((httpx.TransportError, Unavailable)),
            ):
                with attempt:
                    return _checked(await client.post(url, json=body), url)
        except RetryError as error:
            cause = error.last_attempt.exception()
            found = f"{url}: {type(cause).__name__} {str(cause)[:SHOWN_CHARS]}".strip()
            remedy = "Check that the server runs, then continue with the same command."
            raise InputError("server", found, f"an answer in {self.server.retries + 1} attempts", remedy) from error
        raise AssertionError("unreachable: the loop returns or raises")


def _checked(response: httpx.Response, url: str) -> dict[str, Any]:
    if response.status_code in RETRIED_STATUS or response.status_code >= 500:
        raise Unavailable(f"status {response.status_code}: {response.text[:SHOWN_CHARS]}")
    if response.status_code >= 400:
        found = f"{url}: status {response.status_code}, {response.text[:SHOWN_CHARS]}"
        raise InputError("server", found, "an answer", "Check --server.url, --server.model and --server.dialect.")
    try:
        return response.json()
    except ValueError as error:
        found = f"{url}: {response.text[:SHOWN_CHARS]!r}"
        raise InputError("server", found, "JSON", "Check --server.url; it ends with /v1 at most servers.") from error


def _need_extra() -> None:
    try:
        import httpx  # noqa: F401
        import tenacity  # noqa: F401
    except ImportError as error:
        remedy = "pip install 'draftsmith[serve]'"
        raise InputError("engine", f"openai without {error.name}", "the extra `serve`", remedy) from error
