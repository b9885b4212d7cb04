"""Stage 7, handle: where a long handler got to, so that the next run of its message goes on from there.

Checkpoints are lines of the message's journal, of which the last one counts.
"""

from __future__ import annotations

import asyncio
from typing import Any

from onefold import limits
from onefold.codec import ResultCodec
from onefold.errors import LimitError
from onefold.journal import read_journal
from onefold.step import Step, StepKind
from onefold.store import Lease, Store

_PREFIX = "checkpoint#"
_value = ResultCodec(Any, most=limits.PAYLOAD_BYTES_MAX, field="checkpoint")


class Checkpoints:
    """The checkpoints of one claimed message."""

    def __init__(self, lease: Lease, store: Store) -> None:
        self._lease = lease
        self._store = store
        self._number: int | None = None
        self._last: bytes | None = None
        #: One after the other, in the order in which they were asked for: of several at once the last one counts.
        self._writing = asyncio.Lock()

    async def last(self) -> Any:
        """See ``Context.last_checkpoint``."""
        await self._load()
        return None if self._last is None else _value.decode(self._last)

    async def write(self, value: Any) -> None:
        """See ``Context.checkpoint``."""
        data = _value.encode(value)
        async with self._writing:
            number = await self._load() + 1
            if number > limits.CHECKPOINTS_MAX:
                raise LimitError(
                    "checkpoint",
                    f"message {self._lease.id} has {number - 1}; at most {limits.CHECKPOINTS_MAX} are kept: "
                    "make one less often, or divide the work among messages",
                )
            # Taken even if the caller gives up: the line may be written all the same, and the first one stands.
            self._number = number
            await self._store.record(self._lease, [Step(f"{_PREFIX}{number}", StepKind.RESULT, data)])
            self._last = data

    async def _load(self) -> int:
        """Return the number of the last one; the journal is read once."""
        if self._number is None:
            lines = await read_journal(self._store, self._lease)
            found = {int(one.name.removeprefix(_PREFIX)): one.value for one in lines if one.name.startswith(_PREFIX)}
            if self._number is None:  # nor has anybody else read it meanwhile
                self._number = max(found, default=0)
                self._last = found.get(self._number)
        return self._number
