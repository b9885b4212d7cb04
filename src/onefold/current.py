"""Beside the flow: the transaction that the running code is part of, if any."""

from __future__ import annotations

import contextvars
from typing import Any, Protocol


class Joined(Protocol):
    """An open transaction, handler or workflow: code inside it adds to its commit instead of writing at once."""

    def add(self, call: Any) -> Any:
        """Send an encoded call with that commit and return its receipt; called by ``task.send(…)``."""
        ...

    def add_signal(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal with that commit; called by ``await app.signal(…)``."""
        ...

    def add_start(self, call: Any, name: str, value: Any, id_: str | None) -> Any:
        """Start or find a run and send it a signal, with that commit; return the receipt of the run."""
        ...

    def refuse(self, verb: str) -> None:
        """Raise ``TransactionOpenError`` if a verb that commits by itself is not allowed now."""
        ...


#: The transaction that ``task.send(…)`` joins; none outside of a handler, workflow or transaction.
current: contextvars.ContextVar[Joined | None] = contextvars.ContextVar("onefold_transaction", default=None)


def outside() -> contextvars.Context:
    """Return a copy of the present context without a transaction.

    For background work that a transaction may happen to start, but must not take part in.
    """
    context = contextvars.copy_context()
    context.run(current.set, None)
    return context
