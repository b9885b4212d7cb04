"""The connection for reading, which no writer ever makes wait, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import apsw

from onefold.clock import Clock
from onefold.stores.sqlite.connection import BREAKING, Patience
from onefold.stores.sqlite.runner import Runner
from onefold.stores.sqlite.session import Row, Session

Answer = TypeVar("Answer")


class Reader:
    """One connection for reading; replaced before its next use when it broke."""

    def __init__(
        self, connect: Callable[[Patience], apsw.Connection], clock: Clock, runner: Runner, patience: Patience
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._runner = runner
        self._patience = patience
        self._session: Session | None = None

    async def open(self) -> None:
        """Connect."""
        await self.read(lambda _: None)

    async def read(self, operation: Callable[[Session], Answer]) -> Answer:
        """Run an operation that only reads."""
        return await self._runner.run(self._run, operation)

    async def close(self) -> None:
        """Let go of the file."""
        await self._runner.run(self._let_go)
        self._runner.close()

    def _run(self, operation: Callable[[Session], Answer]) -> Answer:
        if self._session is None:
            self._session = Session(self._connect(self._patience), self._clock)
        try:
            return operation(self._session)
        except BREAKING:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self._session is not None:
            with suppress(apsw.Error):
                self._session.connection.close(True)
            self._session = None


def fetch(session: Session, statement: str, parameters: Sequence[Any] | Mapping[str, Any]) -> list[Row]:
    """Run a read of the caller's; what it wrote outside a transaction would not be part of any promise."""
    session.connection.execute("PRAGMA query_only = ON")
    try:
        return session.connection.execute(statement, parameters).fetchall()
    finally:
        session.connection.execute("PRAGMA query_only = OFF")
