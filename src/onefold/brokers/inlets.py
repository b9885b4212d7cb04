"""Stage 1, declare: the streams of brokers that one app receives from, and the brokers its workers open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onefold.brokers.transport import Transport
from onefold.message.envelope import Envelope


@dataclass(frozen=True, slots=True)
class Inlet:
    """A stream of a broker whose entries become messages of this app."""

    transport: Transport
    source: str
    #: The message types that are taken in; None for every task and topic of the app.
    types: frozenset[str] | None = None
    #: Decodes entries that are not onefold's envelopes.
    read: Callable[[bytes], Envelope] | None = None


class Inlets(dict[str, Inlet]):
    """The inlets of one app by their sources, and every transport that it receives from or relays to."""

    def __init__(self) -> None:
        super().__init__()
        self.transports: list[Transport] = []

    def add(self, inlet: Inlet) -> None:
        """Let workers receive a stream."""
        self[inlet.source] = inlet
        self.add_transport(inlet.transport)

    def add_transport(self, transport: Transport) -> None:
        """Let workers open a transport."""
        if not any(one is transport for one in self.transports):
            self.transports.append(transport)
