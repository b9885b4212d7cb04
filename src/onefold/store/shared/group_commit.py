"""Concurrent calls share one flush, so that a hundred senders cost one commit.

No caller waits for others: the first is flushed at once, and those that come meanwhile are flushed together next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from onefold.current import outside

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class GroupCommit(Generic[Item, Answer]):
    """Collects items while a flush is under way, then flushes them together.

    When a flush of several callers fails, each caller's items are flushed alone, so one cannot fail another.
    """

    def __init__(self, flush: Callable[[list[Item]], Awaitable[list[Answer]]], *, most: int) -> None:
        self._flush = flush
        self._most = most
        self._waiting: deque[tuple[Sequence[Item], asyncio.Future[list[Answer]]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def add(self, items: Sequence[Item]) -> list[Answer]:
        """Return the answers to these items once their flush is durable.

        A caller that is cancelled here does not take its items back: they may still be flushed.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Answer]] = loop.create_future()
        self._waiting.append((items, answer))
        if self._task is None:
            self._task = loop.create_task(self._drain(), context=outside())
        return await answer

    async def _drain(self) -> None:
        try:
            while self._waiting:
                together = [self._waiting.popleft()]
                size = len(together[0][0])
                while self._waiting and size + len(self._waiting[0][0]) <= self._most:
                    together.append(self._waiting.popleft())
                    size += len(together[-1][0])
                await self._flush_together(together)
        finally:
            self._task = None

    async def _flush_together(self, together: list[tuple[Sequence[Item], asyncio.Future[list[Answer]]]]) -> None:
        try:
            answers = await self._flush([item for items, _ in together for item in items])
        except Exception as error:
            if len(together) > 1:
                for one in together:
                    await self._flush_together([one])
            elif not together[0][1].done():
                together[0][1].set_exception(error)
            return
        except BaseException:
            for _, future in together:
                future.cancel()
            raise
        start = 0
        for items, future in together:
            if not future.done():
                future.set_result(answers[start : start + len(items)])
            start += len(items)

    async def close(self) -> None:
        """Wait for what is under way."""
        if self._task is not None:
            await asyncio.wait([self._task])
