"""For operators: restart a run from an earlier step.

The commands of the steps that are forgotten are cancelled in the same commit: otherwise they would take effect beside
those that are sent anew, or an old undo would undo a step that was done again.
A saga is not restarted while one of its undos may be running, because that cannot be stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onefold import limits
from onefold.errors import RestartError, StoreConflictError
from onefold.message.envelope import is_reserved
from onefold.store import Act, Query, Record, State, Store, Transaction
from onefold.store.journal_lines import Line, LineKind
from onefold.workflows.cancel import undo_request
from onefold.workflows.journal import Sent, decode_sent
from onefold.workflows.saga import begun_steps, is_of_undo, undo_name

#: Attempts to restart a run that goes on meanwhile: each fails only if the run has sent another command since.
_ROUNDS_MAX = 10


@dataclass(frozen=True, slots=True)
class _Command:
    """A message that a run sent and waits for, as it was before the restart."""

    step: str
    sent: Sent
    record: Record
    #: Its own journal if it is a saga, which is undone instead of cancelled.
    lines: Sequence[Line]

    @property
    def is_keyed(self) -> bool:
        """Whether it has a key that a caller gave it: a command that is sent anew under that key is a duplicate."""
        envelope = self.record.envelope
        return self.sent.foreign or envelope.deduplication_key is not None or not is_reserved(envelope.idempotency_key)

    def holds_key(self, state: State) -> bool:
        """Whether it has ended but still holds its key, so that another message with that key would not run."""
        freed = self.record.kept_until is not None and self.record.kept_until == self.record.ended_at
        return state is State.DONE or (state is State.CANCELLED and not freed)


async def restart(store: Store, run_id: str, from_step: str, act: Act) -> list[Line]:
    """Forget a step and all lines after it, and let the run go on from there; returns the forgotten lines.

    Raises ``RestartError`` when that would do harm; then nothing was changed.
    A crash in the middle leaves the run as it was, or restarted.
    """
    for _ in range(_ROUNDS_MAX):
        commands = await _read_commands(store, await store.steps(run_id))
        try:
            async with store.transaction() as transaction:
                return await _restart(transaction, run_id, from_step, act, commands)
        except _OvertakenError:
            continue
    raise StoreConflictError(
        f"run {run_id} sent another command during each of {_ROUNDS_MAX} attempts to restart it; try again"
    )


class _OvertakenError(Exception):
    """The run sent something after its journal was read."""


async def _restart(
    transaction: Transaction, run_id: str, from_step: str, act: Act, commands: Mapping[str, _Command]
) -> list[Line]:
    # Commands before the run: a command that ends locks itself first, and then the run it reports to.
    states = await transaction.lock(sorted(commands))
    states |= await transaction.lock([run_id])
    forgotten = await transaction.rewind(run_id, from_step, act)
    if not forgotten:
        return []
    _refuse_halves(run_id, from_step, forgotten)
    sent = [one.id for _, one in _sent(forgotten)]
    # A command that was not found by ``_read_commands`` is purged, unless the run sent it since.
    if await transaction.lock([id_ for id_ in sent if id_ not in commands]):
        raise _OvertakenError
    taken = [commands[id_] for id_ in sent if id_ in states]
    if any(line.kind is LineKind.UNDO for line in forgotten):
        _refuse_running(run_id, states, taken)
        _refuse_keyed(run_id, states, taken)
    await _take_back(transaction, run_id, states, taken)
    await transaction.move([run_id], State.SCHEDULED, act)
    return forgotten


def _sent(lines: Iterable[Line]) -> list[tuple[str, Sent]]:
    sent = ((line.name, decode_sent(line.value)) for line in lines if line.kind is LineKind.SENT)
    return [(name, one) for name, one in sent if one.role == "child"]


async def _read_commands(store: Store, lines: Iterable[Line]) -> dict[str, _Command]:
    """Return, by id, the commands of a run that are still in the store."""
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
    """Cancel the commands that have not ended, and discard dead ones.

    A command with a key of its own stays: the one that is sent anew under that key is a duplicate of it.
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


# refusals


def _refuse_halves(run_id: str, from_step: str, forgotten: Sequence[Line]) -> None:
    """Refuse to forget that a step was undone, or is being undone, while its result is kept."""
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
    """Refuse while an undo may be running: it could undo a step after that was done again."""
    if states.get(run_id) is State.LEASED:
        raise RestartError(
            run_id,
            "a worker is undoing it, and an undo that is being called cannot be called back",
            "try again when it is parked, stuck or compensated; onefold runs show tells",
        )
    for command in commands:
        id_, step = command.record.envelope.id, command.step
        # An undo that is itself a run may have done some of its steps, although no worker has it now.
        begun = states[id_] is State.LEASED or (command.record.envelope.pinned and not states[id_].ended)
        if step.startswith(undo_name("")) and begun:
            raise RestartError(
                run_id,
                f"its undo {step} is running as message {id_}, and cannot be called back",
                "try again when that message has ended, or cancel it first",
            )


def _refuse_keyed(run_id: str, states: Mapping[str, State], commands: Iterable[_Command]) -> None:
    """Refuse, after an undo, to send a command anew that would not run because its key is still held."""
    for command in commands:
        if command.is_keyed and command.holds_key(states[command.record.envelope.id]):
            raise RestartError(
                run_id,
                f"its command {command.step} has a key of its own, {command.record.envelope.idempotency_key!r}, "
                f"under which message {command.record.envelope.id} has ended, so that it would not run again",
                "send the saga anew, and give the commands of sagas no keys",
            )
