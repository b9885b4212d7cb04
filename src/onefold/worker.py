"""Stage 6, lease: claim, run, renew, settle, and stop without losing anything.

One claimer keeps a short supply of leases, runners work through it, as many as are needed up to a limit,
a settler ends what they finished in batches, and one renewer keeps every lease held here alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from onefold import limits
from onefold.batch import goes_alone
from onefold.claiming import Claimer
from onefold.clock import MICROSECONDS, give_way
from onefold.errors import LeaseLostError, StoreUnavailableError
from onefold.execution import Execution
from onefold.fleet import Roll, WorkerRecord, WorkerSettings, describe
from onefold.purging import keep_purged
from onefold.registry import Task
from onefold.renewing import Renewer
from onefold.settling import UNSETTLED_MAX, Held, Settler
from onefold.slots import Slots
from onefold.store import HandBack, Lane, Lease, Outcome
from onefold.ticker import Ticker

logger = logging.getLogger("onefold")

#: Messages a runner runs before it lets others have the event loop.
_IN_A_ROW_MAX = 32

R = TypeVar("R")


class Worker:
    """Takes messages from a store and runs their handlers until it is told to stop.

    ``slots`` is where it publishes what it begins, for a supervisor that outlives it.
    """

    def __init__(
        self,
        execution: Execution,
        settings: WorkerSettings,
        slots: Slots | None = None,
        ticker: Ticker | None = None,
    ) -> None:
        self._execution = execution
        self._store = execution.store
        self._clock = execution.clock
        self._settings = settings
        self._slots = slots
        # A process for suspects may die at any moment; the others tick.
        self._ticker = None if settings.lane is Lane.PROBATION else ticker
        self._claimer = Claimer(self._store, self._clock, execution.registry.types(), settings, self._accept)
        self._batched = {task.name: task for task in execution.registry.tasks.values() if task.handler.batch}
        self._held: dict[str, Held] = {}
        self._supply: deque[Held] = deque()
        self._suspects: deque[Held] = deque()
        #: In the order in which they were made, so that a simulation repeats itself.
        self._runners: dict[asyncio.Task[None], None] = {}
        #: A runner was made that has not begun.
        self._runner_comes = False
        self._running = 0
        self._changed = asyncio.Event()
        self._settler = Settler(execution, self._forget)
        self._renewer = Renewer(self._store, self._clock, self._held, settings.lease_seconds, slots)
        self._stopping = asyncio.Event()
        self._broken: asyncio.Future[None] | None = None
        self._started_at = self._clock.now()
        self._done_alone = 0

    @property
    def done(self) -> int:
        """How many messages were settled."""
        return self._done_alone + self._settler.done

    def _describe(self) -> WorkerRecord:
        return describe(self._settings, self._started_at, self._clock.now(), running=self._running, settled=self.done)

    def stop(self) -> None:
        """Ask for a graceful stop: claim nothing more, finish what runs, hand back what does not finish in time."""
        self._stopping.set()
        self._changed.set()

    def wake_ticker(self) -> None:
        """Look at once for what recurs: a schedule was changed in this process."""
        if self._ticker is not None:
            self._ticker.wake()

    async def run(self) -> None:
        """Work until stopped, or until nothing is left to do.

        When it returns, every message it had is settled or handed back.
        """
        self._broken = asyncio.get_running_loop().create_future()
        others = [
            asyncio.create_task(self._settler.run(), name="onefold-settler"),
            asyncio.create_task(self._renewer.run(), name="onefold-renewer"),
        ]
        if self._settings.alone and not self._settings.until_idle:
            roll = Roll(self._store, self._clock)
            others.append(asyncio.create_task(keep_purged(self._store, self._clock), name="onefold-purger"))
            others.append(asyncio.create_task(roll.vouch(self._describe), name="onefold-voucher"))
        if self._ticker is not None and not self._settings.until_idle:
            others.append(asyncio.create_task(self._ticker.run(), name="onefold-ticker"))
        claimer = asyncio.create_task(self._claim(), name="onefold-claimer")
        stopping = asyncio.create_task(self._stopping.wait(), name="onefold-stopping")
        try:
            await self._first_of(claimer, stopping, *others)
            await _cancel([claimer, stopping])
            others.append(asyncio.create_task(self._wind_down(), name="onefold-stopper"))
            await self._first_of(*others)
        finally:
            await _cancel([claimer, stopping])
            await self._stop_runners()
            await _cancel(others)
            self._broken.cancel()

    async def _first_of(self, *tasks: asyncio.Task[Any]) -> None:
        """Return when one of these is over; what is wrong with any of them, or with a runner, is raised here."""
        assert self._broken is not None
        done, _ = await asyncio.wait([*tasks, self._broken], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and (error := task.exception()):
                raise error

    # claiming

    async def _claim(self) -> None:
        if self._ticker is not None and self._settings.until_idle:
            await self._ticker.catch_up()
        while not self._stopping.is_set():
            if self._suspects:
                await self._let_a_suspect_run()
                continue
            wanted = self._wanted()
            if wanted <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            # What is settled while the store is asked may leave new messages that its answer does not know of yet.
            was_busy = self._busy
            if await self._claimer.claim(wanted) != 0:
                continue
            if not self._settings.until_idle:
                await self._wait()
            elif self._busy:
                self._changed.clear()
                await self._changed.wait()
            elif not was_busy:
                return

    def _wanted(self) -> int:
        """How many to claim: what is free now, and what will start within a moment at the measured rate."""
        if self._settings.lane is Lane.PROBATION:
            # One at a time, and settled before the next is claimed: what waits beside a suspect may die with it.
            return 0 if self._busy else 1
        ahead = self._claimer.ahead
        free = self._settings.concurrency - self._running
        wanted = min(max(free, ahead), limits.CLAIM_MAX) - len(self._supply)
        room = UNSETTLED_MAX - len(self._settler)
        # Small claims cost as much as large ones, so wait until half of the supply is used up.
        return min(wanted, room) if len(self._supply) <= ahead // 2 else 0

    def _accept(self, leases: list[Lease], asked_at: int) -> None:
        until = asked_at + round(self._settings.lease_seconds * MICROSECONDS)
        for lease in leases:
            held = self._held[lease.id] = Held(lease, until)
            (self._suspects if self._is_suspect(lease) else self._supply).append(held)
        self._call_runner()

    def _is_suspect(self, lease: Lease) -> bool:
        """Whether it must run alone here; in a lane the supervisor sees to that, and in a process it is alone."""
        if lease.crashes < limits.SUSPECT_AFTER or self._settings.lane is not Lane.ANY:
            return False
        return not self._execution.registry.handler(lease.envelope).handler.isolate

    async def _let_a_suspect_run(self) -> None:
        """Let one message that may have killed workers run with nothing beside it, so that no other is blamed."""
        await self._quiet_runners()
        self._supply.append(self._suspects.popleft())
        self._call_runner()
        await self._quiet_runners()

    async def _quiet_runners(self) -> None:
        while self._supply or self._running:
            self._changed.clear()
            await self._changed.wait()

    async def _wait(self) -> None:
        try:
            await self._store.wait(self._settings.queues, timeout=limits.POLL_SECONDS)
        except StoreUnavailableError:
            await self._clock.sleep(limits.POLL_SECONDS)

    @property
    def _busy(self) -> bool:
        return bool(self._running or self._supply or self._suspects or len(self._settler))

    # running

    def _call_runner(self) -> None:
        """Have one more runner if there is something for it to do; each calls the next when it begins.

        So there are as many as handlers that wait at the same time: one for a thousand messages that are quickly done,
        a thousand for as many that take long.
        """
        if self._supply and not self._runner_comes and len(self._runners) < self._settings.concurrency:
            self._runner_comes = True
            runner = asyncio.create_task(self._run_supply(), name="onefold-runner")
            self._runners[runner] = None
            runner.add_done_callback(self._dismiss_runner)

    def _dismiss_runner(self, runner: asyncio.Task[None]) -> None:
        del self._runners[runner]
        if not runner.cancelled() and (error := runner.exception()) and self._broken and not self._broken.done():
            self._broken.set_exception(error)

    async def _run_supply(self) -> None:
        self._runner_comes = False
        runner, in_a_row = asyncio.current_task(), 0
        while self._supply:
            held = self._supply.popleft()
            if not self._supply:
                # There may be more places than one claim fills, and those who run may take their time.
                self._changed.set()
            if held.lease.envelope.message_type in self._batched:
                await self._run_batch(held, runner)
            else:
                self._call_runner()
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
        self._running += 1
        self._claimer.started += 1
        held.runner = runner
        try:
            if self._is_suspect(lease):
                await self._mark_started(lease)
            run = self._execution.run(held)
            outcome = await (run if self._slots is None else self._run_published(run, [held], self._slots))
        except LeaseLostError as error:
            logger.warning("lease_lost message_id=%s error=%s", lease.id, error)
            self._forget(held)
        except StoreUnavailableError as error:
            logger.warning("store_unavailable doing=start message_id=%s error=%s", lease.id, error)
            self._settler.add(held, HandBack())
        except asyncio.CancelledError:
            if not held.lost:
                raise
            # This worker has cancelled the handler, its lease being gone or its time to stop over.
            _uncancel()
            logger.warning("lease_lost message_id=%s handler cancelled", lease.id)
            self._drop(held)
        else:
            await self._finish(held, outcome)
        finally:
            held.runner = None
            self._running -= 1
            self._changed.set()

    async def _run_batch(self, first: Held, runner: asyncio.Task[None] | None) -> None:
        """Run a message together with others of its task.

        When one of them is lost, or the store cannot be reached, all are handed back: the fence decides about each.
        """
        self._running += 1
        together = [first]
        try:
            together = await self._fill_batch(first, self._batched[first.lease.envelope.message_type])
            self._call_runner()
            self._claimer.started += len(together)
            for held in together:
                held.runner = runner
            if self._is_suspect(first.lease):
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
            self._running -= 1
            self._changed.set()

    async def _fill_batch(self, first: Held, task: Task[Any, Any]) -> list[Held]:
        """Return a message with others of its task: those that are here, and those that the store has at once."""
        most = task.handler.batch
        if self._settings.lane is Lane.PROBATION or self._is_suspect(first.lease) or goes_alone(task, first.lease):
            most = 1
        together = [first, *self._take_supply(task, most - 1)]
        if len(together) < most and not self._stopping.is_set():
            await self._claimer.claim_alike(task.name, most - len(together))
            together += self._take_supply(task, most - len(together))
        now = self._clock.steady()
        for held in [held for held in together if held.lost or held.until <= now]:
            self._drop(held)
            together.remove(held)
        return together

    def _take_supply(self, task: Task[Any, Any], most: int) -> list[Held]:
        """Take messages of one task out of the supply, but none that is to go alone."""
        alike = (held for held in self._supply if held.lease.envelope.message_type == task.name)
        taken = list(islice((held for held in alike if not goes_alone(task, held.lease)), most))
        for held in taken:
            self._supply.remove(held)
        return taken

    def _hand_back(self, together: list[Held], error: BaseException) -> None:
        first = together[0].lease if together else None
        logger.warning(
            "batch_handed_back messages=%d message_id=%s error=%r", len(together), first and first.id, error
        )
        for held in together:
            self._drop(held)

    async def _mark_started(self, lease: Lease) -> None:
        """Write down that a suspect begins: should this process die now, the suspect is to blame."""
        if not (await self._store.extend([lease], lease=self._settings.lease_seconds, starting=True))[0]:
            raise LeaseLostError(f"message {lease.id} was taken over before it began")

    async def _run_published(self, run: Coroutine[Any, Any, R], together: Sequence[Held], slots: Slots) -> R:
        """Run a handler with its beginning and its end published: should this process die, it is known to blame."""
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
            self._done_alone += 1
            self._forget(held)
        elif self._execution.registry.handler(held.lease.envelope).settle == "now":
            await self._settler.settle([(held, outcome)])
        else:
            self._settler.add(held, outcome)

    def _forget(self, held: Held) -> None:
        # The same worker may have claimed its own message again meanwhile; that lease is another.
        if self._held.get(held.lease.id) is held:
            del self._held[held.lease.id]
        if held.slot is not None and self._slots is not None:
            self._slots.clear(held.slot)
            self._slots.count(self.done)
            held.slot = None
        self._changed.set()

    def _drop(self, held: Held) -> None:
        """Let go of a message that is no longer ours, or no longer surely so."""
        if held.taken_over:
            self._forget(held)
        else:
            # Time is up by our own reckoning, yet the store may still wait for us: the fence decides.
            self._settler.add(held, HandBack())

    # stopping

    async def _wind_down(self) -> None:
        unstarted = [*self._supply, *self._suspects]
        self._supply.clear()
        self._suspects.clear()
        await self._settler.hand_back(unstarted)
        try:
            async with asyncio.timeout(self._settings.stop_seconds):
                await self._quiet()
                await self._execution.finish_late()
        except TimeoutError:
            await self._stop_runners()
            await self._settler.hand_back([held for held in self._held.values() if not held.settling])
            await self._quiet()

    async def _stop_runners(self) -> None:
        """Cancel what still runs; marked first, so that no handler takes it for something of its own."""
        for held in self._held.values():
            held.lost = held.lost or held.runner is not None
        await _cancel([*self._runners])

    async def _quiet(self) -> None:
        while self._busy:
            self._changed.clear()
            await self._changed.wait()


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
