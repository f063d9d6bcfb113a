"""The engine in a thread of its own, and its asyncio front: a step never waits for HTTP, and HTTP never for a step.

Everything that touches the engine is a command in its inbox, done between two steps. What a step brings is handed to
the event loop in one call. A reader that lags finds the latest state of its request, never a queue.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from octavo.engine import Engine
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput
from octavo.types import RequestError, SamplingParams, phase_of

log = logging.getLogger("octavo.engine")
T = TypeVar("T")
_LAST_STEP = 5.0  # seconds that the end waits for the step that runs
_IDLE_PLAN = 0.002  # seconds to wait when a step found nothing that could run


class EngineDead(OctavoError):
    """The engine has stopped for good: an error outside any request. The server must be started again."""


@dataclass(frozen=True, slots=True)
class Submission:
    """One request for the engine. `prompt`: token ids; `timeout`: seconds until it must have been given memory. The
    others are `Request`'s."""

    request_id: str
    prompt: Seq[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    identity: tuple[tuple[str, str], ...] = ()
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """`stalled`: seconds since anything moved although there is work; 0 if there is none. `error`: why it is dead."""

    alive: bool
    error: str | None
    busy: bool
    stalled: float
    steps: int


class Stream:
    """The outputs of one request on the event loop: `async for` gives its latest state whenever that is new, ending
    with the finished one, or at once after `abort`."""

    def __init__(self, engine: AsyncEngine, submission: Submission, max_unread: int | None) -> None:
        self.max_unread = max_unread
        self.request_id = submission.request_id
        self.prompt = submission.prompt
        self.params = submission.params
        self.finished = False
        self.aborted = False
        self._engine = engine
        self._latest: RequestOutput | None = None
        self._read = 0  # tokens of the last output taken
        self._error: OctavoError | None = None
        self._only_end = False
        self._waiter: asyncio.Future[None] | None = None

    def abort(self) -> None:
        """Nobody wants the rest: its memory is given back before the next step. Once ended, it does nothing."""
        if not self.finished and not self.aborted:
            self.aborted = True
            self._engine.abort(self.request_id)
            self._wake()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while self._latest is None:
            if self._error is not None:
                raise self._error
            if self.aborted or self.finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._latest = self._latest, None
        self._read = output.usage["completion_tokens"]
        return output

    async def end(self) -> RequestOutput | None:
        """Wait for the finished state; None if it was aborted."""
        self._only_end = True
        last = None
        async for output in self:
            last = output
        return last if last is not None and last.finished else None

    # -- called by AsyncEngine on the event loop ----------------------------------------------------------------------

    def put(self, output: RequestOutput) -> None:
        self.finished = output.finished
        if self.finished or not self._only_end:
            self._latest = output
            self._wake()

    def unread(self, output: RequestOutput) -> int:
        """Tokens that its reader would be behind with `output`."""
        return output.usage["completion_tokens"] - self._read

    def fail(self, error: OctavoError) -> None:
        self._error, self.finished = error, True
        self._latest = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngine:
    """Owns the engine's thread. All methods but `health` are for the event loop that called `start`."""

    def __init__(self, engine: Engine) -> None:
        self._core = engine
        self._inbox: SimpleQueue[Callable[[Engine], None]] = SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._answers: set[asyncio.Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._error: BaseException | None = None
        self._moved = time.monotonic()
        self._computed = 0  # tokens, as of then
        self._busy = False

    def start(self) -> None:
        """Begin to step, in a thread; to be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step it is in, unless that hangs. Requests that still run end with an error."""
        self._stopping = True
        self._inbox.put(_nothing)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _LAST_STEP)
            if self._thread.is_alive():
                log.warning("the last step has not ended within %g s; it is left behind", _LAST_STEP)
        self._fail_all(EngineDead("the server has been stopped."))

    # -- asking the engine --------------------------------------------------------------------------------------------

    async def submit(self, submissions: Seq[Submission], *, max_unread: int | None = None) -> list[Stream]:
        """Queue requests: all of them, or none. Raises RequestError as `Engine.submit` does, and EngineDead.

        `max_unread`: a reader that is more tokens behind loses its request; None: it may take any time.
        """
        streams = [Stream(self, submission, max_unread) for submission in submissions]
        self._streams.update((stream.request_id, stream) for stream in streams)
        try:
            await self.call(lambda engine: _submit_all(engine, submissions))
        except BaseException as error:
            for stream in streams:
                self._streams.pop(stream.request_id, None)
                if not isinstance(error, OctavoError):  # cancelled: the command stands in the inbox all the same
                    self.abort(stream.request_id)
            raise
        return streams

    def abort(self, request_id: str) -> None:
        """End a request before the next step. An unknown or ended one is not an error."""
        self._streams.pop(request_id, None)
        self._inbox.put(lambda engine: _abort(engine, request_id))

    async def call(self, ask: Callable[[Engine], T]) -> T:
        """What `ask` says about the engine between two steps. It runs on the engine's thread: keep it short."""
        if self._error is not None or self._stopping or self._loop is None:
            raise self._death()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

        def command(engine: Engine) -> None:
            try:
                result = ask(engine)
            except Exception as error:  # it is the asker's, who gets it; the engine goes on
                self._post(_set, answer, None, error)
            else:
                self._post(_set, answer, result, None)

        self._inbox.put(command)
        return await answer

    def health(self) -> Health:
        """How the engine does. Never waits for it; any thread may ask."""
        busy = self._busy
        alive = self._error is None and self._thread is not None and self._thread.is_alive()
        stalled = time.monotonic() - self._moved if busy else 0.0
        error = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        return Health(alive, error, busy, stalled, self._core.scheduler.steps)

    @property
    def live(self) -> int:
        """Requests whose end nobody has seen yet."""
        return len(self._streams)

    def fail_live(self, error: OctavoError) -> None:
        """End every request with an error, as when a drain has taken too long."""
        for stream in list(self._streams.values()):
            self.abort(stream.request_id)
            stream.fail(error)

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        engine = self._core
        try:
            while not self._stopping:
                self._obey(engine)
                if engine.busy and not self._stopping:
                    self._step(engine)
        except BaseException as error:
            self._error = error
            log.exception("the engine has stopped")
            self._post(self._fail_all, self._death())

    def _obey(self, engine: Engine) -> None:
        """Do all commands that are there; wait for one if there is nothing else to do."""
        if not engine.busy:
            self._busy = False
            command = self._inbox.get()
            self._busy, self._moved = True, time.monotonic()
            command(engine)
        while True:
            try:
                command = self._inbox.get_nowait()
            except Empty:
                return
            command(engine)

    def _step(self, engine: Engine) -> None:
        outputs = engine.step()
        computed = engine.scheduler.totals.computed
        if outputs or computed != self._computed:  # a step in which nothing happens is no progress
            self._computed, self._moved = computed, time.monotonic()
        if outputs:
            self._post(self._deliver, outputs)
        elif not engine.scheduler.running:
            time.sleep(_IDLE_PLAN)  # whoever waits cannot run now: do not burn a core on asking again

    def _post(self, act: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("the event loop is closed; %s is not delivered", act.__name__)

    # -- on the event loop --------------------------------------------------------------------------------------------

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream.put(output)
            if output.finished:
                del self._streams[output.request_id]
            elif stream.max_unread is not None and (unread := stream.unread(output)) > stream.max_unread:
                self.abort(output.request_id)
                stream.fail(
                    RequestError(
                        f"{unread} tokens have been generated and not read; the limit is {stream.max_unread} "
                        "(max_unread_tokens): read the stream as it comes.",
                        code="slow_reader",
                    )
                )

    def _fail_all(self, error: OctavoError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        for answer in list(self._answers):
            _set(answer, None, error)

    def _death(self) -> EngineDead:
        if self._error is None:
            return EngineDead("the engine does not run: the server is starting or stopping; try again later.")
        return EngineDead(
            f"the engine has stopped: {type(self._error).__name__}: {self._error}; the server must be started again."
        )


def _nothing(engine: Engine) -> None:
    """A command that only wakes the thread."""


def _set(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


def _submit_all(engine: Engine, submissions: Seq[Submission]) -> None:
    done: list[str] = []
    try:
        for one in submissions:
            engine.submit(
                one.prompt,
                one.params,
                request_id=one.request_id,
                priority=one.priority,
                tenant=one.tenant,
                identity=one.identity,
                deadline=None if one.timeout is None else engine.clock.now() + one.timeout,
            )
            done.append(one.request_id)
    except BaseException:
        for request_id in done:
            engine.abort(request_id)
        raise


def _abort(engine: Engine, request_id: str) -> None:
    phase = phase_of(engine.scheduler.requests.get(request_id, ()))
    if engine.abort(request_id) is not None:
        log.info("aborted %s while %s", request_id, phase)
