"""Stage 6, lease: tasks that run the claimed messages, one more whenever all others wait, up to a limit."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, TypeVar

from onefold import limits
from onefold.clock import MICROSECONDS, give_way
from onefold.errors import LeaseLostError, StoreUnavailableError
from onefold.handlers.batch import goes_alone
from onefold.handlers.lease import Held
from onefold.store import HandBack, Lane, Lease, Outcome
from onefold.store.gates import limited_names, name_of
from onefold.tasks.task import Task
from onefold.worker.claimer import Claimer
from onefold.worker.execution import Execution
from onefold.worker.settings import WorkerSettings
from onefold.worker.settler import Settler, log_lost
from onefold.worker.slots import Slots

logger = logging.getLogger("onefold")

#: Messages a runner runs before other tasks get the event loop.
_IN_A_ROW_MAX = 32

R = TypeVar("R")


class Runners:
    """Runs the messages in ``supply``; sets ``changed`` whenever one has ended or the supply is empty.

    Outcomes go to the settler; ``forget`` is called with leases whose outcome is committed or that were lost.
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
        #: A dictionary, because it keeps their order, so that a simulation repeats itself.
        self._tasks: dict[asyncio.Task[None], None] = {}
        #: Runners that went on after they were cancelled.
        self._abandoned: set[asyncio.Task[None]] = set()
        #: Whether a runner was created that has not begun.
        self._one_comes = False
        self.supply: deque[Held] = deque()
        self.running = 0
        #: How many messages were settled in their handler's own commit.
        self.done_alone = 0
        #: Whether the worker stops, so that nothing more is claimed.
        self.stopping = False
        #: Gets the error of a runner that failed, which is a defect.
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def busy(self) -> bool:
        """Whether a handler runs or waits to run, abandoned ones left out."""
        return self.running > len(self._abandoned) or bool(self.supply)

    def is_suspect(self, lease: Lease) -> bool:
        """Whether it must run alone; below a supervisor it has a lane for that, and isolated it has its own process."""
        if lease.crashes < limits.SUSPECT_AFTER or self._settings.lane is not Lane.ANY:
            return False
        return not self._execution.registry.handler(lease.envelope).handler.isolate

    async def cancel(self) -> set[asyncio.Task[None]]:
        """Cancel all runners with their handlers; return those that did not end within ``HARD_TIMEOUT_GRACE``.

        A handler can swallow its cancellation and go on for ever.  Only the end of its process ends it, so a stop does
        not wait for it.
        """
        self.stopping = True
        runners = [runner for runner in self._tasks if runner not in self._abandoned]
        for runner in runners:
            runner.cancel()
        if runners:
            self._abandoned |= (await asyncio.wait(runners, timeout=limits.HARD_TIMEOUT_GRACE))[1]
        return self._abandoned

    def call(self) -> None:
        """Start one more runner if there are messages for it; each runner calls this when it begins a message.

        So there are as many runners as handlers that wait at the same time: one for a thousand messages that never
        wait, a thousand for as many that do.
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
            # Until now it counted towards the concurrency, so a call since its last look may not have started one.
            self.call()
        elif not self.broken.done():
            self.broken.set_exception(error)

    async def _run_supply(self) -> None:
        self._one_comes = False
        runner, in_a_row = asyncio.current_task(), 0
        while self.supply:
            held = self.supply.popleft()
            if not self.supply:
                # The claimer may claim again while handlers run: there may be more places than one claim fills.
                self._changed.set()
            if held.lease.envelope.message_type in self._batched:
                await self._run_batch(held, runner)
            else:
                self.call()
                await self._run_one(held, runner)
            in_a_row += 1
            if in_a_row == _IN_A_ROW_MAX:
                # Otherwise handlers that never wait would keep the claimer, the renewer and a stop from running.
                in_a_row = 0
                await give_way()

    async def _run_one(self, held: Held, runner: asyncio.Task[None] | None) -> None:
        lease = held.lease
        if held.lost or held.until <= self._clock.steady():
            # After a standstill of the process the renewer has not asked yet whether another worker has taken it.
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
            # This worker cancelled the handler, because its lease was lost or the time for a graceful stop is over.
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

        When one of them is lost, or the store is unavailable, all are handed back, and the fence decides about each.
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
        """Return a message with others of its task, from the supply and from one more claim."""
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
        """Take messages of one task out of the supply, except those that must run alone."""
        alike = (held for held in self.supply if held.lease.envelope.message_type == task.name)
        taken = list(islice((held for held in alike if not goes_alone(task, held.lease)), most))
        for held in taken:
            self.supply.remove(held)
        return taken

    def _hand_back(self, together: list[Held], error: BaseException) -> None:
        first = together[0].lease if together else None
        stopped = self.stopping and not any(held.taken_over for held in together)
        level = logging.INFO if stopped else logging.WARNING
        reason = "stopping" if stopped else error
        logger.log(
            level, "batch_handed_back messages=%d message_id=%s error=%s", len(together), first and first.id, reason
        )
        for held in together:
            self._drop(held)

    async def _mark_started(self, lease: Lease) -> None:
        """Record that a suspect begins: if this process dies now, it counts as a crash of the suspect."""
        if not (await self._store.extend([lease], lease=self._settings.lease_seconds, starting=True))[0]:
            raise LeaseLostError(f"message {lease.id} was taken over before it began")

    async def _run_published(self, run: Coroutine[Any, Any, R], together: Sequence[Held], slots: Slots) -> R:
        """Run a handler; publish its start and end, so that the supervisor knows what ran when this process dies."""
        if not together:
            return await run
        now, task = self._clock.steady(), self._execution.registry.handler(together[0].lease.envelope)
        # An isolated handler is killed by this worker, and may wait for a free process before its time begins.
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
        """Whether its outcome is settled at once: its task says so, or other messages wait for its place at a gate."""
        if self._limited and lease.gate is not None and name_of(lease.gate) in self._limited:
            return True
        return self._execution.registry.handler(lease.envelope).settle == "now"

    def _drop(self, held: Held) -> None:
        """Give up a message that another claim owns, or may own by now."""
        if held.taken_over:
            self._forget(held)
        else:
            # Its lease is over by this worker's clock, but nothing may have claimed it yet; the fence decides.
            self._settler.add(held, HandBack())


async def cancel(tasks: Sequence[asyncio.Task[Any]], *, within: float | None = None) -> None:
    """Cancel these and wait until they end, or for ``within`` seconds: a commit under way is waited for."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=within)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not report it


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
