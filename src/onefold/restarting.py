"""For people: a run goes back to an earlier step.

Commands whose lines are forgotten are taken back in the same commit: otherwise they would take effect beside those that
are sent anew, or an old undo would take back what was done again.
A saga does not go back while one of its undos may be running, because nothing can call that back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onefold import limits
from onefold.cancelling import undo_request
from onefold.envelope import is_reserved
from onefold.errors import RestartError, StoreConflictError
from onefold.journal import Sent, decode_sent
from onefold.status import begun_steps, is_of_undo, undo_name
from onefold.step import Step, StepKind
from onefold.store import Act, Query, Record, State, Store, Transaction

#: Attempts to go back while the run goes on and sends more; each is lost only to a run that got further.
_ROUNDS_MAX = 10


@dataclass(frozen=True, slots=True)
class _Command:
    """A message that a run sent and waits for, as it was before the restart."""

    step: str
    sent: Sent
    record: Record
    #: Its own journal, if it is a saga: it is undone instead of being cancelled.
    lines: Sequence[Step]

    @property
    def is_keyed(self) -> bool:
        """Whether it has a key of a sender's, under which what is sent anew is the same work."""
        envelope = self.record.envelope
        return self.sent.foreign or envelope.deduplication_key is not None or not is_reserved(envelope.idempotency_key)

    def holds_key(self, state: State) -> bool:
        """Whether it has ended so that another message with its key would not run."""
        freed = self.record.kept_until is not None and self.record.kept_until == self.record.ended_at
        return state is State.DONE or (state is State.CANCELLED and not freed)


async def restart(store: Store, run_id: str, from_step: str, act: Act) -> list[Step]:
    """Forget a step and all that came after it, and let the run go on from there; returns what was forgotten.

    Raises ``RestartError`` when that cannot be done without harm; then nothing was changed.
    A crash in the middle leaves the run as it was, or everything done.
    """
    for _ in range(_ROUNDS_MAX):
        commands = await _read_commands(store, await store.steps(run_id))
        try:
            async with store.transaction() as transaction:
                return await _restart(transaction, run_id, from_step, act, commands)
        except _OvertakenError:
            continue
    raise StoreConflictError(f"run {run_id} sent more each time it was to go back; try again")


class _OvertakenError(Exception):
    """The run sent something after its journal was read."""


async def _restart(
    transaction: Transaction, run_id: str, from_step: str, act: Act, commands: Mapping[str, _Command]
) -> list[Step]:
    # Commands before the run: a command that ends locks itself first, and the run when it reports.
    states = await transaction.lock(sorted(commands))
    states |= await transaction.lock([run_id])
    forgotten = await transaction.rewind(run_id, from_step, act)
    if not forgotten:
        return []
    _refuse_halves(run_id, from_step, forgotten)
    sent = [one.id for _, one in _sent(forgotten)]
    # One that was sent before and is not known is no longer kept.
    if await transaction.lock([id_ for id_ in sent if id_ not in commands]):
        raise _OvertakenError
    taken = [commands[id_] for id_ in sent if id_ in states]
    if any(line.kind is StepKind.UNDO for line in forgotten):
        _refuse_running(run_id, states, taken)
        _refuse_keyed(run_id, states, taken)
    await _take_back(transaction, run_id, states, taken)
    await transaction.move([run_id], State.SCHEDULED, act)
    return forgotten


def _sent(lines: Iterable[Step]) -> list[tuple[str, Sent]]:
    sent = ((line.name, decode_sent(line.value)) for line in lines if line.kind is StepKind.SENT)
    return [(name, one) for name, one in sent if one.role == "child"]


async def _read_commands(store: Store, lines: Iterable[Step]) -> dict[str, _Command]:
    """Return the commands of a run that are still kept, by id."""
    sent = {one.id: (name, one) for name, one in _sent(lines)}
    found: dict[str, _Command] = {}
    ids = sorted(sent)
    for start in range(0, len(ids), limits.PAGE_MAX):
        page = tuple(ids[start : start + limits.PAGE_MAX])
        for record in await store.find(Query(ids=page, limit=len(page))):
            id_ = record.envelope.id
            found[id_] = _Command(*sent[id_], record, await store.steps(id_) if record.envelope.saga else ())
    return found


async def _take_back(
    transaction: Transaction, run_id: str, states: Mapping[str, State], commands: Iterable[_Command]
) -> None:
    """Take back what was sent and has not ended, and close the letters of what is dead.

    A command with a key of its own stays: what is sent anew under that key is the same work, and joins it.
    """
    act = Act(actor="onefold", reason=f"run {run_id} was restarted from before it")
    for command in commands:
        id_ = command.record.envelope.id
        if command.is_keyed:
            continue
        if states[id_] is State.DEAD:
            await transaction.move([id_], State.DISCARDED, act)
        elif command.record.envelope.saga and not states[id_].ended:
            if (line := undo_request(command.record, command.lines, act)) is not None:
                await transaction.record(id_, [line], act=act)
        elif not states[id_].ended:
            await transaction.move([id_], State.CANCELLED, act)


# refusing


def _refuse_halves(run_id: str, from_step: str, forgotten: Sequence[Step]) -> None:
    """Refuse to forget that a step was undone, or was begun to be, without forgetting that it was done."""
    begun = [undo_name(line.name) for line in begun_steps(forgotten)]
    known = tuple(text for name in begun for text in (f"{name}!", f"{name}/", f"{name}@"))
    for line in forgotten:
        if is_of_undo(line) and line.name not in begun and not line.name.startswith(known):
            raise RestartError(
                run_id,
                f"from {from_step}: an earlier step was undone already, or is being undone ({line.name})",
                "restart from there or from before it",
            )


def _refuse_running(run_id: str, states: Mapping[str, State], commands: Iterable[_Command]) -> None:
    """Refuse while an undo may be running: its effect would come after what is done again."""
    if states.get(run_id) is State.LEASED:
        raise RestartError(
            run_id,
            "a worker is undoing it, and what that worker calls at this moment cannot be called back",
            "try again when it is parked, stuck or compensated; runs show says which",
        )
    for command in commands:
        id_, step = command.record.envelope.id, command.step
        # A run that was sent as an undo may have done a part of it.
        begun = states[id_] is State.LEASED or (command.record.envelope.pinned and not states[id_].ended)
        if step.startswith(undo_name("")) and begun:
            raise RestartError(
                run_id,
                f"its undo {step} is running as message {id_}, and cannot be called back",
                "try again when that message has ended, or cancel it first",
            )


def _refuse_keyed(run_id: str, states: Mapping[str, State], commands: Iterable[_Command]) -> None:
    """Refuse to send anew, after an undo, what its key would keep from running."""
    for command in commands:
        if command.is_keyed and command.holds_key(states[command.record.envelope.id]):
            raise RestartError(
                run_id,
                f"its command {command.step} has a key of its own, {command.record.envelope.idempotency_key!r}, "
                f"under which message {command.record.envelope.id} has ended, so that it would not run again",
                "send the saga anew, and let commands of sagas have no key",
            )
