"""Entry: the verbs of an app for operators: schedules, dead letters, progress, counts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal

import msgspec

from onefold import limits
from onefold.app.base import AppBase
from onefold.clock import MICROSECONDS
from onefold.errors import ConfigurationError
from onefold.handlers.environment import Environment
from onefold.handlers.threads import Threads
from onefold.operations import dead_letters, runs
from onefold.operations.chain import Chain, read_chain
from onefold.operations.dead_letters import DeadGroup, DeadLetter
from onefold.operations.preflight import Advance, Problem, preflight
from onefold.schedules.plan import Catchup
from onefold.schedules.register import Schedule, check_policy, template_of
from onefold.schedules.timetable import make_timetable
from onefold.store import Counts, Progress, Query, Record
from onefold.tasks.task import Call
from onefold.transactions.app_transaction import refuse_inside


class OperatorVerbs(AppBase):
    """The part of ``App`` for operators; see there."""

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
        """Make a schedule at run time, or change the one of this name; see ``recurring`` for the options.

        When it returns, the schedule is durable; calling it again with the same options changes nothing.  No past fire
        time fires.  Workers in other processes follow it within a minute.
        """
        refuse_inside("schedule()")
        timetable = make_timetable(expression, timezone=timezone, every=every, mode=mode, anchor=anchor)
        policy = check_policy(timetable, catchup, window)
        if not self.registry.knows(call.task):
            raise ConfigurationError(f"{call.task.name} belongs to another app; call schedule() of that app")
        return await self._schedule_register().add(name, template_of(call), timetable, *policy)

    async def unschedule(self, name: str) -> bool:
        """Remove a schedule; True when it was there.  Messages that it has sent stay.

        One that is declared in code comes back when the next worker with that code starts.
        """
        refuse_inside("unschedule()")
        return await self._schedule_register().remove(name)

    async def schedules(self) -> dict[str, Schedule]:
        """Return the schedules by name, with their last and next fire times: ``(await app.schedules())["report"]``."""
        refuse_inside("schedules()")
        return await self._schedule_register().all()

    # operators

    def dead_letters(self, *, queue: str | None = None, message_type: str | None = None) -> AsyncIterator[DeadLetter]:
        """Iterate over the dead letters, oldest first: ``async for letter in app.dead_letters()``."""
        return dead_letters.dead_letters(self.store, queue=queue, message_type=message_type)

    async def dead_groups(self, *, queue: str | None = None) -> list[DeadGroup]:
        """Return the number of dead letters of each type and kind of error, and since when; the largest first.

        It reads every dead letter, so call it once a minute and not for every request; ``count`` is cheap.
        """
        return await dead_letters.dead_groups(self.store, queue=queue)

    async def redrive(self, ids: str | Sequence[str], *, actor: str, reason: str) -> list[str]:
        """Reopen one or several dead letters in one commit; returns the ids that this call reopened.

        A saga that was undone is not reopened; see ``restart``.
        """
        refuse_inside("redrive()")
        return await dead_letters.redrive(self.store, ids, actor=actor, reason=reason)

    async def cancel(self, message_id: str, *, actor: str, reason: str) -> bool:
        """Cancel a message; one that runs can no longer commit, and its handler is cancelled within about a second.

        A coroutine gets ``CancelledError``, a thread ``HandlerTimeoutError``, a process is killed.
        A saga is undone: its steps are undone, and then it is a dead letter with the reason ``compensated``.
        """
        refuse_inside("cancel()")
        return await runs.cancel(self.store, message_id, actor=actor, reason=reason)

    async def progress(self, message_id: str) -> Progress | None:
        """Return the progress that a message's handler last reported; None if it has reported none.

        ``stalled`` is true when it runs and has reported nothing for longer than the ``beat_within`` of its task, or a
        minute if the task has none.
        """
        found = (await self.store.progress([message_id])).get(message_id)
        if found is None or not found.running:
            return found
        task = self.registry.tasks.get(found.message_type)
        within = limits.BEAT_SECONDS if task is None or task.beat_seconds is None else task.beat_seconds
        silent = await self.store.now() - found.beat_at
        return msgspec.structs.replace(found, stalled=silent > within * MICROSECONDS)

    async def chain(self, message_id: str) -> Chain | None:
        """Return what caused a message and what it caused, as a tree; None when there is no such message."""
        return await read_chain(self.store, message_id)

    async def find(self, query: Query) -> list[Record]:
        """Return one page of messages with their states."""
        return await self.store.find(query)

    async def count(self) -> dict[str, Counts]:
        """Return, per queue, the numbers of messages that wait, that run and that are dead."""
        return await self.store.count()

    async def preflight(self, advance: Advance | None = None) -> list[Problem]:
        """Check everything that is open against the handlers of this app, and return what would break.

        An empty list says that this code can continue all of it.  Nothing is called, sent or written.
        Messages are read page by page, so some that are sent meanwhile may be missed: running code sent those.
        ``advance`` is called with the number of messages that were checked since its last call.
        """
        threads = Threads()
        try:
            environment = Environment(
                self.store, self.clock, self._chance, self.prepare, str(self.origin), None, threads
            )
            return await preflight(self.registry, environment, (await self.schedules()).values(), advance)
        finally:
            threads.close()
