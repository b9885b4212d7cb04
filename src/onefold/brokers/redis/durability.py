"""Whether a Redis server keeps accepted entries when it dies, by its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from redis.exceptions import ResponseError

from onefold.brokers.transport import Durability
from onefold.errors import ConfigurationError

#: Settings that must be known.
SETTINGS = ("appendonly", "appendfsync", "maxmemory-policy")
#: A setting that suspends ``appendfsync always`` while the log is rewritten; off unless the server says otherwise.
PAUSES_SYNC = "no-appendfsync-on-rewrite"

_REMEDY = {
    "appendonly": "it forgets accepted entries when it dies; set `appendonly yes`",
    "maxmemory-policy": "it removes accepted entries when its memory is full; set `maxmemory-policy noeviction`",
}


async def read_settings(client: Any) -> dict[str, str]:
    """Return the server's settings, without those that it does not show, as many hosted servers do not."""
    found: dict[str, str] = {}
    for name in (*SETTINGS, PAUSES_SYNC):
        # One at a time, because servers before version 7 take a single name.
        try:
            reply = await client.config_get(name)
        except ResponseError:
            continue  # the command is forbidden or was renamed
        found.update({_text(key): _text(value) for key, value in reply.items()})
    return found


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def judge(found: Mapping[str, str], *, stated: Durability | None, allow_volatile: bool, server: str) -> Durability:
    """Return the worst failure that entries survive; refuse a server where they survive none, unless it is allowed.

    ``stated`` is the durability that the user states, and counts only if the server does not show its settings.
    """
    refusal = _refusal(found)
    if refusal is not None:
        if not allow_volatile:
            raise ConfigurationError(f"Redis at {server}: {refusal}, or give allow_volatile=True")
        return "nothing"
    unknown = [name for name in SETTINGS if name not in found]
    if not unknown:
        return _judge_log(found)
    if stated is None and not allow_volatile:
        raise ConfigurationError(
            f"Redis at {server} does not show its {unknown[0]} (CONFIG GET is forbidden), so it may lose accepted "
            "entries: ask its operator and give durability='process crash' or another one, or allow_volatile=True"
        )
    return stated or "nothing"


def _judge_log(found: Mapping[str, str]) -> Durability:
    """Return the worst failure that the entries of a server with a log survive.

    With ``always`` it writes to its log and waits for the disk before it replies.  With ``everysec`` it replies before
    it writes while a sync is under way, for up to two seconds: on a slow disk, killing the server lost 48 of 50
    accepted entries.
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
