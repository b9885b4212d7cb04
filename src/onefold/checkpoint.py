"""Stage 7, handle: where a long handler got to, so that the next run of its message goes on from there.

Checkpoints are lines of the message's journal, of which the last one counts.
"""

from __future__ import annotations

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

    async def last(self) -> Any:
        """See ``Context.last_checkpoint``."""
        await self._load()
        return None if self._last is None else _value.decode(self._last)

    async def write(self, value: Any) -> None:
        """See ``Context.checkpoint``."""
        data = _value.encode(value)
        number = await self._load() + 1
        if number > limits.CHECKPOINTS_MAX:
            raise LimitError(
                "checkpoint",
                f"message {self._lease.id} has {number - 1}; at most {limits.CHECKPOINTS_MAX} are kept: "
                "make one less often, or divide the work among messages",
            )
        await self._store.record(self._lease, [Step(f"{_PREFIX}{number}", StepKind.RESULT, data)])
        self._number, self._last = number, data

    async def _load(self) -> int:
        """Return how many there are; the journal is read once."""
        if self._number is None:
            lines = [step for step in await read_journal(self._store, self._lease) if step.name.startswith(_PREFIX)]
            self._number, self._last = len(lines), lines[-1].value if lines else None
        return self._number
