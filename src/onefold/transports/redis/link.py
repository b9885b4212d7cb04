"""Connecting to Redis: looked at before it is used, tried again at a bounded rate, and never in the driver's words."""

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
from onefold.clock import MICROSECONDS, Clock
from onefold.errors import ConfigurationError, OnefoldError, TransportError, TransportUnavailableError
from onefold.transport import Durability, Outage
from onefold.transports.redis.durability import judge, read_settings
from onefold.transports.redis.parser import BoundedParser

T = TypeVar("T")

logger = logging.getLogger("onefold")

#: A server that does not answer within this time will not; a pull that waits for entries takes less.
ANSWER_SECONDS = 10.0
CONNECT_SECONDS = 5.0

#: What a server answers that takes nothing now; the driver has classes for some of it, the first word tells the rest.
_LATER_KINDS = (
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
_LATER_WORDS = frozenset({"MISCONF", "NOREPLICAS", "BUSY", "UNKILLABLE"})
#: Servers repeat the beginning of a command they do not know, which may be a part of somebody's message.
_QUOTED = ", with args beginning with"


@dataclass(slots=True, eq=False)
class _Session:
    """A client of the driver, and how many calls are under way on it.

    Closing it under them would have the driver stumble over connections that are gone, so the last one does.
    """

    client: Any
    users: int = 0
    is_over: bool = False

    async def leave_to_the_last(self) -> None:
        self.is_over = True
        if self.users == 0:
            with suppress(exceptions.RedisError, OSError, RuntimeError):
                await self.client.aclose()


class Link:
    """One server: its client as long as it works, and what entries on it survive.

    While it cannot be reached, one caller tries on behalf of all, after a pause that grows; the others are refused
    at once, so that no handler waits for a server that is away.
    """

    def __init__(
        self, url: str, *, clock: Clock, chance: random.Random, allow_volatile: bool, said: Durability | None
    ) -> None:
        self._url = url
        self._clock = clock
        self._allow_volatile = allow_volatile
        self._said = said
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting = asyncio.Lock()
        self._session: _Session | None = None
        self._outage = Outage(clock, chance, limits.TRANSPORT_PAUSE_SECONDS, limits.TRANSPORT_PAUSE_SECONDS_MAX)
        self._closed_until = 0
        #: Whether it was connected to, or tried to be, since it was opened.
        self._is_begun = False
        self.durability: Durability = "nothing"
        self.server = _server_of(url)

    async def open(self) -> None:
        """Connect, unless there is a connection, and see what entries on this server survive."""
        await self._connected()

    async def close(self) -> None:
        """Let go of the connections; the next call makes new ones."""
        session, self._session, self._is_begun = self._session, None, False
        if session is not None:
            await session.leave_to_the_last()

    async def call(self, function: Callable[..., Awaitable[T]], *arguments: object) -> T:
        """Have a function talk to the server and read its answer.  Raises ``RefusedError`` with what it said.

        Raises ``TransportUnavailableError`` when the server is away, or when its answer cannot be read, whatever is
        wrong with it: what was asked may have been done.
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
                self._shut()
                # It is looked at again before it is trusted again: it may have been started with other settings.
                self._session, session.is_over = None, True
            raise failure from _cause(error)
        finally:
            session.users -= 1
            if session.is_over:
                await session.leave_to_the_last()
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
                self._refuse_early()
                self._session = await self._connect()
            return self._session

    def _refuse_early(self) -> None:
        if self._clock.steady() < self._closed_until:
            raise TransportUnavailableError(f"Redis at {self.server} could not be reached and is tried again soon")

    def _shut(self) -> None:
        pause = self._outage.pause()
        self._closed_until = self._clock.steady() + round(pause * MICROSECONDS)

    async def _connect(self) -> _Session:
        client: Any = driver.Redis.from_url(
            self._url,
            # What is received differs between the two protocols; this one every server speaks.
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
            await _Session(client).leave_to_the_last()
            if isinstance(error, OnefoldError) or not isinstance(error, Exception):
                raise
            self._shut()
            raise self._translate(error) from _cause(error)
        finally:
            self._is_begun = True
        return _Session(client)

    def _judge(self, found: Mapping[str, str]) -> None:
        """Look whether the server keeps what it accepts.

        One that does not when it is first connected to was set up wrongly, and the worker that starts is refused.
        Later it is an outage like any other: nothing is read from it or written to it until it is durable again.
        """
        try:
            self.durability = judge(found, said=self._said, allow_volatile=self._allow_volatile, server=self.server)
        except ConfigurationError as error:
            if not self._is_begun:
                raise
            self._shut()
            raise TransportUnavailableError(str(error)) from None
        if self.durability == "all but the last seconds":
            logger.warning("transport_may_lose_seconds server=%s; set `appendfsync always`", self.server)

    def _translate(self, error: Exception) -> TransportError:
        if not _is_told(error):
            kind = type(error).__name__
            return TransportUnavailableError(f"Redis at {self.server}: its answer cannot be read ({kind})")
        said = str(error).partition(_QUOTED)[0].strip() or type(error).__name__
        text = f"Redis at {self.server}: {said}"
        if isinstance(error, exceptions.ResponseError) and not _is_for_later(error, said):
            return RefusedError(text, said)
        return TransportUnavailableError(text)


class RefusedError(TransportError):
    """The server understood and said no; ``said`` begins with its word for why."""

    def __init__(self, text: str, said: str) -> None:
        super().__init__(text)
        self.said = said


def _is_told(error: Exception) -> bool:
    """Whether the server or the network has said what is wrong; if not, the answer made no sense.

    Of an answer that makes no sense nothing is repeated: it may quote a part of a message.
    """
    return isinstance(error, exceptions.RedisError | OSError) and not isinstance(error, exceptions.InvalidResponse)


def _cause(error: Exception) -> Exception | None:
    return error if _is_told(error) else None


def _is_for_later(error: exceptions.ResponseError, said: str) -> bool:
    return isinstance(error, _LATER_KINDS) or said.partition(" ")[0] in _LATER_WORDS


def _server_of(url: str) -> str:
    """Return where a URL leads, without what is secret in it; refuse one that cannot be read."""
    try:
        options: dict[str, Any] = dict(driver.connection.parse_url(url))
    except (ValueError, TypeError, AttributeError):
        # What the driver says may quote the password.
        raise ConfigurationError(
            "the Redis URL cannot be read; write redis://user:password@host:6379/0, or rediss:// for TLS, "
            "with special characters as %XX"
        ) from None
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
