"""Runs a program as a real workflow or saga, with steps that call the provider, write rows and send messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Literal

from onefold.app import App
from onefold.clock import to_instant
from onefold.errors import CancelledMessageError, DeadError, Reject, SignalTimeoutError, StepError
from onefold.handlers.context import Context
from onefold.handlers.effects import Happened, NotHappened
from onefold.tasks.retry import RetryPolicy
from onefold.testing.programs.description import Act, Ask, Nest, Sleep, Tell, read, written
from onefold.testing.programs.hazards import Hazards
from onefold.testing.programs.outside import KEPT_SECONDS, Deed
from onefold.testing.programs.walking import Seen, told, walk
from onefold.workflows.steps import never
from onefold.workflows.workflow import Run

#: The column that numbers the rows, on each store.
_NUMBERS = {"sqlite": "INTEGER PRIMARY KEY", "postgres": "BIGINT GENERATED ALWAYS AS IDENTITY"}
ROWS = "SELECT run, place, op, seen, value FROM program_row ORDER BY number"
_INSERT = "INSERT INTO program_row (run, place, op, seen, value) VALUES (?, ?, ?, ?, ?)"

#: Steps give up soon; runs are retried until they end, however often their workers die.
_RETRY = RetryPolicy(max_attempts=3, base=0.3, cap=2.0)
_PATIENT = RetryPolicy(max_attempts=100, base=0.1, cap=1.0)


def table(store: Literal["sqlite", "postgres"]) -> str:
    """Return the statement that creates the table of the programs' rows."""
    return (
        f"CREATE TABLE program_row (number {_NUMBERS[store]}, run TEXT NOT NULL, place TEXT NOT NULL, "
        "op TEXT NOT NULL, seen TEXT NOT NULL, value BIGINT NOT NULL)"
    )


class Tasks:
    """The tasks that programs need: two workflows, a saga, and the tasks that they send."""

    def __init__(self, app: App, *, marker: str = "?") -> None:
        self._insert = _INSERT.replace("?", marker)
        self.leaf = app.task(name="leaf", subject="{place}", retry=_RETRY)(self._do)
        self.unleaf = app.task(name="unleaf", subject="{place}", retry=_RETRY)(self._undo)
        self.note = app.task(name="note", subject="{place}", retry=_RETRY)(self._do)
        self.event = app.topic("event", dict[str, str])
        app.on(self.event, name="heard", retry=_RETRY)(self._hear)
        self.program = app.workflow(name="program", key="{key}", subject="{key}", retry=_PATIENT)(self._run)
        self.nested = app.workflow(name="nested", retry=_PATIENT)(self._run_nested)
        self.deal = app.saga(name="deal", key="{key}", subject="{key}", retry=_PATIENT)(self._run)

    async def _run(self, run: Run, key: str, body: str) -> str:
        return await self._run_nested(run, body)

    async def _run_nested(self, run: Run, body: str) -> str:
        seen: Seen = {}
        await walk(read(body), seen, _Performing(run, self))
        # This step's record carries all decisions that are not in the journal yet.
        await run.options(undo=never("it does nothing")).step(finish)
        return told(seen)

    # writes a row in one commit with the record of a step or with the outcome of a message

    async def _do(self, ctx: Context, run_id: str, place: str, seen: str) -> int:
        return await self.write(ctx, run_id, place, "do", seen)

    async def _undo(self, ctx: Context, run_id: str, place: str, seen: str) -> int:
        return await self.write(ctx, run_id, place, "undo", seen)

    async def _hear(self, ctx: Context, event: dict[str, str]) -> int:
        return await self.write(ctx, event["run_id"], event["place"], "do", event["seen"])

    async def write(self, ctx: Context, run_id: str, place: str, op: str, seen: str) -> int:
        """Write a row, and fail or die before or after it."""
        hazards: Hazards = ctx.resources
        fate = hazards.fate(f"{run_id}/{place}/{op}", "fail", "retry", "reject", "late", "lost")
        hazards.suffer(fate)
        await hazards.risk(f"before the row of {op} {place}", fate)
        value = hazards.value()
        await ctx.execute(self._insert, run_id, place, op, seen, value)
        hazards.risk_death(f"after the row of {op} {place}")
        if fate == "lost":
            raise ValueError("it fails after its write")
        return value


async def finish() -> None:
    """Do nothing; recording this step also records all earlier decisions."""


