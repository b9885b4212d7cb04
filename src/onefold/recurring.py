"""A use of the flow: recurring tasks, fired by every worker and by none in particular.

A schedule is an entry of the register.  Each worker looks when one is due, by the store's clock, and puts the
occurrence's message and the new watermark in one commit; the entry is compared and set, so one of them wins.
There is no leader: a worker that dies in between leaves nothing behind, and the next one to look does its work.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import msgspec

from onefold import limits
from onefold.clock import MICROSECONDS, Clock
from onefold.envelope import SCHEDULED, Envelope, Occurrence
from onefold.errors import ConfigurationError, StoreUnavailableError, seconds
from onefold.registry import Call, Recurring, Registry
from onefold.schedule import (
    KIND,
    Catchup,
    Fire,
    Plan,
    ScheduleRecord,
    decode_schedule,
    encode_schedule,
    occurrence_key,
    plan,
)
from onefold.store import Query, Registered, Store
from onefold.timetable import Delay, Timetable

logger = logging.getLogger("onefold")

#: When the store cannot be reached, look again after this long.
_BACK_OFF_SECONDS = 5.0
#: With a delay, the end of a run is looked for at least this often ...
_LOOK_SECONDS_MIN = 1.0
#: Attempts to write an entry that others write too; each is lost only to somebody who won.
_ROUNDS_MAX = 20
#: These make a message another one than the occurrence it stands for.
_NOT_FOR_SCHEDULES = {"key", "delay", "at", "deduplicate", "deduplicate_for", "if_dead", "sequence"}

#: Gives a message an id and lets the app's ``on_send`` see it.
Complete = Callable[[Envelope], Envelope]


def template_of(call: Call[object]) -> Envelope:
    """Return the message that a schedule puts again and again, without what differs each time."""
    if wrong := sorted(call.options.keys() & _NOT_FOR_SCHEDULES):
        raise ConfigurationError(f"{call.task.name}: a schedule decides by itself about {', '.join(wrong)}")
    template = call.envelope("template")
    return msgspec.structs.replace(template, idempotency_key="template", correlation_id="template", causation_id="template")
