"""Stage 2, send: messages and signals that wait for a commit, and how they are written with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from onefold.errors import ConfigurationError, HandlerError, KeyReuseError, SignalError
from onefold.message.envelope import Envelope, derived_key, refuse_reserved
from onefold.store import Stored, Transaction
from onefold.store.journal_lines import Note, signal_note, signal_of
from onefold.tasks.receipt import Receipt
from onefold.tasks.task import Call

R = TypeVar("R")
logger = logging.getLogger("onefold")


#: Duplicates of one commit that are logged one by one; a repeated batch may have thousands.
_DUPLICATES_LOGGED = 10
#: Makes the message of a call and the receipt for it; given by the app, which owns clock and chance.
Prepare = Callable[[Call[Any], Envelope | None, int], tuple[Envelope, Receipt[Any]]]


def log_duplicates(envelopes: Sequence[Envelope], stored: Sequence[Stored]) -> None:
    """Log the messages not stored because their keys were taken: the first few, and the number of the rest."""
    skipped = [pair for pair in zip(envelopes, stored, strict=True) if pair[1].duplicate and not pair[1].clash]
    for envelope, one in skipped[:_DUPLICATES_LOGGED]:
        logger.info(
            "duplicate_skipped message_id=%s message_type=%s idempotency_key=%s",
            one.id,
            envelope.message_type,
            envelope.idempotency_key,
        )
    if len(skipped) > _DUPLICATES_LOGGED:
        logger.info("duplicates_skipped messages=%d", len(skipped) - _DUPLICATES_LOGGED)


class Buffer:
    """Messages and signals that are sent but not yet written."""

    def __init__(
        self,
        prepare: Prepare,
        parent: Envelope | None = None,
        *,
        unkeyed: int = 0,
        fresh_id: Callable[[], str] | None = None,
    ) -> None:
        self._prepare = prepare
        self._parent = parent
        self._fresh_id = fresh_id
        #: How many messages without a key were sent: such a message is keyed by its parent's id and its number.
        self.unkeyed = unkeyed
        self._closed = False
        self.envelopes: list[Envelope] = []
        self.receipts: list[Receipt[Any]] = []
        self.notes: list[Note] = []

    def add_signal(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Buffer one signal; without an id it gets one that is the same when its handler is run again."""
        self._refuse_late()
        if id_ is not None:
            refuse_reserved("id", id_)
        elif self._parent is not None:
            id_ = derived_key("signal", f"{self._parent.id}/{len(self.notes)}")
        elif self._fresh_id is not None:
            id_ = self._fresh_id()
        self.notes.append(signal_note(run_id, name, value, id_ or ""))

    def add_start(self, call: Call[R], name: str, value: Any, id_: str | None) -> Receipt[R]:
        """Buffer a run and a signal for it, or for the run that holds its key when the commit comes."""
        refuse_task(call)
        receipt = self.add(call)
        self.add_signal(self.envelopes[-1].id, name, value, id_)
        self.notes[-1] = msgspec.structs.replace(self.notes[-1], started=True)
        return receipt

    def _refuse_late(self) -> None:
        if self._closed:
            raise HandlerError(
                "the handler or transaction is over, so this message would never be sent; await the task that sends it"
            )

    def add(self, call: Call[R]) -> Receipt[R]:
        """Buffer one message; its receipt has an id at once."""
        if self._closed:
            self._refuse_late()
        if call.options and call.options.get("if_dead", "keep") != "keep":
            raise ConfigurationError("if_dead='redrive' reopens another message; send this one outside a transaction")
        envelope, receipt = self._prepare(call, self._parent, self.unkeyed)
        if call.key is None:
            self.unkeyed += 1
        if is_keyed(call):
            receipt.withhold()
        self.envelopes.append(envelope)
        self.receipts.append(receipt)
        return receipt

    def extend(self, envelopes: Sequence[Envelope], notes: Sequence[Note]) -> None:
        """Add messages and signals prepared elsewhere for the same parent, with numbers that began at ``unkeyed``."""
        self.envelopes += envelopes
        self.notes += notes
        self.unkeyed += len(envelopes)

    def close(self) -> None:
        """Refuse all further sends and signals: they would be lost silently."""
        self._closed = True

    async def write(self, transaction: Transaction) -> list[Stored]:
        """Put the messages and record the signals, as the last thing in a transaction."""
        return await put_and_record(transaction, self.envelopes, self.notes)

    def refuse_clashes(self, stored: Sequence[Stored]) -> None:
        """Raise ``KeyReuseError`` for the first message with a key that belongs to another payload."""
        for envelope, one in zip(self.envelopes, stored, strict=True):
            if one.clash:
                raise KeyReuseError(envelope.message_type, envelope.idempotency_key, one.id)

    def confirm(self, stored: Sequence[Stored]) -> None:
        """Complete the receipts, after the commit."""
        log_duplicates(self.envelopes, stored)
        for receipt, one in zip(self.receipts, stored, strict=True):
            receipt.confirm(one)


async def put_and_record(transaction: Transaction, sends: Sequence[Envelope], notes: Sequence[Note]) -> list[Stored]:
    """Put messages and record signals in a transaction; a key that belongs to another payload fails it.

    A signal for a run that is sent with it goes to the run that holds the key, which may be another one.
    """
    stored = await transaction.put(sends) if sends else []
    for envelope, one in zip(sends, stored, strict=True):
        if one.clash:
            raise KeyReuseError(envelope.message_type, envelope.idempotency_key, one.id)
    stored_as = {envelope.id: one.id for envelope, one in zip(sends, stored, strict=True)}
    for note in notes:
        run_id = stored_as[note.message_id] if note.started else note.message_id
        if not await transaction.record(run_id, [note.step]) and note.started:
            raise SignalError.ended(run_id, signal_of(note.step))
    return stored


def is_keyed(call: Call[Any]) -> bool:
    """Whether the call has a key, which another message may hold, so that its own message is never stored."""
    return call.key is not None or call.options.get("deduplicate") is not None


def refuse_task(call: Call[Any]) -> None:
    """Refuse to signal a task, which takes no signals."""
    if not call.task.pinned:
        raise ConfigurationError(f"{call.task.name} is no workflow, so it waits for no signals; send it instead")
