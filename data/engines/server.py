"""The HTTP client of every engine's server: requests, retries, and one line for what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import itertools
import json
import math
import os
import random
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from draftsmith.data.console import log_note
from draftsmith.data.ranks import place
from draftsmith.data.stages import ServerConfig
from draftsmith.data.text.template import RowError
from draftsmith.modules.pretrained.reading import misfits
from draftsmith.modules.types import InputError

if TYPE_CHECKING:
    import httpx

RETRIED_STATUS = {408, 409, 425, 429}  # and 500 or above: busy, restarting, overloaded
KEY_STATUS = {401, 403}
PROMPT_STATUS = {400, 413, 422}  # other statuses of 300 and above concern the address, the key or the model
RETRIES = 6  # attempts after a failure, with waits that double from half a second or follow Retry-After
MAX_WAIT_S = 60.0  # between attempts
NOTE_EVERY_S = 30.0  # while the server is unavailable
INFO_S = 30.0  # longest wait for the server's description
REPLY_BYTES = 32 * 2**20  # most of one reply or stream, decompressed: an answer has a few bytes a token
SHOWN_CHARS = 200  # of a reply, in errors
READ_LOG = "Read the server's log, or check the address."


class Server:
    """Requests to a server, without or with retries. Paths are relative to its address.

    kind: expected kind of server, for errors. root: paths begin before the version, /v1; else an
        address without a path gets it. max_wait_s: longest pause between attempts, in seconds. retries: of `ask`,
        RETRIES by default.
    """

    def __init__(
        self,
        config: ServerConfig,
        kind: str = "a server",
        root: bool = False,
        max_wait_s: float = MAX_WAIT_S,
        retries: int | None = None,
    ):
        need_extra()
        self.config, self.kind, self.max_wait_s, self._retries = config, kind, max_wait_s, retries
        self.url = config.server.rstrip("/")
        if root:
            self.url = self.url.removesuffix("/v1")
        elif self.url.count("/") == 2:
            self.url += "/v1"
        key = os.environ.get(config.api_key_env, "").strip()
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client: httpx.AsyncClient | None = None
        self._last_note = -math.inf

    def json(self, path: str, shape: Mapping[str, Any], body: Mapping[str, Any] | None = None) -> Any:
        """Get a page, or post `body` to it, and return its JSON of this shape."""
        content = self.page(path, body)
        try:
            reply = json.loads(content)
        except (ValueError, RecursionError):
            reply = shown(content)
        for found, expected in misfits(reply, shape):
            raise self._error(path, found, f"{expected}, of {self.kind}")
        return reply

    def served_model(self) -> tuple[str, int | None]:
        """Return the name of the model that the server has, and its longest sequence in tokens, if it says."""
        models = self.json("v1/models", {"data": [{"id": str, "max_model_len?": (int, None)}]})["data"]
        if not models:
            raise InputError("server", f"{self.url} without a model", self.kind, READ_LOG)
        return models[0]["id"], models[0].get("max_model_len")

    def page(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Get a page, or post `body` to it, and return its content."""
        method, limit_s = ("GET", INFO_S) if body is None else ("POST", self.config.timeout_s)
        return b"".join(self._chunks(path, method, body, limit_s))

    def events(self, path: str, body: Mapping[str, Any], shape: Any) -> Generator[dict[str, Any], None, None]:
        """Post `body` and yield the events of a stream, of this shape. Closing the iterator ends the request."""
        buffer = b""
        with contextlib.closing(self._chunks(path, "POST", body, self.config.timeout_s)) as chunks, self._errors(path):
            for chunk in itertools.chain(chunks, [b"\n"]):
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    text = line.removeprefix(b"data:").strip()
                    if text != line.strip() and text.startswith(b"{"):  # OpenAI's protocol ends with [DONE]
                        event = json.loads(text.decode("utf-8", "replace"))
                        for found, expected in misfits(event, shape):
                            raise self._error(path, found, f"{expected}, of {self.kind}")
                        yield event

    def _chunks(self, path: str, method: str, body: Any, limit_s: float) -> Generator[bytes, None, None]:
        """Yield the parts of a reply, decompressed, within the limits of its size and time."""
        options = {"json": body, "timeout": limit_s}
        with self._errors(path), self._session.stream(method, f"{self.url}/{path}", **options) as reply:
            chunks = map(within(limit_s), reply.iter_bytes())
            if not reply.is_success:
                status = reply.status_code
                raise self._error(path, f"status {status}, {shown(b''.join(chunks))!r}", status=status)
            yield from chunks

    @functools.cached_property
    def _session(self) -> httpx.Client:
        """Return the client of `page` and `events`. Building one loads certificates, which takes longer than a page."""
        import httpx

        # A connection that is kept may be closed by the server just when the next request takes it.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.Client(headers=self._headers, limits=limits)

    async def ask(self, path: str, body: Mapping[str, Any], most_bytes: int = REPLY_BYTES) -> Any:
        """Post `body` and return the reply's JSON, with retries while the server is unavailable.

        most_bytes: of the reply, decompressed.

        Raises:
            RowError: this body is refused, or all attempts failed. InputError: every body would be refused, or nothing
            listens at the address.
        """
        import httpx

        if self._client is None:
            limits = httpx.Limits(max_connections=self.config.concurrency)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits)
        url, attempts = f"{self.url}/{path}", 1 + (RETRIES if self._retries is None else self._retries)
        for attempt in range(1, attempts + 1):
            # Random waits keep many clients from coming back at the same moment.
            wait_s = random.uniform(0.0, 0.5 * 2 ** min(attempt, 10))
            last: Exception | None = None
            try:
                # httpx's own timeout is per read: a slow drip would never reach it.
                seconds, request = self.config.timeout_s, self._client.stream("POST", url, json=body)
                async with asyncio.timeout(seconds), request as response:
                    count = within(seconds, most_bytes)
                    content = b"".join([count(chunk) async for chunk in response.aiter_bytes()])
            except TimeoutError:
                problem = f"no whole answer in {self.config.timeout_s:g} s"
            except httpx.RequestError as error:
                problem, last = f"{type(error).__name__} {str(error)[:SHOWN_CHARS]}".strip(), error
            except (httpx.InvalidURL, UnicodeError) as error:
                raise self._error(path, error) from error
            else:
                status = response.status_code
                if status < 500 and status not in RETRIED_STATUS:
                    return self._parse(path, status, content)
                problem = f"status {status}: {shown(content)}"
                wait_s = max(wait_s, seconds_of(response.headers.get("retry-after", "")))

            now = time.monotonic()
            if now - self._last_note >= NOTE_EVERY_S and not place().rank:
                self._last_note = now
                log_note(f"draftsmith: {url}: attempt {attempt} of {attempts} failed: {problem}")
            if attempt < attempts:
                await asyncio.sleep(min(wait_s, self.max_wait_s))
        if isinstance(last, httpx.ConnectError):
            raise self._error(path, last) from last
        raise RowError(f"{url}: {problem} in {attempts} attempts")

    async def close(self) -> None:
        """Close the connections of `ask`."""
        if self._client is not None:
            await self._client.aclose()

    def _parse(self, path: str, status: int, content: bytes) -> Any:
        """Return the reply's JSON; raise RowError if this body is refused, InputError if every body would be."""
        found = f"status {status}, {shown(content)}"
        if status in PROMPT_STATUS:
            raise RowError(found)
        if status in KEY_STATUS:
            raise self._error(path, found, status=status)
        try:
            # A web page with status 200 is another service at this address.
            if status < 300:
                return json.loads(content)
        except (ValueError, RecursionError):
            found = f"no JSON, {found}"
        remedy = "Check the address, the model and --engine."
        raise InputError("server", f"{self.url}/{path}: {found}", "a reply", remedy)

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Raise InputError for what goes wrong with a request."""
        import httpx

        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, json.JSONDecodeError, RecursionError) as error:
            raise self._error(path, error) from error

    def _error(self, path: str, found: object, expected: str = "", status: int = 0) -> InputError:
        import httpx

        if isinstance(found, httpx.ConnectError):
            remedy = "Start it, or correct the address."
            if "CERTIFICATE" in str(found):
                remedy = "Trust its certificate: name its file in the environment variable SSL_CERT_FILE."
            return InputError("server", f"no connection to {self.url} ({found})", self.kind, remedy)
        if isinstance(found, httpx.InvalidURL | UnicodeError):
            return InputError("server", f"{self.url} ({found})", "http://HOST:PORT, or https", "Correct it.")
        if isinstance(found, Exception):
            found = f"{type(found).__name__} {str(found)[:SHOWN_CHARS]}".strip()
        remedy = READ_LOG
        if status in KEY_STATUS:
            name = self.config.api_key_env
            remedy = f"Put its key into the environment variable {name}, or name another one: --api-key-env."
        return InputError("server", f"{self.url}/{path}: {found}", expected or f"{self.kind} that answers", remedy)


def within(seconds: float, most_bytes: int = REPLY_BYTES) -> Callable[[bytes], bytes]:
    """Return what passes on the parts of a reply, and raises an error of httpx at one too many, or too late.

    httpx itself limits the time between two parts, and no size.
    """
    import httpx

    left, end = most_bytes, time.monotonic() + seconds

    def count(part: bytes) -> bytes:
        nonlocal left
        left -= len(part)
        if left < 0:
            raise httpx.ReadError(f"more than {most_bytes:,} bytes")
        if time.monotonic() > end:
            raise httpx.ReadTimeout(f"no whole answer in {seconds:g} s")
        return part

    return count


def check_model(reply: Any, asked: str) -> None:
    """Raise InputError for a reply that says it is by another model than was asked."""
    model = reply.get("model") if isinstance(reply, dict) else None
    if model not in (None, asked):
        remedy = "Serve the model of --target, and pass the name by which the server calls it."
        raise InputError("server_model", f"a reply by {str(model)[:SHOWN_CHARS]!r}", repr(asked), remedy)


def seconds_of(retry_after: str) -> float:
    """Return how long a server asks to wait: its header Retry-After has seconds or a date; 0 for anything else."""
    if retry_after.isdecimal():
        return float(retry_after)
    date = email.utils.parsedate_tz(retry_after)
    return 0.0 if date is None else email.utils.mktime_tz(date) - time.time()


def shown(content: bytes) -> str:
    """Return the beginning of a reply, for errors."""
    return content[:SHOWN_CHARS].decode("utf-8", "replace")


def need_extra() -> None:
    """Raise InputError if the package for servers is not installed."""
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        remedy = "pip install 'draftsmith[serve]'"
        raise InputError("engine", f"a server without {error.name}", "the extra `serve`", remedy) from error
