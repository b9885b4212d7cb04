"""The demands of a chaos run: the work that each message asks for, and the rows that it must leave behind.

Everything here is a pure function of a message's kind and number and imports nothing of onefold, so the expectation
cannot contain the same mistake as the store that is judged by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

#: Numbers, amounts and ids all lie between 2**15 and 2**31, so that drivers send them as one type: a statement that
#: runs in another's place then writes wrong rows instead of failing with a type error.
FIRST_ID = FIRST_AMOUNT = 100_000
#: Rows of the tables of sums; enough that two handlers seldom deadlock.
ACCOUNTS, TALLIES, TILLS = 48, 48, 16
#: Rows of the table that is only read.
PRICES = 32
#: Numbers per sender; also the distance between a message's number and that of the message its handler sends.
NUMBERS_PER_SENDER = 100_000_000
FOLLOW_UP = 1_000_000_000
#: Lines per sender; the messages of a line keep their order.
LINES_PER_SENDER = 2
SENDERS_MAX = 8
#: Rows that one statement inserts.
PARTS = 3

#: The kinds that senders send; a kind without a key cannot be sent again after an unknown answer.
SENT = ("deposit", "purchase", "gift", "place", "order", "parcel", "trip")
UNKEYED = ("gift",)
#: The kinds with a handler that sends or starts another message, and its kind.
FOLLOW_UPS = {"deposit": "receipt", "order": "shipment", "trip": "stamp"}

#: Tables in which each row begins with the number of the message that wrote it.  The tables that handlers write have
#: no unique column, so a second effect is a second row and not an error.
ROW_TABLES: Mapping[str, str] = {
    "audit": "CREATE TABLE audit (number BIGINT NOT NULL, amount BIGINT NOT NULL)",
    "trail": "CREATE TABLE trail (number BIGINT NOT NULL, amount BIGINT NOT NULL)",
    "part": "CREATE TABLE part (number BIGINT NOT NULL, place BIGINT NOT NULL, amount BIGINT NOT NULL)",
    "note": "CREATE TABLE note (number BIGINT NOT NULL, body TEXT NOT NULL)",
    "line": "CREATE TABLE line (number BIGINT NOT NULL, line BIGINT NOT NULL, place BIGINT NOT NULL)",
    "orders": "CREATE TABLE orders (number BIGINT PRIMARY KEY, amount BIGINT NOT NULL)",
    # Rows appear here only when a statement gave an impossible answer, so the table should stay empty.
    "misread": "CREATE TABLE misread (number BIGINT NOT NULL, answer TEXT NOT NULL)",
}
#: Tables of sums: many messages add to a row; the first column is the row's id.
SUM_TABLES: Mapping[str, str] = {
    "account": "CREATE TABLE account (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL)",
    "tally": "CREATE TABLE tally (id BIGINT PRIMARY KEY, total BIGINT NOT NULL, times BIGINT NOT NULL)",
    "till": "CREATE TABLE till (id BIGINT PRIMARY KEY, total BIGINT NOT NULL)",
    "head": "CREATE TABLE head (id BIGINT PRIMARY KEY, last BIGINT NOT NULL)",
    "price": "CREATE TABLE price (id BIGINT PRIMARY KEY, amount BIGINT NOT NULL)",
}
#: Tables that senders write in their own transactions, not handlers.
WRITTEN_BY_SENDERS = ("orders", "till")

#: A row with the name of its table.
Row = tuple[str, tuple[object, ...]]
#: An addition to one row of a table: its id, and an amount for each further column.
Sum = tuple[str, int, tuple[int, ...]]


class Demand(NamedTuple):
    """The work that one message asks for."""

    kind: str
    number: int

    @property
    def key(self) -> str:
        """The name of the work in journals and reports."""
        return f"{self.kind}:{self.number}"

    @property
    def follow_up(self) -> Demand | None:
        """The demand of the message that the handler sends, if it sends one."""
        kind = FOLLOW_UPS.get(self.kind)
        if kind is None or (self.kind == "deposit" and self.number % 3):
            return None
        return Demand(kind, self.number + FOLLOW_UP)


def read_key(key: str) -> Demand:
    """Return the demand that has this key."""
    kind, _, number = key.partition(":")
    return Demand(kind, int(number))


def amount_of(number: int) -> int:
    """Return how much a message adds; this is also its result."""
    return number * 7_919 % 9_973 + FIRST_AMOUNT


def body_of(number: int) -> str:
    """Return the text that a message writes, with characters that careless quoting would misread."""
    return f"n°{number}: 'quoted' %s ? \\ {amount_of(number)}"


def account_of(number: int) -> int:
    return number * 31 % ACCOUNTS + FIRST_ID


def tally_of(number: int) -> int:
    return number * 17 % TALLIES + FIRST_ID


def till_of(number: int) -> int:
    return number * 13 % TILLS + FIRST_ID


def price_id_of(number: int) -> int:
    return number * 11 % PRICES + FIRST_ID


def price_of(id_: int) -> int:
    return id_ * 101 + 7


def line_of(number: int) -> int:
    """Return the line of a message; a line belongs to one sender, which sends its messages one after the other."""
    sender, count = divmod(number, NUMBERS_PER_SENDER)
    return sender * LINES_PER_SENDER + count % LINES_PER_SENDER + FIRST_ID


def has_sequence(line: int) -> bool:
    """Whether the messages of a line have explicit sequence numbers; otherwise the order of sends counts."""
    return line % 2 == 0


def rows_of(demand: Demand) -> list[Row]:
    """Return the rows that must exist when the message is done, without line rows, which depend on other messages."""
    number, amount = demand.number, amount_of(demand.number)
    audit: Row = ("audit", (number, amount))
    # Two rows, so that a message of which one row is missing differs from a message that did nothing.
    both: list[Row] = [audit, ("trail", (number, amount))]
    note: Row = ("note", (number, body_of(number)))
    parts: list[Row] = [("part", (number, place, amount + place)) for place in range(1, PARTS + 1)]
    rows: dict[str, list[Row]] = {
        "deposit": both,
        "receipt": [note, *parts],
        "purchase": [note, *parts],
        "gift": both,
        "place": [],
        "order": [("orders", (number, amount)), *both],
        "shipment": [note, *parts],
        "parcel": both,
        "trip": [audit, note],
        "stamp": parts,
    }
    return rows[demand.kind]


def sums_of(demand: Demand) -> list[Sum]:
    """Return the amounts that the message adds to shared rows."""
    number, amount = demand.number, amount_of(demand.number)
    account: Sum = ("account", account_of(number), (amount,))
    tally: Sum = ("tally", tally_of(number), (amount, 1))
    sums: dict[str, list[Sum]] = {
        "deposit": [account, tally],
        "purchase": [tally],
        "gift": [account],
        "place": [("head", line_of(number), (1,))],
        "order": [("till", till_of(number), (amount,)), account],
        "parcel": [account],
        "trip": [account, tally],
    }
    return sums.get(demand.kind, [])


def lines_of(accepted: Iterable[Demand]) -> dict[int, list[int]]:
    """Return the numbers of each line, in the order in which they were accepted."""
    lines: dict[int, list[int]] = {}
    for number in sorted(demand.number for demand in accepted if demand.kind == "place"):
        lines.setdefault(line_of(number), []).append(number)
    return lines


def first_sums() -> dict[str, dict[int, tuple[int, ...]]]:
    """Return the contents of the tables of sums before the first message."""
    return {
        "account": dict.fromkeys(_ids(ACCOUNTS), (0,)),
        "tally": {},
        "till": dict.fromkeys(_ids(TILLS), (0,)),
        "head": dict.fromkeys(_ids((SENDERS_MAX + 1) * LINES_PER_SENDER), (0,)),
        "price": {id_: (price_of(id_),) for id_ in _ids(PRICES)},
    }


def _ids(number: int) -> range:
    return range(FIRST_ID, FIRST_ID + number)
