"""A client of any server that speaks OpenAI's API: it streams an answer and notes when each piece came.

It knows no tokenizer. How many words of a prompt make a token it learns from the server's own counts, and
which fields beyond OpenAI's the server takes from what it refuses.

Needs aiohttp. Where client and server share a machine, what the client takes of it is the server's loss, and
for each piece httpx takes four times as much.
"""

import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic_core import from_json

from minivllm.bench.serving.figures import Trace
from minivllm.bench.serving.workload import Planned, words
from minivllm.errors import ConfigError, shown

try:
    import aiohttp
except ImportError as error:
    raise ConfigError("`bench serve` needs aiohttp: pip install '.[bench]'") from error

Endpoint = Literal["chat", "completions"]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CONNECT_SECONDS, READ_SECONDS = 30.0, 600.0
_FIELDS: dict[str, dict[str, Any]] = {
    "ignore_eos": {"ignore_eos": True},  # answers get as long as they are to be
    "stream_options": {"stream_options": {"include_usage": True}},
}
_PROBES = (("ignore_eos", "stream_options"), ("stream_options",), ("ignore_eos",), ())
_FEW_WORDS, _MANY_WORDS = 16, 112


class Client:
    """One server, one model, one endpoint. An async context manager; ``prepare`` comes first.

    Args:
        base_url: with or without /v1.
        model: None: the server's first one.
        clock: seconds.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None,
        endpoint: Endpoint,
        api_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self.endpoint = endpoint
        self.fields: tuple[str, ...] = ()  #: those of ``_FIELDS`` that the server takes
        self.tokens_per_word = 1.0
        self.tokens_around = 0.0  #: of a prompt, those that are not its words': a chat template's
        self.calibrated = False  #: these two were learned; else they are guesses
        self._clock = clock
        self._resources = AsyncExitStack()
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    async def __aenter__(self) -> "Client":
        """Open.

        Raises:
            ConfigError: that is no address.
        """
        if not _is_address(self.base_url):
            raise ConfigError(f"{shown(self.base_url)} is no address; it looks as http://127.0.0.1:8000")
        http = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=READ_SECONDS),
            connector=aiohttp.TCPConnector(limit=0),
            trust_env=True,
        )
        self._http = await self._resources.enter_async_context(http)
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the connections."""
        await self._resources.aclose()

    async def prepare(self) -> None:
        """Learn what the server takes and how it counts.

        Raises:
            ConfigError: it does not answer as such a server does.
        """
        if not self.model:
            self.model = await self._first_model()
        few = Trace(0.0)
        for fields in _PROBES:
            self.fields = fields
            few = await self.send(words(0, _FEW_WORDS), 1)
            if few.error is None or not few.error.startswith(("400 ", "422 ")):
                break
        if few.error is not None:
            raise ConfigError(f"{self.base_url} does not answer a first request: {few.error}")
        many = await self.send(words(1, _MANY_WORDS), 1)
        if few.prompt_tokens is not None and many.prompt_tokens is not None:
            per_word = (many.prompt_tokens - few.prompt_tokens) / (_MANY_WORDS - _FEW_WORDS)
            if per_word > 0:
                self.tokens_per_word = per_word
                self.tokens_around = few.prompt_tokens - per_word * _FEW_WORDS
                self.calibrated = True

    async def ask(self, request: Planned) -> Trace:
        """Send a request of a workload."""
        num_words = round((request.input_len - self.tokens_around) / self.tokens_per_word)
        return await self.send(words(request.seed, max(1, num_words)), request.output_len)

    async def send(self, prompt: str, max_tokens: int) -> Trace:
        """Ask, and read the answer to its end."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
        }
        if self.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        for name in self.fields:
            body |= _FIELDS[name]
        trace = Trace(self._clock())
        try:
            async with self._http.post(self.base_url + PATHS[self.endpoint], json=body) as response:
                if response.status != 200:
                    trace.error = f"{response.status} {_message(await response.read())}"
                else:
                    trace.error = await self._read(response.content, trace)
        except aiohttp.ClientError as error:
            trace.error = str(error) or type(error).__name__
        trace.ended_at = self._clock()
        return trace

    async def _read(self, stream: aiohttp.StreamReader, trace: Trace) -> str | None:
        """Note what comes. What is wrong with it; None: nothing."""
        rest = b""  # of a line
        async for received in stream.iter_any():
            now = self._clock()
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return None
                try:
                    event = from_json(data)
                    if "error" in event:
                        return _message(data)
                    if any(_text(choice) for choice in event.get("choices") or ()):
                        trace.piece_times.append(now)
                    usage = event.get("usage")
                    if usage:
                        trace.prompt_tokens = int(usage["prompt_tokens"])
                        trace.completion_tokens = int(usage["completion_tokens"])
                except (ValueError, TypeError, KeyError, AttributeError):
                    return f"an event is not as OpenAI's: {shown(data.decode(errors='replace'))}"
        return "the stream ended without [DONE]"

    async def _first_model(self) -> str:
        try:
            async with self._http.get(f"{self.base_url}/v1/models") as response:
                content = await response.read()
            return str(json.loads(content)["data"][0]["id"])
        except aiohttp.ClientError as error:
            raise ConfigError(
                f"{self.base_url} cannot be reached: {error or type(error).__name__}; is a server there?"
            ) from None
        except (ValueError, LookupError, TypeError):
            message = f"{response.status} {_message(content)}"
            raise ConfigError(f"{self.base_url} names no model: {message}; give --model") from None


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _text(choice: dict[str, Any]) -> str:
    """What is new in a choice: a completion's text, a chat's content, or its reasoning."""
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


def _message(body: bytes) -> str:
    """What an error's body says, in a line."""
    try:
        error = json.loads(body)["error"]
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, LookupError, TypeError):
        message = body[:200].decode(errors="replace")
    return " ".join(str(message).split())[:200]
