"""Entry: what an app offers to the people who look after it: schedules, dead letters, progress, counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from onefold import inspection, limits
from onefold.chain import Chain, read_chain
from onefold.clock import MICROSECONDS
from onefold.errors import ConfigurationError
from onefold.inspection import DeadGroup, DeadLetter
from onefold.recurring import Keeper, Schedule, check_policy, template_of
from onefold.registry import Registry
from onefold.schedule import Catchup
from onefold.store import Counts, Progress, Query, Record, Store
from onefold.task import Call
from onefold.timetable import make_timetable
from onefold.transaction import refuse_inside


class OperatorVerbs:
    """The part of ``App`` for people; see there."""

    _registry: Registry

    @property
    def store(self) -> Store:
        """The open store."""
        raise NotImplementedError

    def _keeper(self) -> Keeper:
        raise NotImplementedError

    # recurring

    async def schedule(
        self,
        call: Call[Any],
        expression: str | None = None,
        /,
        *,
        name: str,
        timezone: str = "UTC",
        every: timedelta | float | None = None,
        mode: Literal["rate", "delay"] | None = None,
        anchor: datetime | None = None,
        catchup: Catchup | None = None,
        window: timedelta | float | None = None,
    ) -> Schedule:
        """Make a schedule at run time, or change the one of this name; see ``recurring`` for what the options mean.

        When it returns, the schedule is durable; saying the same again changes nothing.  Nothing of the past fires.
        Workers in other processes know of it within a minute.
        """
        refuse_inside("schedule()")
        timetable = make_timetable(expression, timezone=timezone, every=every, mode=mode, anchor=anchor)
        policy = check_policy(timetable, catchup, window)
        if not self._registry.knows(call.task):
            raise ConfigurationError(f"{call.task.name} belongs to another app; make its schedule there")
        return await self._keeper().add(name, template_of(call), timetable, *policy)

    async def unschedule(self, name: str) -> bool:
        """Forget a schedule; True when it was there.  What it has sent stays.

        One that is declared in code comes back with the next start of a worker that has it.
        """
        refuse_inside("unschedule()")
        return await self._keeper().remove(name)

    async def schedules(self) -> dict[str, Schedule]:
        """Return the schedules by name, with when they fired and will fire: ``(await app.schedules())["report"]``."""
        refuse_inside("schedules()")
        return await self._keeper().all()

    # people

    def dead_letters(self, *, queue: str | None = None, message_type: str | None = None) -> AsyncIterator[DeadLetter]:
        """Go through the dead letters, oldest first: ``async for letter in app.dead_letters()``."""
        return inspection.dead_letters(self.store, queue=queue, message_type=message_type)

    async def dead_groups(self, *, queue: str | None = None) -> list[DeadGroup]:
        """Return how many dead letters there are of each type and kind of error, and since when; the most first.

        Reads every dead letter: for people and for a scrape a minute, not for every request; ``count`` is cheap.
        """
        return await inspection.dead_groups(self.store, queue=queue)

    async def redrive(self, ids: str | Sequence[str], *, actor: str, reason: str) -> list[str]:
        """Reopen dead letters, or one, in one commit; returns the ids this call reopened.

        A saga that was undone is not reopened; see ``restart``.
        """
        refuse_inside("redrive()")
        return await inspection.redrive(self.store, ids, actor=actor, reason=reason)

    async def cancel(self, message_id: str, *, actor: str, reason: str) -> bool:
        """Take a message back; one that runs can no longer commit, and its handler is cancelled within about a second.

        A coroutine gets ``CancelledError``, a thread ``HandlerTimeoutError``, a process is killed.
        A saga is undone: what it has begun is taken back, and then it is a dead letter with the reason ``compensated``.
        """
        refuse_inside("cancel()")
        return await inspection.cancel(self.store, message_id, actor=actor, reason=reason)

    async def progress(self, message_id: str) -> Progress | None:
        """Return how far a message is, as its handler last said; None if it has said nothing.

        ``stalled`` says that it runs and gives no sign of life for longer than the ``beat_within`` of its task, or
        without that for longer than a minute.
        """
        found = (await self.store.progress([message_id])).get(message_id)
        if found is None or not found.running:
            return found
        task = self._registry.tasks.get(found.message_type)
        within = limits.BEAT_SECONDS if task is None or task.beat_seconds is None else task.beat_seconds
        silent = await self.store.now() - found.beat_at
        return msgspec.structs.replace(found, stalled=silent > within * MICROSECONDS)

    async def chain(self, message_id: str) -> Chain | None:
        """Return what caused a message and what came of it, as a tree; None when there is no such message any more."""
        return await read_chain(self.store, message_id)

    async def find(self, query: Query) -> list[Record]:
        """Return one page of messages with where they stand."""
        return await self.store.find(query)

    async def count(self) -> dict[str, Counts]:
        """Return, per queue, how many messages wait, run and are dead."""
        return await self.store.count()
