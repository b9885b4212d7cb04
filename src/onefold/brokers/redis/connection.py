"""The connection to a Redis server: its settings are checked, reconnects are paced, driver errors are translated."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from redis import asyncio as driver
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from onefold import limits
from onefold.brokers.redis.durability import judge, read_settings
from onefold.brokers.redis.parser import BoundedParser
from onefold.brokers.transport import Durability, Outage
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import ConfigurationError, OnefoldError, TransportError, TransportUnavailableError

T = TypeVar("T")

logger = logging.getLogger("onefold")

#: Timeout of one command; a pull waits for entries for less than this.
ANSWER_SECONDS = 10.0
CONNECT_SECONDS = 5.0

#: Errors of a server that accepts nothing now: those for which the driver has classes, and first words of the others.
_LATER_KINDS = (
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
_LATER_WORDS = frozenset({"MISCONF", "NOREPLICAS", "BUSY", "UNKILLABLE"})
#: A server quotes the arguments of a command that it does not know, which may be a part of a message.
_QUOTED = ", with args beginning with"


@dataclass(slots=True, eq=False)
class _Session:
    """A client of the driver, and the number of calls that use it now.

    The driver fails with errors of its own when its client is closed during a call, so the last call closes it.
    """

    client: Any
    users: int = 0
    is_over: bool = False

    async def close_when_unused(self) -> None:
        self.is_over = True
        if self.users == 0:
            with suppress(exceptions.RedisError, OSError, RuntimeError):
                await self.client.aclose()


class RedisConnection:
    """One server: its client while it works, and the durability of its entries.

    While the server cannot be reached, one call tries to connect after a pause that grows; all others fail at once, so
    that no handler waits for it.
    """

    def __init__(
        self, url: str, *, clock: Clock, chance: random.Random, allow_volatile: bool, stated: Durability | None
    ) -> None:
        self._url = url
        self._clock = clock
        self._allow_volatile = allow_volatile
        self._stated = stated
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()
        self._session: _Session | None = None
        self._outage = Outage(clock, chance, limits.TRANSPORT_PAUSE_SECONDS, limits.TRANSPORT_PAUSE_SECONDS_MAX)
        self._paused_until = 0
        #: Whether a connection was made or tried since the transport was opened.
        self._has_tried = False
        self.durability: Durability = "nothing"
        self.server = _server_of(url)

    async def open(self) -> None:
        """Connect unless connected, and determine the durability of the server's entries."""
        await self._connected()

    async def close(self) -> None:
        """Close the connections; the next call makes new ones."""
        session, self._session, self._has_tried = self._session, None, False
        if session is not None:
            await session.close_when_unused()

    async def call(self, function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Call a function with the client.  Raises ``RedisRefusedError`` with the error that the server replied.

        Raises ``TransportUnavailableError`` when the server cannot be reached or its reply cannot be read; then the
        command may have been carried out.
        """
        session = await self._connected()
        session.users += 1
        try:
            answer = await function(session.client, *arguments)
        except OnefoldError:
            raise
        except Exception as error:
            failure = self._translate(error)
            if isinstance(failure, TransportUnavailableError) and self._session is session:
                self._begin_pause()
                # A new session checks the settings again, because the server may have been restarted with others.
                self._session, session.is_over = None, True
            raise failure from _cause(error)
        finally:
            session.users -= 1
            if session.is_over:
                await session.close_when_unused()
        self._outage.end()
        return answer

    async def _connected(self) -> _Session:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # Connections of another event loop cannot be used here, nor be closed.
            self._loop, self._session, self._connecting = loop, None, asyncio.Lock()
        if self._session is not None:
            return self._session
        async with self._connecting:
            if self._session is None:
                self._refuse_during_pause()
                self._session = await self._connect()
            return self._session

    def _refuse_during_pause(self) -> None:
        if self._clock.steady() < self._paused_until:
            raise TransportUnavailableError(f"Redis at {self.server} could not be reached and is tried again soon")

    def _begin_pause(self) -> None:
        pause = self._outage.pause()
        self._paused_until = self._clock.steady() + round(pause * MICROSECONDS)

    async def _connect(self) -> _Session:
        client: Any = driver.Redis.from_url(
            self._url,
            # The two versions of the protocol reply in different shapes; every server has this one.
            protocol=2,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 0),
            parser_class=BoundedParser,
        )
        try:
            if not await client.ping():
                raise exceptions.InvalidResponse("to PING")
            self._judge(await read_settings(client))
        except BaseException as error:
            await _Session(client).close_when_unused()
            if isinstance(error, OnefoldError) or not isinstance(error, Exception):
                raise
            self._begin_pause()
            raise self._translate(error) from _cause(error)
        finally:
            self._has_tried = True
        return _Session(client)

    def _judge(self, found: Mapping[str, str]) -> None:
        """Check that the server keeps accepted entries.

        If it does not at the first connection, that is an error of configuration and the worker does not start.
        Later it is an outage: nothing is read from it or written to it until it is durable again.
        """
        try:
            self.durability = judge(found, stated=self._stated, allow_volatile=self._allow_volatile, server=self.server)
        except ConfigurationError as error:
            if not self._has_tried:
                raise
            self._begin_pause()
            raise TransportUnavailableError(str(error)) from None
        if self.durability == "all but the last seconds":
            logger.warning("transport_may_lose_seconds server=%s; set `appendfsync always`", self.server)

    def _translate(self, error: Exception) -> TransportError:
        if not _may_be_quoted(error):
            kind = type(error).__name__
            return TransportUnavailableError(f"Redis at {self.server}: its reply cannot be read ({kind})")
        reply = str(error).partition(_QUOTED)[0].strip() or type(error).__name__
        text = f"Redis at {self.server}: {reply}"
        if isinstance(error, exceptions.ResponseError) and not _is_for_later(error, reply):
            return RedisRefusedError(text, reply)
        return TransportUnavailableError(text)


class RedisRefusedError(TransportError):
    """The server replied with an error; ``reply`` is its text, which begins with the code of the error."""

    def __init__(self, text: str, reply: str) -> None:
        super().__init__(text)
        self.reply = reply


def _may_be_quoted(error: Exception) -> bool:
    """Whether it is an error of the server or the network, and not one about a reply that cannot be read.

    The text of the latter may hold a part of a message, so it must not get into logs.
    """
    return isinstance(error, exceptions.RedisError | OSError) and not isinstance(error, exceptions.InvalidResponse)


def _cause(error: Exception) -> Exception | None:
    return error if _may_be_quoted(error) else None


def _is_for_later(error: exceptions.ResponseError, reply: str) -> bool:
    return isinstance(error, _LATER_KINDS) or reply.partition(" ")[0] in _LATER_WORDS


def _server_of(url: str) -> str:
    """Return the host and port of a URL, without user and password; refuse one that cannot be parsed."""
    try:
        options: dict[str, Any] = dict(driver.connection.parse_url(url))
    except (ValueError, TypeError, AttributeError):
        # Without the driver's error, which may quote the password.
        raise ConfigurationError(
            "the Redis URL cannot be read; write redis://user:password@host:6379/0, or rediss:// for TLS, "
            "with special characters as %XX"
        ) from None
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
