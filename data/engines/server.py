"""Answers from an OpenAI-compatible server: vLLM, SGLang, `transformers serve` or any other.

What a server samples is its own: a rebuilt shard can hold other tokens, seeds or not. Where it returns token ids they
are stored; where it returns only text, the text is tokenised again and the row is marked. A prompt without a usable
answer ends the stage behind its shard, or is dropped and counted (`max_failed`); what was answered is kept for the next
start.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from draftsmith.data.engines.server_answer import SHOWN_CHARS, BadAnswer, Question, ReplyReader
from draftsmith.data.models.checkpoint import end_tokens
from draftsmith.data.models.hub import model_directory
from draftsmith.data.models.identity import config_hash, template_hash
from draftsmith.data.models.loading import load_tokenizer, read_config
from draftsmith.data.store.manifest import volatile
from draftsmith.data.store.reading import misfits
from draftsmith.data.text.template import context_length
from draftsmith.data.text.turns import AnswerSettings, TargetTurn
from draftsmith.modules.types import InputError, at_least

if TYPE_CHECKING:
    import httpx

RETRIED_STATUS = {408, 409, 425, 429}  # and all of 500 and above: busy, restarting, overloaded
ABOUT_ONE_PROMPT = {400, 413, 422}  # others of 400 and above are about the address, the key or the model
LONGEST_WAIT_S = 60.0
VERSION_S = 10.0
MOST_BYTES = 16 * 2**20  # of one answer, unpacked


@dataclass(frozen=True)
class ServerConfig:
    """An OpenAI-compatible server.

    Attributes:
        url: Base address with its version, such as http://127.0.0.1:8000/v1.
        model: The model's name at the server; without it, what `target` says.
        dialect: vllm sends token ids and asks for token ids; transformers (its `serve`) and openai send messages to the
            chat endpoint and get text. openai knows no top_k.
        concurrency: Requests under way at once.
        timeout_s: Longest wait for one whole answer, in seconds.
        retries: Further attempts after a failure, with waits that double from half a second, or as long as the server
            asks for (Retry-After), a minute at most.
        max_failed: Go on without an answer to so many prompts, which are dropped and counted. With more, the stage ends
            and names them; the same command asks for them again.
        api_key_env: Name of the environment variable that holds the key, where the server wants one.
    """

    url: str = volatile("http://127.0.0.1:8000/v1")
    model: str | None = volatile(None)
    dialect: Literal["vllm", "transformers", "openai"] = "vllm"
    concurrency: int = volatile(32)
    timeout_s: float = volatile(600.0)
    retries: int = volatile(6)
    max_failed: int = volatile(0)
    api_key_env: str = volatile("OPENAI_API_KEY")

    def __post_init__(self) -> None:
        for name, least in {"concurrency": 1, "retries": 0, "max_failed": 0}.items():
            at_least(f"server.{name}", getattr(self, name), least)
        if not 0 < self.timeout_s < math.inf:
            raise InputError("server.timeout_s", self.timeout_s, "a positive number of seconds", "Correct it.")
        # What is in front of an @ or behind a ? may be secret: it is neither shown here nor kept in a manifest.
        shown = re.sub(r"[?#].*$", "?***", re.sub(r"^.*@", "***@", self.url, flags=re.DOTALL), flags=re.DOTALL)
        if re.match(r"\w+://[^/?#]*@", self.url):
            remedy = "Put a key into the environment variable that --server.api-key-env names."
            raise InputError("server.url", shown, "an address without user and password", remedy)
        if not _is_address(self.url):
            raise InputError("server.url", shown, "http://HOST:PORT/v1, or https", "Correct it.")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return False
    plain = url.isprintable() and not {" ", "?", "#"} & set(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain


class Unavailable(Exception):
    """The server refused for now; asking again may help. retry_after_s: how long it asks to wait."""

    def __init__(self, what: str, retry_after_s: float = 0.0):
        super().__init__(what)
        self.retry_after_s = retry_after_s


class GaveUp(BadAnswer):
    """No answer after all attempts: the server itself is in trouble."""


class ServerEngine:
    """What is asked of a server, and what its replies say.

    template: hash of the chat template that the prompts were made with; messages go through the server's own.
    """

    def __init__(self, server: ServerConfig, settings: AnswerSettings, template: str):
        need_extra()
        self.server, self.settings, self.params = server, settings, settings.params
        self.tokenizer = load_tokenizer(settings.target)
        raw = read_config(settings.target)
        self.eos_ids = end_tokens(model_directory(settings.target), raw)
        self.context = context_length(settings.target)
        vocab_size = (raw.get("text_config") or raw).get("vocab_size") or len(self.tokenizer)
        self.reader = ReplyReader(self.tokenizer, vocab_size, self.eos_ids)
        self.key = key_of(self.server)
        self.last_failure = ""  # of an attempt that is made again
        # The weights are at the server: all that is known of them is their configuration.
        self.identity = {"config": config_hash(raw)}
        if self.server.dialect != "vllm" and settings.ignore_eos:
            remedy = "Pass --server.dialect vllm, or answer in process."
            raise InputError("ignore_eos", f"dialect {self.server.dialect}", "a server that knows it: vllm", remedy)
        if self.server.dialect == "openai" and self.params.top_k:
            remedy = "Pass --top-k 0, or another --server.dialect."
            raise InputError("top_k", self.params.top_k, "0: the OpenAI protocol has no top_k", remedy)
        if self.server.dialect != "vllm" and template != template_hash(self.tokenizer):
            remedy = "Pass --server.dialect vllm, which sends token ids, or save the template with the model."
            raise InputError("chat_template", "prompts with another one than the server's", "the target's own", remedy)

    def limit(self, row: dict[str, Any]) -> int:
        """Longest answer to this prompt, in tokens."""
        most = self.settings.max_new_tokens
        return most if self.context is None else min(most, self.context - len(row["prompt_ids"]))

    def request(self, number: int, row: dict[str, Any], turn: int = 1) -> tuple[str, dict[str, Any]]:
        """Endpoint and body for one prompt: a turn of the `number`-th conversation."""
        params, limit = self.params, self.limit(row)
        body: dict[str, Any] = {"model": self.model, "seed": self.settings.row_seed(number, turn)}
        if self.server.dialect == "vllm":
            top_k = params.top_k or -1
            body |= {"prompt": row["prompt_ids"], "max_tokens": limit, "temperature": params.temperature}
            body |= {"top_p": params.top_p, "top_k": top_k, "return_token_ids": True, "repetition_penalty": 1.0}
            body |= {"ignore_eos": True} if self.settings.ignore_eos else {}
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

    def version(self) -> str:
        """Which server it is, as it says itself: `vllm 0.32.0`; unknown where it says nothing."""
        import httpx

        root = self.server.url.rstrip("/")

        def told(url: str) -> Any:
            try:
                response, content = fetch("GET", url, VERSION_S, self.key)
                return json.loads(content) if response.is_success else None
            except (httpx.HTTPError, Unavailable, BadAnswer, ValueError, RecursionError):
                return None

        models, listed = told(f"{root}/models"), {"data": [{"owned_by": str}]}
        fits = next(misfits(models, listed), None) is None and models["data"]
        owner = one_word(models["data"][0]["owned_by"]) if fits else "unknown"
        for name in ("version", "server_info"):  # of vLLM, of SGLang
            about = told(f"{root.removesuffix('/v1')}/{name}")
            if next(misfits(about, {"version": str}), None) is None:
                return f"{owner} {one_word(about['version'])}"
        return owner

    @property
    def model(self) -> str:
        """Its name at the server."""
        return self.server.model or self.settings.target

    def read(self, number: int, row: dict[str, Any], reply: Any) -> TargetTurn:
        """An answer from a server's reply. row: what was asked. Errors as of `ReplyReader.read`."""
        asked = Question(f"prompt {number}", row["prompt_ids"], self.limit(row), self.model)
        found = self.reader.read(asked, reply)
        if self.context is not None and len(found["input_ids"]) > self.context:
            raise BadAnswer(f"{len(found['input_ids']):,} tokens with the prompt, more than the context")
        tokens, ended = found["input_ids"][found["prompt_length"] :], found["ended"] and not self.settings.ignore_eos
        return TargetTurn(tokens, ended, found["text"], found["retokenised"], found["server_tokens"])

    async def ask(self, client: httpx.AsyncClient, request: tuple[str, dict[str, Any]]) -> Any:
        """One reply, asked for again while the server is not available."""
        import httpx
        from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_attempt

        endpoint, body = request
        url = f"{self.server.url.rstrip('/')}/{endpoint}"
        try:
            async for attempt in AsyncRetrying(
                stop=stop_after_attempt(self.server.retries + 1),
                wait=wait_s(),
                retry=retry_if_exception_type((httpx.RequestError, Unavailable)),
                before_sleep=self._note_failure,
            ):
                with attempt:
                    return await self._post(client, url, body)
        except RetryError as error:
            why = f"{url}: {_failure(error.last_attempt.exception())}"
            raise GaveUp(f"{why} in {self.server.retries + 1} attempts") from error
        raise AssertionError("unreachable: the loop returns or raises")

    def _note_failure(self, state: Any) -> None:
        self.last_failure = _failure(state.outcome.exception())

    async def _post(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Any:
        """One attempt."""
        response, content = await read_whole(client, "POST", url, self.server.timeout_s, json=body)
        return _reply(response, content, url)


async def read_whole(
    client: httpx.AsyncClient, method: str, url: str, limit_s: float, **more: Any
) -> tuple[httpx.Response, bytes]:
    """A reply and all of its content. httpx's own limit is for each read: a server that drips would never reach it.

    Raises:
        httpx.HTTPError: no reply. Unavailable: it is not whole after `limit_s`. BadAnswer: it is too long.
        InputError: no name of a machine.
    """
    import httpx

    content = bytearray()
    try:
        async with asyncio.timeout(limit_s), client.stream(method, url, **more) as response:
            async for chunk in response.aiter_bytes():
                content += chunk
                if len(content) > MOST_BYTES:
                    raise BadAnswer(f"more than {MOST_BYTES:,} bytes")
    except TimeoutError as error:
        raise Unavailable(f"no whole answer in {limit_s:g} s") from error
    except (httpx.InvalidURL, UnicodeError) as error:  # what `urlsplit` takes, and no look-up of names
        raise InputError("server.url", f"{url} ({error})", "http://HOST:PORT/v1, or https", "Correct it.") from error
    return response, bytes(content)


def fetch(method: str, url: str, limit_s: float, key: str = "", **more: Any) -> tuple[httpx.Response, bytes]:
    """As `read_whole`, by a client of its own."""
    import httpx

    async def once() -> tuple[httpx.Response, bytes]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(headers=headers, timeout=limit_s) as client:
            return await read_whole(client, method, url, limit_s, **more)

    return asyncio.run(once())


def one_word(text: str) -> str:
    """Return a server's name of itself if it can be printed and stored, else `unknown`."""
    return text[:SHOWN_CHARS] if text.isprintable() else "unknown"


def _failure(error: BaseException | None) -> str:
    return f"{type(error).__name__} {str(error)[:SHOWN_CHARS]}".strip()


def wait_s() -> Callable[[Any], float]:
    """tenacity's waits: random ones that double, or longer where the server asked for it."""
    from tenacity import wait_random_exponential

    back_off = wait_random_exponential(multiplier=0.5, max=LONGEST_WAIT_S)

    def wait(state: Any) -> float:
        asked = getattr(state.outcome.exception(), "retry_after_s", 0.0)
        return max(back_off(state), min(asked, LONGEST_WAIT_S))

    return wait


def retry_after_s(value: str | None) -> float:
    """What the header Retry-After asks for, in seconds or by a date; 0 where it says neither."""
    try:
        seconds = float(value or 0)
    except ValueError:
        try:
            date = parsedate_to_datetime(str(value))
        except ValueError:
            return 0.0
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
    return seconds if 0 < seconds < math.inf else 0.0


def _reply(response: httpx.Response, content: bytes, url: str) -> Any:
    """The reply's JSON.

    Raises:
        Unavailable: asking again may help. BadAnswer: this prompt is refused. InputError: every prompt would be.
    """
    status, text = response.status_code, content.decode("utf-8", "replace")[:SHOWN_CHARS]
    found = f"{url}: status {status}, {text}"
    if status in RETRIED_STATUS or status >= 500:
        raise Unavailable(f"status {status}: {text}", retry_after_s(response.headers.get("retry-after")))
    if status in ABOUT_ONE_PROMPT:
        raise BadAnswer(f"status {status}, {text}")
    if 300 <= status < 400:
        found = f"{url}: status {status}, a redirection to {response.headers.get('location', 'nowhere')[:SHOWN_CHARS]}"
        raise InputError("server.url", found, "the server itself", "Pass its own address.")
    if status >= 400:
        raise InputError("server", found, "an answer", "Check --server.url, --server.model and --server.dialect.")
    if "html" in response.headers.get("content-type", ""):
        raise InputError("server", found, "JSON", "Check --server.url; it ends with /v1 at most servers.")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"not JSON but {text!r}") from error


def key_of(server: ServerConfig) -> str:
    """The server's key, from the environment; empty where there is none."""
    name = server.api_key_env
    key = os.environ.get(name, "")
    if not (key.isascii() and key.isprintable()):
        raise InputError(name, "line ends or letters that no header holds", "a key in plain ASCII", "Set it again.")
    return key


def need_extra() -> None:
    """Raises InputError where what asks servers is not installed."""
    try:
        import httpx  # noqa: F401
        import tenacity  # noqa: F401
    except ImportError as error:
        remedy = "pip install 'draftsmith[serve]'"
        raise InputError("engine", f"openai without {error.name}", "the extra `serve`", remedy) from error
