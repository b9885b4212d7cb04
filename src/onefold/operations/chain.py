"""For operators: what caused a message and what it caused, as a tree.

All messages that come from the same first one share its correlation id, and each has the id of its cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from onefold import limits
from onefold.clock import to_datetime
from onefold.handlers.effects import LedgerEntry, entries
from onefold.store import Query, Record, Store

_WORKFLOW = "workflow:"


class ChainNode(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chain, and its place in the tree."""

    record: Record
    #: The id of the message in this chain that caused it; None if no message here did.
    parent: str | None
    #: The number of messages above it.
    depth: int
    #: The step of the parent in which it was sent, if that is a workflow.
    step: str | None
    #: The effects that its handler began with ``once``.
    effects: tuple[LedgerEntry, ...] = ()

    @property
    def id(self) -> str:
        return self.record.envelope.id

    def as_dict(self) -> dict[str, Any]:
        """Return its fields without the payload and the result, ready for JSON."""
        record, envelope = self.record, self.record.envelope
        return {
            "id": self.id,
            "message_type": envelope.message_type,
            "queue": envelope.queue,
            "subject": envelope.subject,
            "idempotency_key": envelope.idempotency_key if envelope.keyed else None,
            "state": record.state.name.lower(),
            "parent": self.parent,
            "depth": self.depth,
            "step": self.step,
            "causation_id": envelope.causation_id,
            "created_at": to_datetime(envelope.created_at).isoformat(),
            "ended_at": None if record.ended_at is None else to_datetime(record.ended_at).isoformat(),
            "attempts": record.attempt,
            "crashes": record.crashes,
            "replays": record.replay_count,
            "duplicates": record.suppressed,
            "reason": None if record.failure is None else record.failure.reason,
            "error": None if record.failure is None else record.failure.error_message,
            "effects": [
                {"name": one.name, "state": one.state, "tries": one.tries, "began_at": one.began_at.isoformat()}
                for one in self.effects
            ],
        }


class Chain(msgspec.Struct, frozen=True):
    """The messages that share a correlation id, each after the one that caused it."""

    correlation_id: str
    links: tuple[ChainNode, ...]
    #: False when there are more messages than the limit.
    whole: bool

    def as_dict(self) -> dict[str, Any]:
        """Return its fields, ready for JSON; a flat list, because a chain may be deeper than parsers allow."""
        return {
            "correlation_id": self.correlation_id,
            "whole": self.whole,
            "links": [link.as_dict() for link in self.links],
        }


async def read_chain(store: Store, message_id: str) -> Chain | None:
    """Return the chain that a message is part of; None when there is no such message."""
    found = await store.find(Query(ids=(message_id,)))
    if not found:
        return None
    correlation_id = found[0].envelope.correlation_id
    # The oldest messages, because the chain began with them.
    records = await store.find(Query(correlation_id=correlation_id, limit=limits.CHAIN_MAX))
    links: list[ChainNode] = []
    for link in make_links(records):
        effects = tuple(entries(await store.steps(link.id)))
        links.append(msgspec.structs.replace(link, effects=effects) if effects else link)
    return Chain(correlation_id, tuple(links), len(records) < limits.CHAIN_MAX)


def make_links(records: Sequence[Record]) -> list[ChainNode]:
    """Put every message below the one that caused it, and those without a cause here at the top.

    Causation ids may come from other systems: a message that is its own cause, or part of a circle, is at the top too.
    """
    known = {record.envelope.id: record for record in records}
    below: dict[str, list[Record]] = {}
    tops: list[Record] = []
    for record in records:
        cause, _ = cause_of(record)
        if cause in known and cause != record.envelope.id:
            below.setdefault(cause, []).append(record)
        else:
            tops.append(record)
    links: dict[str, ChainNode] = {}
    _add_trees(tops, below, links)
    for record in records:
        if record.envelope.id not in links:
            _add_trees([record], below, links)
    return list(links.values())


def _add_trees(tops: Iterable[Record], below: dict[str, list[Record]], links: dict[str, ChainNode]) -> None:
    waiting: list[tuple[Record, str | None, int]] = [(record, None, 0) for record in reversed(list(tops))]
    while waiting:
        record, parent, depth = waiting.pop()
        id_ = record.envelope.id
        if id_ in links:
            continue
        links[id_] = ChainNode(record=record, parent=parent, depth=depth, step=cause_of(record)[1])
        waiting += [(child, id_, depth + 1) for child in reversed(below.get(id_, ()))]


def cause_of(record: Record) -> tuple[str, str | None]:
    """Return the id of the message that caused this one, and its step if that is a workflow."""
    causation = record.envelope.causation_id
    if not causation.startswith(_WORKFLOW):
        return causation, None
    run, _, step = causation.removeprefix(_WORKFLOW).partition("/")
    return run.partition("~")[0], step
