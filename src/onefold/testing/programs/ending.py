"""The end of generated programs: after all deaths each program is brought to its end and judged."""

from __future__ import annotations

import random
from collections.abc import Callable

from onefold.app import App
from onefold.store import Record
from onefold.testing.checker import Violation
from onefold.testing.clock import FakeClock
from onefold.testing.drain import drain
from onefold.testing.programs.interpreter import ROWS
from onefold.testing.programs.judging import Evidence, judge_program, judge_saga
from onefold.testing.programs.outside import Deed, Outside
from onefold.testing.programs.people import RUNS, People, all_records

_ROUNDS_MAX = 40
_ROUND_SECONDS = 30.0


async def bring_to_end(app: App, outside: Outside, clock: FakeClock) -> None:
    """Send all signals that programs wait for, act as their operator, and work until all of them have ended."""
    people = People(outside, random.Random(0), lambda event: None)
    for _ in range(_ROUNDS_MAX):
        await people.calm_down(app)
        await drain(app)
        if not await people.unfinished(app):
            return
        clock.advance(_ROUND_SECONDS)


async def judge_all(
    app: App, outside: Outside, concerns: Callable[[Record], bool] = lambda record: True
) -> tuple[int, list[Violation]]:
    """Return the number of programs, without their children, and the violations found."""
    rows, deeds = [Deed(*row) for row in await app.store.fetch(ROWS)], outside.deeds()
    found: list[Violation] = []
    number = 0
    for record in filter(concerns, await all_records(app)):
        id_, name = record.envelope.id, record.envelope.message_type
        if name in RUNS:
            of = ([one for one in source if one.run == id_] for source in (deeds, rows))
            evidence = Evidence(record, await app.journal(id_), *of)
            found += judge_saga(evidence) if record.envelope.saga else judge_program(evidence)
            number += name != "nested"
        elif not record.state.ended:
            problem = f"it is still {record.state.name.lower()} after everything has calmed down"
            found.append(Violation("stuck", name, (id_,), problem))
    return number, found