class _Performing:
    """Performs the nodes of a program as calls of its run."""

    def __init__(self, run: Run, tasks: Tasks) -> None:
        self._run = run
        self._tasks = tasks
        self._hazards: Hazards = run.resources
        self._is_saga = run.message.saga

    async def act(self, node: Act, place: str, seen: Seen) -> Any:
        try:
            return await self._acting(node, place, told(seen))
        except StepError:
            return self._lost(node, "gone" if node.style == "command" else "failed")
        except DeadError:
            return self._lost(node, "dead")
        except CancelledMessageError:
            return self._lost(node, "gone")

    def _lost(self, node: Act, answer: str) -> str:
        """Re-raise in a saga, so that it is undone; a workflow continues with the answer."""
        if self._is_saga:
            raise
        return answer

    def _acting(self, node: Act, place: str, seen: str) -> Awaitable[Any]:
        run, given = self._run, (self._run.id, place, seen)
        if node.style == "child":
            return run.child(self._tasks.leaf, *given)
        options: dict[str, Any] = {"name": f"a{node.n}"}
        if node.timeout is not None:
            options["timeout"] = node.timeout
        if node.undo is not None:
            options["undo"] = self._undo_of(node)
        if node.style == "command":
            return run.options(**options).step(self._tasks.leaf, *given)
        step: Awaitable[Any] = run.options(retry=_RETRY, **options).step(self._function(node), *given)
        return step

    def _undo_of(self, node: Act) -> Any:
        if node.undo == "never":
            return never("there is nothing to take back")
        if node.undo == "task":
            return self._tasks.unleaf
        return self._take_back if node.style in ("async", "def") else self._tasks._undo

    async def _take_back(self, ctx: Context, run_id: str, place: str, seen: str) -> None:
        hazards = self._hazards
        fate = hazards.fate(f"{run_id}/{place}/undo", "fail", "late", "late", "late", "lost")
        hazards.suffer(fate)
        await hazards.risk(f"before undo {place}", fate)
        self._call(place, seen, ctx.fence, op="undo")
        await hazards.risk(f"after undo {place}", fate)
        if fate == "lost":
            raise TimeoutError("the answer was lost")

    def _function(self, node: Act) -> Callable[..., Any]:
        functions: dict[str, Callable[..., Any]] = {
            "async": self._provider(node),
            "def": self._plain_provider(node),
            "sql": self._tasks._do,
            "once": self._effect(node),
            "probed": self._effect(node),
            "kept": self._effect(node),
        }
        return functions[node.style]

    def _call(self, place: str, seen: str, fence: int, *, key: str | None = None, **options: Any) -> int:
        """Call the provider; a saga's calls say whether they do or undo, and carry no key."""
        hazards, run_id = self._hazards, self._run.id
        keeps = options.pop("keeps", None)
        key = ("" if self._is_saga else f"{run_id}/{place}/{seen}") if key is None else key
        options = {"op": "do", **options}
        deed = Deed(run_id, place, seen=seen, value=hazards.value(), key=key, fence=fence, at=hazards.now(), **options)
        return hazards.outside.call(deed, keeps=keeps)

    def _provider(self, node: Act) -> Callable[..., Any]:
        hazards, fence = self._hazards, self._run._replay.lease.fence

        async def provider(run_id: str, place: str, seen: str) -> int:
            fate = hazards.fate(f"{run_id}/{place}", "fail", "retry", "reject", "late", "lost")
            hazards.suffer(fate)
            await hazards.risk(f"before {place}", fate)
            if node.doomed and not self._run._journal.restarts:
                raise Reject("it was bound to fail")
            value = self._call(place, seen, fence)
            await hazards.risk(f"after {place}", fate)
            if fate == "lost":
                raise TimeoutError("the answer was lost")
            return value

        return provider

    def _plain_provider(self, node: Act) -> Callable[..., Any]:
        hazards, fence = self._hazards, self._run._replay.lease.fence

        def provider(run_id: str, place: str, seen: str) -> int:
            fate = hazards.fate(f"{run_id}/{place}", "fail", "retry", "reject", "lost")
            hazards.suffer(fate)
            hazards.risk_death(f"before {place}")
            value = self._call(place, seen, fence)
            hazards.risk_death(f"after {place}")
            if fate == "lost":
                raise TimeoutError("the answer was lost")
            return value

        return provider

    def _effect(self, node: Act) -> Callable[..., Any]:
        hazards = self._hazards

        async def effect(ctx: Context, run_id: str, place: str, seen: str) -> int:
            async def call() -> int:
                fate = hazards.fate(f"{run_id}/{place}", "refused", "lost", "refused", "lost")
                await hazards.risk(f"before {place}", fate)
                hazards.suffer(fate)
                key = ctx.upstream_key("call") if node.style == "kept" else ""
                keeps = KEPT_SECONDS if node.style == "kept" else None
                value = self._call(place, seen, ctx.fence, key=key, keeps=keeps)
                await hazards.risk(f"after {place}", fate)
                if fate == "lost":
                    raise TimeoutError("the answer was lost")
                return value

            async def ask() -> Happened[int] | NotHappened:
                hazards.suffer(hazards.fate(f"{run_id}/{place}/probe", "retry"))
                found = hazards.outside.find(run_id, place, ctx.fence)
                return NotHappened() if found is None else Happened(found)

            keeps = KEPT_SECONDS if node.style == "kept" else None
            probe = ask if node.style == "probed" else None
            # The name contains the place, so that the simulated operator can look up the effect.
            return await ctx.once(f"p{place}", call, reconcile=probe, provider_keeps_keys_for=keeps)

        return effect

    async def ask(self, node: Ask, place: str) -> Any:
        if node.what == "now":
            return to_instant(self._run.now())
        try:
            return await self._run.signal(f"go{node.n}", timeout=node.timeout, type=int)
        except SignalTimeoutError:
            return None

    async def nest(self, node: Nest, place: str) -> Any:
        try:
            return await self._run.child(self._tasks.nested, written(node.body))
        except DeadError:
            return "dead"
        except CancelledMessageError:
            return "gone"

    async def sleep(self, node: Sleep) -> None:
        await self._run.sleep(node.seconds)

    async def both(self, branches: Sequence[Awaitable[None]]) -> None:
        try:
            await self._run.gather(*branches)
        finally:
            for one in branches:
                if isinstance(one, Coroutine):
                    one.close()  # a branch that never began would warn

    def tell(self, node: Tell, place: str, seen: Seen) -> None:
        if node.how == "send":
            self._run.send(self._tasks.note, self._run.id, place, told(seen))
        else:
            self._run.publish(self._tasks.event, {"run_id": self._run.id, "place": place, "seen": told(seen)})
