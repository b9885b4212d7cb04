"""Stage 6, lease: running what was claimed, as many handlers at once as wait at the same time, up to a limit."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, TypeVar

from onefold import limits
from onefold.batch import goes_alone
from onefold.claiming import Claimer
from onefold.clock import MICROSECONDS, give_way
from onefold.errors import LeaseLostError, StoreUnavailableError
from onefold.execution import Execution
from onefold.fleet import WorkerSettings
from onefold.gate import limited_names, name_of
from onefold.settling import Held, Settler, log_lost
from onefold.slots import Slots
from onefold.store import HandBack, Lane, Lease, Outcome
from onefold.task import Task

logger = logging.getLogger("onefold")

#: Messages a runner runs before it lets others have the event loop.
_IN_A_ROW_MAX = 32

R = TypeVar("R")


class Runners:
    """Work through ``supply`` until it is empty; ``changed`` is set whenever somebody may have waited for it.

    What they finish goes to the settler, and ``forget`` is called with what is over already.
    """

    def __init__(
        self,
        execution: Execution,
        settings: WorkerSettings,
        slots: Slots | None,
        claimer: Claimer,
        settler: Settler,
        changed: asyncio.Event,
        forget: Callable[[Held], None],
    ) -> None:
        self._execution = execution
        self._store = execution.store
        self._clock = execution.clock
        self._settings = settings
        self._slots = slots
        self._claimer = claimer
        self._settler = settler
        self._changed = changed
        self._forget = forget
        self._batched = {task.name: task for task in execution.registry.tasks.values() if task.handler.batch}
        self._limited = limited_names(execution.registry.gatings)
        #: In the order in which they were made, so that a simulation repeats itself.
        self._tasks: dict[asyncio.Task[None], None] = {}
        #: Runners whose handlers went on although they were cancelled.
        self._abandoned: set[asyncio.Task[None]] = set()
        #: One was made that has not begun.
        self._one_comes = False
        self.supply: deque[Held] = deque()
        self.running = 0
        #: Messages that were settled in their handler's own commit.
        self.done_alone = 0
        #: Nothing more is to be claimed.
        self.stopping = False
        #: Has the error of a runner that failed, which is a defect.
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def busy(self) -> bool:
        """Whether a handler runs or could; those that were abandoned are not waited for."""
        return self.running > len(self._abandoned) or bool(self.supply)

    def is_suspect(self, lease: Lease) -> bool:
        """Whether it must run alone here; in a lane the supervisor sees to that, and in a process it is alone."""
        if lease.crashes < limits.SUSPECT_AFTER or self._settings.lane is not Lane.ANY:
            return False
        return not self._execution.registry.handler(lease.envelope).handler.isolate

    async def cancel(self) -> set[asyncio.Task[None]]:
        """Cancel all runners with their handlers; return those that did not end within ``HARD_TIMEOUT_GRACE``.

        A handler can swallow its cancellation and go on for ever.  Nothing can end it but the end of its process, and
        a stop does not wait for it.
        """
        self.stopping = True
        runners = [runner for runner in self._tasks if runner not in self._abandoned]
        for runner in runners:
            runner.cancel()
        if runners:
            self._abandoned |= (await asyncio.wait(runners, timeout=limits.HARD_TIMEOUT_GRACE))[1]
        return self._abandoned

    def call(self) -> None:
        """Have one more runner if there is something for it to do; each calls the next when it begins.

        So there are as many as handlers that wait at the same time: one for a thousand messages that are quickly done,
        a thousand for as many that take long.
        """
        if self.supply and not self._one_comes and len(self._tasks) < self._settings.concurrency:
            self._one_comes = True
            runner = asyncio.create_task(self._run_supply(), name="onefold-runner")
            self._tasks[runner] = None
            runner.add_done_callback(self._dismiss)

    def _dismiss(self, runner: asyncio.Task[None]) -> None:
        del self._tasks[runner]
        self._abandoned.discard(runner)
        if runner.cancelled():
            return
        if (error := runner.exception()) is None:
            # Between its last look at the supply and now it still took a place, so a call may have been in vain.
            self.call()
        elif not self.broken.done():
            self.broken.set_exception(error)

    async def _run_supply(self) -> None:
        self._one_comes = False
        runner, in_a_row = asyncio.current_task(), 0
        while self.supply:
            held = self.supply.popleft()
            if not self.supply:
                # There may be more places than one claim fills, and those who run may take their time.
                self._changed.set()
            if held.lease.envelope.message_type in self._batched:
                await self._run_batch(held, runner)
            else:
                self.call()
                await self._run_one(held, runner)
            in_a_row += 1
            if in_a_row == _IN_A_ROW_MAX:
                # Handlers that never wait would keep the claimer, the renewer and a stop from their turn.
                in_a_row = 0
                await give_way()

    async def _run_one(self, held: Held, runner: asyncio.Task[None] | None) -> None:
        lease = held.lease
        if held.lost or held.until <= self._clock.steady():
            # After a standstill nobody has asked yet whether it is still ours, and others may have it by now.
            self._drop(held)
            return
        self.running += 1
        self._claimer.started += 1
        held.runner = runner
        try:
            if self.is_suspect(lease):
                await self._mark_started(lease)
            run = self._execution.run(held)
            outcome = await (run if self._slots is None else self._run_published(run, [held], self._slots))
        except LeaseLostError as error:
            self._forget(held)
            await log_lost(self._store, [lease], error)
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=start message_id=%s error=%s", lease.id, error)
            self._settler.add(held, HandBack())
        except asyncio.CancelledError:
            if not held.lost:
                raise
            # This worker has cancelled the handler, its lease being gone or its time to stop over.
            _uncancel()
            self._drop(held)
            if self.stopping and not held.taken_over:
                logger.info("stopped message_id=%s message_type=%s", lease.id, lease.envelope.message_type)
            else:
                await log_lost(self._store, [lease], "handler cancelled")
        else:
            await self._finish(held, outcome)
        finally:
            held.runner = None
            self.running -= 1
            self._changed.set()

    async def _run_batch(self, first: Held, runner: asyncio.Task[None] | None) -> None:
        """Run a message together with others of its task.

        When one of them is lost, or the store cannot be reached, all are handed back: the fence decides about each.
        """
        self.running += 1
        together = [first]
        try:
            together = await self._fill_batch(first, self._batched[first.lease.envelope.message_type])
            self.call()
            self._claimer.started += len(together)
            for held in together:
                held.runner = runner
            if self.is_suspect(first.lease):
                await self._mark_started(first.lease)
            run = self._execution.run_batch(together)
            left = await (run if self._slots is None else self._run_published(run, together, self._slots))
        except (LeaseLostError, StoreUnavailableError) as error:
            self._hand_back(together, error)
        except asyncio.CancelledError as error:
            if not any(held.lost for held in together):
                raise
            _uncancel()
            self._hand_back(together, error)
        else:
            outcomes = {lease.id: outcome for lease, outcome in left}
            for held in together:
                await self._finish(held, outcomes.get(held.lease.id))
        finally:
            for held in together:
                held.runner = None
            self.running -= 1
            self._changed.set()

    async def _fill_batch(self, first: Held, task: Task[Any, Any]) -> list[Held]:
        """Return a message with others of its task: those that are here, and those that the store has at once."""
        most = task.handler.batch
        if self._settings.lane is Lane.PROBATION or self.is_suspect(first.lease) or goes_alone(task, first.lease):
            most = 1
        together = [first, *self._take(task, most - 1)]
        if len(together) < most and not self.stopping:
            await self._claimer.claim_alike(task.name, most - len(together))
            together += self._take(task, most - len(together))
        now = self._clock.steady()
        for held in [held for held in together if held.lost or held.until <= now]:
            self._drop(held)
            together.remove(held)
        return together

    def _take(self, task: Task[Any, Any], most: int) -> list[Held]:
        """Take messages of one task out of the supply, but none that is to go alone."""
        alike = (held for held in self.supply if held.lease.envelope.message_type == task.name)
        taken = list(islice((held for held in alike if not goes_alone(task, held.lease)), most))
        for held in taken:
            self.supply.remove(held)
        return taken

    def _hand_back(self, together: list[Held], error: BaseException) -> None:
        first = together[0].lease if together else None
        stopped = self.stopping and not any(held.taken_over for held in together)
        level = logging.INFO if stopped else logging.WARNING
        told = "stopping" if stopped else error
        logger.log(
            level, "batch_handed_back messages=%d message_id=%s error=%s", len(together), first and first.id, told
        )
        for held in together:
            self._drop(held)

    async def _mark_started(self, lease: Lease) -> None:
        """Write down that a suspect begins: should this process die now, the suspect is to blame."""
        if not (await self._store.extend([lease], lease=self._settings.lease_seconds, starting=True))[0]:
            raise LeaseLostError(f"message {lease.id} was taken over before it began")

    async def _run_published(self, run: Coroutine[Any, Any, R], together: Sequence[Held], slots: Slots) -> R:
        """Run a handler with its beginning and its end published: should this process die, it is known to blame."""
        if not together:
            return await run
        now, task = self._clock.steady(), self._execution.registry.handler(together[0].lease.envelope)
        # A handler in a process of its own is killed by this worker, which may have to wait for such a process first.
        seconds = None if task.handler.isolate else task.timeout_seconds
        deadline = 0 if seconds is None else now + round((seconds + limits.HARD_TIMEOUT_GRACE) * MICROSECONDS)
        for held in together:
            held.slot = slots.start(held.lease.id, held.lease.fence, at=now, deadline=deadline)
        try:
            return await run
        finally:
            for held in together:
                if held.slot is not None:
                    slots.finish(held.slot)

    async def _finish(self, held: Held, outcome: Outcome | None) -> None:
        if outcome is None:
            self.done_alone += 1
            self._forget(held)
        elif self._is_awaited(held.lease):
            await self._settler.settle([(held, outcome)])
        else:
            self._settler.add(held, outcome)

    def _is_awaited(self, lease: Lease) -> bool:
        """Whether its outcome is not to wait for others: its task says so, or somebody waits for its place."""
        if self._limited and lease.gate is not None and name_of(lease.gate) in self._limited:
            return True
        return self._execution.registry.handler(lease.envelope).settle == "now"

    def _drop(self, held: Held) -> None:
        """Let go of a message that is no longer ours, or no longer surely so."""
        if held.taken_over:
            self._forget(held)
        else:
            # Time is up by our own reckoning, yet the store may still wait for us: the fence decides.
            self._settler.add(held, HandBack())


async def cancel(tasks: Sequence[asyncio.Task[Any]], *, within: float | None = None) -> None:
    """Cancel these and wait until they are over, or for so many seconds: a commit cannot be cancelled half-way."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=within)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # looked at, so that it is not reported as forgotten


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
