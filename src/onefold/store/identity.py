"""A use of the register: the identity of a database, so that no two databases share one at an outside provider.

A database has an identity, drawn when it is first opened, and the name of the app that uses it.  Both stand in the
register, so that a backup carries them: after a restore a provider still recognises what it was asked before.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec

from onefold import limits
from onefold.errors import ConfigurationError, StoreUnavailableError
from onefold.store import Query, Registered, Store

#: The kind of the entries in the register, and their names.
KIND = "store"
IDENTITY, NAME = "identity", "name"
#: The name of an app that gives none, on a store that has none.
DEFAULT_NAME = "app"
#: No two databases of the world are likely to draw the same.
_IDENTITY_BITS = 128
#: Attempts to write an entry that others write too; each is lost only to one that was written.
_ROUNDS_MAX = 20


class Origin(msgspec.Struct, frozen=True):
    """The database and the app that a key for an outside provider comes from."""

    identity: str
    name: str

    def __str__(self) -> str:
        return f"{self.identity}/{self.name}"


async def find_origin(store: Store, name: str | None, chance: random.Random) -> Origin:
    """Return the origin of an open store; what is not there yet is written.

    An app without a name takes the one it finds.  Raises ``ConfigurationError`` for another name than that of a store
    which has messages.  A crash in the middle leaves all of it or nothing.
    """
    for _ in range(_ROUNDS_MAX):
        found = await store.entries(KIND)
        wanted: dict[str, str] = {}
        if IDENTITY not in found:
            wanted[IDENTITY] = _draw(chance)
        if NAME not in found:
            wanted[NAME] = name or DEFAULT_NAME
        elif name is not None and (known := found[NAME].value.decode()) != name:
            await _refuse_another(store, known, name)
            wanted[NAME] = name
        if not wanted:
            return Origin(found[IDENTITY].value.decode(), found[NAME].value.decode())
        await _write(store, wanted, found)
    raise StoreUnavailableError(f"the name of the store's app was changed {_ROUNDS_MAX} times in a row; try again")


async def renew_identity(store: Store, chance: random.Random) -> str:
    """Give an open store a new identity, because it is a copy whose original lives on; return it."""
    for _ in range(_ROUNDS_MAX):
        found = await store.entries(KIND)
        identity = _draw(chance)
        if await _write(store, {IDENTITY: identity}, found):
            return identity
    raise StoreUnavailableError(f"the identity was changed {_ROUNDS_MAX} times in a row; try again")


def _draw(chance: random.Random) -> str:
    return f"{chance.getrandbits(_IDENTITY_BITS):032x}"


async def _write(store: Store, wanted: Mapping[str, str], found: Mapping[str, Registered]) -> bool:
    """Write entries that are still as they were found; those that others wrote meanwhile stay as they are."""
    async with store.transaction() as transaction:
        written = [
            await transaction.register(KIND, name, value.encode(), version=found[name].version if name in found else 0)
            for name, value in wanted.items()
        ]
    return all(written)


async def _refuse_another(store: Store, known: str, name: str) -> None:
    if await store.find(Query(limit=1)):
        raise ConfigurationError(
            f"the app is named {name!r}, but the messages of this store are those of {known!r}; the name is part of "
            f"every ctx.upstream_key, so providers would not recognise repeated calls: use App(name={known!r}), or "
            "another database"
        )


def check_app_name(name: str | None) -> str | None:
    """Refuse a name that is none."""
    return None if name is None else limits.check_name("app", name)
