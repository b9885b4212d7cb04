"""What a Redis server does with what it has accepted when it dies, as its own settings say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.exceptions import ResponseError

from onefold.errors import ConfigurationError
from onefold.transport import Durability

#: What must be known.
SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy")
#: Has a server that syncs always not do so for a while; one that does not tell is taken to be as it comes.
PAUSES_SYNC = "no-appendfsync-on-rewrite"

_REMEDY = {
    "appendonly": "it forgets accepted entries when it dies; set `appendonly yes`",
    "maxmemory-policy": "it removes accepted entries when its memory is full; set `maxmemory-policy noeviction`",
}


async def read_settings(client: Any) -> dict[str, str]:
    """Ask the server; what it does not tell, as many that are rented do not, is left out."""
    found: dict[str, str] = {}
    for name in (*SETTINGS, PAUSES_SYNC):
        # Each by itself, because servers before version 7 take one name at a time.
        try:
            told = await client.config_get(name)
        except ResponseError:
            continue  # the command is forbidden or was renamed
        found.update({_text(key): _text(value) for key, value in told.items()})
    return found


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def judge(found: Mapping[str, str], *, said: Durability | None, allow_volatile: bool, server: str) -> Durability:
    """Return the worst that entries survive; refuse a server on which that is nothing, unless it is allowed.

    ``said`` is what the caller vouches for, and counts only where the server does not tell.
    """
    refusal = _refusal(found)
    if refusal is not None:
        if not allow_volatile:
            raise ConfigurationError(f"Redis at {server}: {refusal}, or say allow_volatile=True")
        return "nothing"
    untold = [name for name in SETTINGS if name not in found]
    if not untold:
        return _judge_log(found)
    if said is None and not allow_volatile:
        raise ConfigurationError(
            f"Redis at {server} does not tell its {untold[0]} (CONFIG GET is forbidden), so nobody knows whether it "
            "keeps what it accepts: look it up with whoever runs it and say durability='process crash' or another "
            "one, or say allow_volatile=True"
        )
    return said or "nothing"


def _judge_log(found: Mapping[str, str]) -> Durability:
    """Return what a server with a log survives.

    It writes to its log before it answers, and ``always`` waits for the disk too.  Not so ``everysec``: while a sync is
    under way it keeps what comes to itself, for up to two seconds, and answers.  With a slow disk a kill was seen to
    lose 48 of 50 entries that it had accepted.
    """
    if found["appendfsync"] == "everysec":
        return "all but the last seconds"
    synced = found["appendfsync"] == "always" and found.get(PAUSES_SYNC, "no") == "no"
    return "power loss" if synced else "process crash"


def _refusal(found: Mapping[str, str]) -> str | None:
    for name, wanted in (("appendonly", "yes"), ("maxmemory-policy", "noeviction")):
        if found.get(name, wanted) != wanted:
            return f"{name} is {found[name]}, so {_REMEDY[name]}"
    return None
