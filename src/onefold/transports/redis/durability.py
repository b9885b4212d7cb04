"""What a Redis server does with what it has accepted when it dies, as its own settings say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.exceptions import ResponseError

from onefold.errors import ConfigurationError
from onefold.transport import Durability

#: What is asked for; each by itself, because servers before version 7 take one name at a time.
SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy")

_REMEDY = {
    "appendonly": "it forgets accepted entries when it dies; set `appendonly yes`",
    "maxmemory-policy": "it removes accepted entries when its memory is full; set `maxmemory-policy noeviction`",
}


async def read_settings(client: Any) -> dict[str, str]:
    """Ask the server; what it does not tell, as many that are rented do not, is left out."""
    found: dict[str, str] = {}
    for name in SETTINGS:
        try:
            told = await client.config_get(name)
        except ResponseError:
            continue  # the command is forbidden or was renamed
        found.update({_text(key): _text(value) for key, value in told.items() if _text(key) in SETTINGS})
    return found


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def judge(found: Mapping[str, str], *, said: Durability | None, allow_volatile: bool, server: str) -> Durability:
    """Return the worst that entries survive; refuse a server on which that is nothing, unless it is allowed.

    ``said`` is what the caller vouches for, and counts only where the server does not tell.
    Whatever ``appendfsync`` is, the log is handed to the system before the answer, so the death of the process alone
    loses nothing; only ``always`` waits for the disk.
    """
    refusal = _refusal(found)
    if refusal is not None:
        if not allow_volatile:
            raise ConfigurationError(f"Redis at {server}: {refusal}, or say allow_volatile=True")
        return "nothing"
    untold = [name for name in SETTINGS if name not in found]
    if not untold:
        return "power loss" if found["appendfsync"] == "always" else "process crash"
    if said is None and not allow_volatile:
        raise ConfigurationError(
            f"Redis at {server} does not tell its {untold[0]} (CONFIG GET is forbidden), so nobody knows whether it "
            "keeps what it accepts: look it up with whoever runs it and say durability='process crash' or "
            "'power loss', or say allow_volatile=True"
        )
    return said or "nothing"


def _refusal(found: Mapping[str, str]) -> str | None:
    for name, wanted in (("appendonly", "yes"), ("maxmemory-policy", "noeviction")):
        if found.get(name, wanted) != wanted:
            return f"{name} is {found[name]}, so {_REMEDY[name]}"
    return None
