"""One connection's conversation with the server: requests go out, answers come back in the same order.

A cursor of psycopg costs more time than most of our statements, so these go to libpq directly, the statements of one
request together in one round trip.  Outside of a transaction they are then one of their own: all of them, or none.
A caller that is cancelled while waiting leaves the connection in order: the answer is still read here, and dropped.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from psycopg import AsyncConnection
from psycopg.errors import Diagnostic, error_from_result
from psycopg.pq import ConnStatus, ExecStatus, PipelineStatus
from psycopg.pq.abc import PGresult

from onefold.store.postgres.wire.errors import UnreplicatedError, is_wait_ended
from onefold.store.postgres.wire.statements import WireQuery

Answer = list[PGresult]

#: Each read empties the socket up to the size of libpq's buffer, 16 KiB at least, and a kernel keeps a few MiB.
_LAST_READS_MAX = 1_000


class _Request:
    __slots__ = ("answer", "prepared", "results", "sent_at", "vital", "wait_ended")

    def __init__(self, answer: asyncio.Future[Answer], sent_at: float) -> None:
        self.answer = answer
        self.sent_at = sent_at
        #: For each result to come: the statement that is prepared by it, or None if it is an answer.
        self.prepared: list[bytes | None] = []
        self.results: Answer = []
        #: How many of the results say whether it was done; None if all of them do.
        self.vital: int | None = None
        #: Whether its commit was reported before the synchronous standby had it.
        self.wait_ended = False

    def error(self) -> psycopg.Error | None:
        for result in self.results[: self.vital]:
            if result.status == ExecStatus.FATAL_ERROR:
                return error_from_result(result)
        if self.wait_ended:
            return UnreplicatedError("the wait for the synchronous standby was ended")
        return None

    def finish(self) -> None:
        if self.answer.done():
            return
        if error := self.error():
            self.answer.set_exception(error)
        else:
            pairs = zip(self.prepared, self.results, strict=True)
            self.answer.set_result([result for prepared, result in pairs if prepared is None])


class Pipeline:
    """Speaks for one connection.

    One that is ``owned`` is never used by psycopg itself; it is listened to all the time, so its end is noticed.
    Any other is left as it was found whenever nothing is under way.
    """

    def __init__(self, connection: AsyncConnection[Any], *, owned: bool, answer_seconds: float) -> None:
        self._pgconn = connection.pgconn
        self._socket = self._pgconn.socket
        #: Tells of errors of the socket alone, whether or not there is something to read.
        self._errors = select.poll()
        self._errors.register(self._socket, 0)
        self._owned = owned
        self._answer_seconds = answer_seconds
        self._loop = asyncio.get_running_loop()
        self._under_way: deque[_Request] = deque()
        self._prepared: set[bytes] = set()
        self._watch: asyncio.TimerHandle | None = None
        self._when_quiet: list[Callable[[], None]] = []
        self._listening = False
        self._writing = False
        self.hear(connection)
        if owned:
            self._listen()

    def hear(self, connection: AsyncConnection[Any]) -> None:
        """Receive the notices of the session here, whichever object of psycopg's stands for it."""
        connection.add_notice_handler(self._on_notice)

    @property
    def quiet(self) -> bool:
        """Whether every request was answered."""
        return not self._under_way

    @property
    def alive(self) -> bool:
        """Whether nothing is known to be wrong, which a look at the socket tells without waiting."""
        try:
            self._pgconn.consume_input()
        except psycopg.OperationalError as error:
            self._break(error)
            return False
        return True

    def send(self, queries: Sequence[WireQuery], after: Sequence[WireQuery] = ()) -> asyncio.Future[Answer]:
        """Send statements, all in one round trip; the first that fails keeps those behind it from being run.

        Those in ``after`` follow them, and may fail without the others having failed.
        """
        request = _Request(self._loop.create_future(), self._loop.time())
        self._under_way.append(request)
        try:
            self._listen()
            for query in queries:
                self._write(query, request)
            if after:
                request.vital = len(request.prepared)
                for query in after:
                    self._write(query, request)
            self._pgconn.pipeline_sync()
            self._flush()
        except psycopg.OperationalError as error:
            self._break(error)
        if self._watch is None:
            self._watch = self._loop.call_later(self._answer_seconds, self._look_after)
        return request.answer

    def _write(self, query: WireQuery, request: _Request) -> None:
        text, values, formats, types, name, result_format = query
        if name is None:
            self._pgconn.send_query_params(text, values, types, formats, result_format)
        else:
            if name not in self._prepared:
                self._pgconn.send_prepare(name, text, types)
                self._prepared.add(name)
                request.prepared.append(name)
            self._pgconn.send_query_prepared(name, values, formats, result_format)
        request.prepared.append(None)

    def forget(self) -> None:
        """Forget which statements are prepared: the session drops them."""
        self._prepared.clear()

    def when_quiet(self, call: Callable[[], None]) -> None:
        """Call this as soon as every request was answered."""
        if self._under_way:
            self._when_quiet.append(call)
        else:
            call()

    def stop(self) -> None:
        """Let go of the connection, and close it."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._break(psycopg.OperationalError("the connection was closed"))

    # the event loop's side

    def _listen(self) -> None:
        if not self._listening:
            if self._pgconn.pipeline_status == PipelineStatus.OFF:
                self._pgconn.enter_pipeline_mode()
            self._loop.add_reader(self._socket, self._on_readable)
            self._listening = True

    def _on_readable(self) -> None:
        try:
            self._pgconn.consume_input()
            self._read()
            if self._listening and self._errors.poll(0):
                self._read_to_the_end()
        except psycopg.OperationalError as error:
            self._break(error)

    def _on_notice(self, notice: Diagnostic) -> None:
        """Record that a commit is in doubt; the notice comes before the end of the request that committed."""
        if self._under_way and is_wait_ended(notice):
            self._under_way[0].wait_ended = True

    def _read_to_the_end(self) -> None:
        """Read what is left of a connection that was reset: uvloop calls its reader once, and never again."""
        for _ in range(_LAST_READS_MAX):
            self._pgconn.consume_input()
            self._read()
        raise psycopg.OperationalError("the connection was reset")

    def _read(self) -> None:
        """Take every result that has come; each is followed by a None, and a second one says that there is no more."""
        more = True
        while self._under_way and not self._pgconn.is_busy():
            result = self._pgconn.get_result()
            if result is not None:
                self._take(result)
            elif not more:
                break
            more = result is not None
        if self._pgconn.status == ConnStatus.BAD:
            raise psycopg.OperationalError("the connection was lost")

    def _take(self, result: PGresult) -> None:
        request = self._under_way[0]
        if result.status != ExecStatus.PIPELINE_SYNC:
            request.results.append(result)
            return
        self._under_way.popleft()
        for name, prepared in zip(request.prepared, request.results, strict=True):
            if name is not None and prepared.status != ExecStatus.COMMAND_OK:
                self._prepared.discard(name)
        if not self._under_way:
            self._rest()
        request.finish()

    def _rest(self) -> None:
        if not self._owned:
            self._loop.remove_reader(self._socket)
            self._listening = False
            self._pgconn.exit_pipeline_mode()
        self._tell_quiet()

    def _flush(self) -> None:
        """Send what is to be sent, the rest of it when there is room."""
        if bool(self._pgconn.flush()) == self._writing:
            return
        self._writing = not self._writing
        if self._writing:
            self._loop.add_writer(self._socket, self._on_writable)
        else:
            self._loop.remove_writer(self._socket)

    def _on_writable(self) -> None:
        try:
            self._flush()
        except psycopg.OperationalError as error:
            self._break(error)

    def _look_after(self) -> None:
        """A server that cannot be reached any more may never say so."""
        self._watch = None
        if not self._under_way:
            return
        left = self._under_way[0].sent_at + self._answer_seconds - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look_after)
        else:
            self._break(psycopg.OperationalError(f"no answer within {self._answer_seconds:g} s"))

    def _break(self, error: psycopg.OperationalError) -> None:
        """The connection is of no more use; callers that still wait get an error."""
        # By its number alone the socket must not be touched once it is closed: it may be another's then.
        if self._listening:
            self._loop.remove_reader(self._socket)
        if self._writing:
            self._loop.remove_writer(self._socket)
        self._listening = self._writing = False
        self._pgconn.finish()
        requests = list(self._under_way)
        self._under_way.clear()
        for request in requests:
            if not request.answer.done():
                request.answer.set_exception(request.error() or error)
        self._tell_quiet()

    def _tell_quiet(self) -> None:
        while self._when_quiet:
            self._when_quiet.pop()()
