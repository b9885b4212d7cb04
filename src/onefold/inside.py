"""Beside the flow: what the running code is inside of, if that has a commit to come."""

from __future__ import annotations

import contextvars
from typing import Any, Protocol


class Joined(Protocol):
    """Something with a commit to come, which code inside it joins instead of writing for itself."""

    def add(self, call: Any) -> Any:
        """Send an encoded call with that commit and return its receipt; what ``task.send(…)`` does inside."""
        ...

    def tell(self, run_id: str, name: str, value: Any, id_: str | None) -> None:
        """Send a signal with that commit; what ``await app.signal(…)`` does inside."""
        ...

    def start(self, call: Any, name: str, value: Any, id_: str | None) -> Any:
        """Start or find a run and tell it something with that commit; returns its receipt."""
        ...

    def refuse(self, verb: str) -> None:
        """Raise ``TransactionOpenError`` for a verb that would commit by itself, if it must not now."""
        ...


#: What ``task.send(…)`` joins, if the code runs inside something with a commit to come.
current: contextvars.ContextVar[Joined | None] = contextvars.ContextVar("onefold_transaction", default=None)


def outside() -> contextvars.Context:
    """Return the present context for work that belongs to nobody's transaction, whoever happens to start it."""
    context = contextvars.copy_context()
    context.run(current.set, None)
    return context
