"""An OpenAI-compatible server under load: its streams, and what it counts of its drafts."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from draftsmith.data.answering.server import ServerConfig, ServerEngine, need_extra
from draftsmith.data.answering.server_answer import SHOWN_CHARS
from draftsmith.data.text.turns import AnswerSettings
from draftsmith.eval.load.requests import Arrivals, Block, Plan, Request
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    import httpx

Dialect = Literal["vllm", "openai"]
NOT_OPENAI = "top_k", "repetition_penalty", "return_token_ids", "ignore_eos"
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens)_total(?:\{.*\})? (\S+)$", re.MULTILINE)
END = "[DONE]"


class Refused(Exception):
    """No whole answer to a request: what the server said."""


@dataclass(frozen=True)
class Described:
    """What a server says of itself; `version` is empty where it does not say."""

    model: str
    version: str


class LoadedServer:
    """A running server that is asked for many answers at once.

    url: with or without /v1. prompts: token ids. dialect: openai knows no token ids in answers and no end tokens to be
    ignored; its tokens are counted by `usage`.

    Raises:
        InputError: no such server.
    """

    def __init__(self, url: str, settings: AnswerSettings, prompts: Sequence[Sequence[int]], dialect: Dialect):
        need_extra()
        self.url, self.dialect = url.rstrip("/").removesuffix("/v1"), dialect
        self._prompts = prompts
        self._key = ServerEngine(ServerConfig(url=f"{self.url}/v1"), settings, "").key
        self.about = self._describe()
        self._engine = ServerEngine(ServerConfig(url=f"{self.url}/v1", model=self.about.model), settings, "")

    def _client(self, kind: Any) -> Any:
        import httpx

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)  # a limit would hold requests back
        return kind(base_url=self.url, headers=headers, timeout=self._timeout(), limits=limits)

    def _timeout(self) -> Any:
        import httpx

        return httpx.Timeout(600.0, connect=60.0)

    def _describe(self) -> Described:
        import httpx

        with self._client(httpx.Client) as client:
            try:
                reply = client.get("/v1/models")
                model = str(reply.raise_for_status().json()["data"][0]["id"])
                version = client.get("/version")
                said = version.json().get("version", "") if version.is_success else ""
            except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
                why = f"{type(error).__name__} {str(error)[:SHOWN_CHARS]}".strip()
                expected = "an OpenAI-compatible server with a model"
                raise InputError("server", f"{self.url}: {why}", expected, "Check --server.") from error
        return Described(model, str(said))

    def body(self, request: Request) -> dict[str, Any]:
        """What is asked: a stream, by token ids."""
        _, body = self._engine.request(request.prompt, {"prompt_ids": self._prompts[request.prompt]})
        kept = {key: value for key, value in body.items() if self.dialect == "vllm" or key not in NOT_OPENAI}
        return kept | {"stream": True, "stream_options": {"include_usage": True}}

    def block(self, arrivals: Arrivals, plan: Plan) -> Block:
        """Requests at their times, each a connection of its own."""
        return asyncio.run(self._block(arrivals, plan))

    async def _block(self, arrivals: Arrivals, plan: Plan) -> Block:
        import httpx

        async with self._client(httpx.AsyncClient) as client:
            before = await counters(client)
            found = await Sender(self, client, arrivals, plan).run()
            after = await counters(client)
        found.drafts, found.accepted = (after[name] - before[name] for name in ("drafts", "accepted_tokens"))
        return found


class Sender:
    """Sends a block's requests when they are due, and waits for the answers of those that count."""

    def __init__(self, server: LoadedServer, client: httpx.AsyncClient, arrivals: Arrivals, plan: Plan):
        self._server, self._client, self._arrivals, self._plan = server, client, arrivals, plan
        self._start = time.perf_counter()
        self._made: list[Request] = []
        self._changed = asyncio.Event()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def run(self) -> Block:
        tasks: set[asyncio.Task[None]] = set()
        try:
            while self._plan.waiting:
                self._changed.clear()
                due = self._arrivals.next
                if due is not None and due <= self._now():
                    request = self._plan.request(len(self._made), self._arrivals.take(), self._now())
                    self._made.append(request)
                    task = asyncio.create_task(self._one(request))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    await asyncio.sleep(0)  # what it sends does not wait for those behind it
                    continue
                try:
                    async with asyncio.timeout(None if due is None else due - self._now()):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            ended, under_way = self._now(), list(tasks)
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
        counted = [request for request in self._made if self._plan.counts(request)]
        began = min(request.started for request in counted)
        tokens = sum(
            count
            for request in self._made
            for at, count in zip(request.times, request.counts, strict=True)
            if began < at <= ended
        )
        return Block(counted, ended - began, 0.0, tokens)

    async def _one(self, request: Request) -> None:
        import httpx

        try:
            await self._read(request)
        except (Refused, httpx.HTTPError) as error:
            request.error = f"{type(error).__name__}: {' '.join(str(error).split())}"[:SHOWN_CHARS]
        self._arrivals.finished(self._now())
        self._plan.waiting.discard(request.number)
        self._changed.set()

    async def _read(self, request: Request) -> None:
        """Fill in the answer as it comes."""
        total = 0
        async with self._client.stream("POST", "/v1/completions", json=self._server.body(request)) as response:
            if not response.is_success:
                said = (await response.aread()).decode("utf-8", "replace")
                raise Refused(f"status {response.status_code}, {said[:SHOWN_CHARS]}")
            async for event in events(response.aiter_lines()):
                at = self._now()
                if usage := event.get("usage"):
                    total = int(usage.get("completion_tokens") or 0)
                for choice in event.get("choices") or ():
                    ids, text = choice.get("token_ids") or [], choice.get("text") or ""
                    if ids or (text and not request.token_ids):
                        request.times.append(at)
                        request.counts.append(len(ids) or 1)
                        request.token_ids += ids
                        request.text += text
        if not request.times:
            raise Refused("a stream without tokens")
        if request.token_ids:
            request.text = ""
        elif total:  # it says how many there were, and not when: shared out
            pieces = len(request.times)
            request.counts = [total // pieces + (number < total % pieces) for number in range(pieces)]


async def events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The objects of a stream of server-sent events.

    Raises:
        Refused: it ends in the middle, tells of an error, or is none.
    """
    async for line in lines:
        kind, _, content = line.partition(":")
        if kind != "data":
            continue
        if content.strip() == END:
            return
        try:
            event = json.loads(content)
        except ValueError as error:
            raise Refused(f"not JSON but {content[:SHOWN_CHARS]!r}") from error
        if not isinstance(event, dict) or "error" in event:
            raise Refused(content[:SHOWN_CHARS])
        yield event
    raise Refused(f"a stream that ends without {END}")


async def counters(client: httpx.AsyncClient) -> dict[str, int]:
    """Rounds with drafts, and tokens accepted in them, that vLLM has counted; 0 where a server does not say."""
    reply = await client.get("/metrics")
    found = {"drafts": 0, "accepted_tokens": 0}
    if reply.is_success:
        for name, value in COUNTER.findall(reply.text):
            found[name] += int(float(value))
    return found
