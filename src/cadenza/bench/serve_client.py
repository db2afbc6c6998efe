"""A light client of the OpenAI API: one connection a stream, parsed by httptools as bytes arrive.
Invariants: a time is taken when a chunk's bytes have arrived, before they are parsed; a stream that
ends without usage is a failed request; a connection carries one answer at a time."""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from cadenza.bench import Clock
from cadenza.bench.serve_figures import CompletedRequest, FailedRequest, Outcome
from cadenza.bench.serve_options import ServerAddress
from cadenza.bench.workloads import PlannedRequest

_OK = 200
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class _Failed(Exception):
    """One request failed, for this reason."""


class _Closed(_Failed):
    """The server closed the connection before it answered."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None

    @property
    def answer(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else "") or ""

    @property
    def has_text(self) -> bool:
        delta = self.delta
        return bool(self.answer or (delta and (delta.reasoning_content or delta.reasoning)))


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """What all requests of a client have in common."""

    model: str
    ignore_eos: bool = True
    time_tokens: bool = False
    timeout_s: float = 300.0


class ServeClient:
    """Over connections that are kept open between requests."""

    def __init__(
        self, address: ServerAddress, form: RequestForm, clock: Clock = time.perf_counter
    ) -> None:
        parts = urlsplit(address.base_url)
        self.form = form
        self.clock = clock
        self._host = parts.hostname or ""
        self._link = address.link
        self._tls = self._link.tls()
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        key = "" if address.api_key is None else f"Authorization: Bearer {address.api_key}\r\n"
        self._head = (
            f"Host: {parts.netloc.rpartition('@')[2]}\r\n{key}Content-Type: application/json\r\n"
            f"Accept: text/event-stream\r\n"
        )
        self._idle: list[_Connection] = []
        self._decoder = msgspec.json.Decoder(_Chunk)

    def encode(self, request: PlannedRequest) -> bytes:
        """Can be made before the request is due."""
        body: dict[str, Any] = {"model": self.form.model}
        if request.messages:
            body["messages"] = request.messages
        else:
            body["prompt"] = request.text or request.prompt_token_ids
        body |= {
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.form.ignore_eos:
            body["ignore_eos"] = True
        if self.form.time_tokens:
            body["return_token_ids"] = True
        path = self._path + (_CHAT if request.messages else _COMPLETIONS)
        encoded = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Length: {len(encoded)}\r\n\r\n"
        return head.encode() + encoded

    async def complete(
        self, request: PlannedRequest, encoded: bytes | None = None, due_s: float | None = None
    ) -> list[Outcome]:
        """A turn of a conversation is sent after the answer before it; it ends with the first
        failed one."""
        outcomes: list[Outcome] = []
        messages = list(request.messages)
        for said in (None, *request.turns):
            if said is not None:
                messages.append({"role": "user", "content": said})
                encoded = self.encode(replace(request, messages=tuple(messages)))
                due_s = None
            outcome, answer = await self._complete(encoded or self.encode(request), due_s)
            outcomes.append(outcome)
            if isinstance(outcome, FailedRequest):
                break
            messages.append({"role": "assistant", "content": answer})
        return outcomes

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _complete(self, encoded: bytes, due_s: float | None) -> tuple[Outcome, str]:
        sent_s = self.clock()
        try:
            frames, end_s = await self._exchange(encoded)
            return self._completed(frames, sent_s, due_s, end_s)
        except _Failed as failed:
            reason = str(failed)
        except TimeoutError:
            reason = "timeout"
        except OSError as error:
            reason = self._link.explain(error)
        failed = FailedRequest(sent_s=sent_s, due_s=due_s, end_s=self.clock(), reason=reason)
        return failed, ""

    async def _exchange(self, encoded: bytes) -> tuple[list[tuple[bytes, float]], float]:
        while self._idle:
            kept = self._idle.pop()
            try:
                if kept.is_open:
                    return await self._exchange_on(kept, encoded)
            except _Closed:
                # The server closed it while it was idle; nothing says that it took the request.
                continue
        loop = asyncio.get_running_loop()
        # Not wait_for, which loses a cancellation that comes when it is done (until Python 3.12).
        async with asyncio.timeout(self.form.timeout_s):
            _, made = await loop.create_connection(
                lambda: _Connection(self.clock), self._host, self._port, ssl=self._tls
            )
        return await self._exchange_on(made, encoded)

    async def _exchange_on(
        self, connection: "_Connection", encoded: bytes
    ) -> tuple[list[tuple[bytes, float]], float]:
        try:
            return await connection.exchange(encoded, self.form.timeout_s)
        finally:
            if connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()

    def _completed(
        self, frames: list[tuple[bytes, float]], sent_s: float, due_s: float | None, end_s: float
    ) -> tuple[CompletedRequest, str]:
        content_s: list[float] = []
        num_content_tokens: list[int] = []
        usage: _Usage | None = None
        text: list[str] = []
        time_tokens = self.form.time_tokens
        for data, arrived_s in frames:
            chunk = self._chunk(data)
            choices = chunk.choices or ()
            if any(each.token_ids if time_tokens else each.has_text for each in choices):
                content_s.append(arrived_s)
                if time_tokens:
                    num_content_tokens.append(sum(len(each.token_ids or ()) for each in choices))
            text += [each.answer for each in choices]
            usage = chunk.usage or usage
        if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
            raise _Failed("no usage")
        answer = CompletedRequest(
            sent_s=sent_s,
            due_s=due_s,
            content_s=tuple(content_s),
            end_s=end_s,
            num_prompt_tokens=usage.prompt_tokens,
            num_output_tokens=usage.completion_tokens,
            num_content_tokens=tuple(num_content_tokens),
        )
        return answer, "".join(text)

    def _chunk(self, data: bytes) -> _Chunk:
        try:
            chunk = self._decoder.decode(data)
        except msgspec.ValidationError:
            raise _Failed("unknown chunk") from None
        except msgspec.DecodeError:
            raise _Failed("not JSON") from None
        if chunk.error is not None:
            raise _Failed("error frame")
        return chunk


class _Connection(asyncio.Protocol):
    """The server-sent events of one answer after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: Any = None
        self._answer: asyncio.Future[None] | None = None
        self._reset()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        return self.is_open and self._is_kept

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    async def exchange(
        self, encoded: bytes, timeout_s: float
    ) -> tuple[list[tuple[bytes, float]], float]:
        """Each event's data with the time of its arrival, and the time of `[DONE]`. Raises _Failed,
        or TimeoutError when nothing has arrived for so long."""
        self._reset()
        self._answer = asyncio.get_running_loop().create_future()
        self._arrived_s = self._clock()
        self._transport.write(encoded)
        while True:
            left_s = max(0.0, self._arrived_s + timeout_s - self._clock())
            done, _ = await asyncio.wait((self._answer,), timeout=left_s)
            if done:
                break
            if self._clock() - self._arrived_s >= timeout_s:
                raise TimeoutError
        if not self._status:
            raise _Closed("connection closed")
        if self._status != _OK:
            raise _Failed(str(self._status))
        if self._done_s is None:
            raise _Failed("cut stream")
        return self._frames, self._done_s

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._frames: list[tuple[bytes, float]] = []
        self._rest = b""
        self._status = 0
        self._arrived_s = 0.0
        self._done_s: float | None = None
        self._is_kept = False

    def _end(self) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._arrived_s = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._end()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or self._done_s is not None:
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self._done_s = self._arrived_s
            else:
                self._frames.append((data, self._arrived_s))

    def on_message_complete(self) -> None:
        self._is_kept = self._parser.should_keep_alive()
        self._end()
