"""Redis streams as a transport, on a real server: the effect of each call, and texts that are never shown."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from onefold import ConfigurationError, Envelope, LimitError, TransportError, TransportUnavailableError, limits
from onefold.brokers.redis import RedisTransport
from onefold.brokers.redis.connection import RedisConnection
from onefold.brokers.redis.durability import judge
from onefold.brokers.transport import Delivery
from onefold.clock import SystemClock, system_random
from onefold.message.envelope import from_json
from onefold.testing import FakeClock
from onefold.testing.brokers import DURABLE, RedisServer, find_redis

#: A pull with this lease takes over the entries of other consumers.
NO_LEASE = 0.0


def transport(url: str, **options: Any) -> RedisTransport:
    return RedisTransport(url, **{"group": "billing", "wait": 0.005, **options})


def envelope(number: int = 1, **changes: Any) -> Envelope:
    fields: dict[str, Any] = {
        "id": f"id-{number}",
        "message_type": "order.placed",
        "queue": "orders",
        "idempotency_key": f"order-{number}",
        "correlation_id": "correlation",
        "causation_id": "causation",
        "subject": "order",
        "payload_inline": b'{"a":[1,2.5,"\xc3\xa4"]}',
    }
    return Envelope(**{**fields, **changes})


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def keys(deliveries: list[Delivery]) -> list[str]:
    return [one.content.idempotency_key for one in deliveries if isinstance(one.content, Envelope)]


async def pull(one: RedisTransport, *, limit: int = 100, lease: float = 30.0) -> list[Delivery]:
    return await one.pull("orders", limit=limit, lease=lease)


def raw(url: str) -> Any:
    return redis.Redis.from_url(url)


# out and in


def test_what_is_published_arrives_as_it_was_and_in_order(redis_url: str) -> None:
    """J5, A2: with every field, one entry each, in one field of canonical JSON."""

    async def scenario() -> None:
        one = transport(redis_url)
        sent = [
            envelope(n, tags={"t": "ä"}, ordering_key="k", sequence=n, trace="trace", created_at=n)
            for n in range(1, 1_203)
        ]
        await one.publish(sent)
        found: list[Delivery] = []
        while some := await pull(one, limit=10_000):
            found += some
        assert keys(found) == [envelope.idempotency_key for envelope in sent]
        got = found[0].content
        assert isinstance(got, Envelope)
        assert (got.payload_inline, got.tags, got.sequence) == (sent[0].payload_inline, {"t": "ä"}, 1)
        assert {delivery.times for delivery in found} == {1}
        await one.close()

    run(scenario)
    with raw(redis_url) as client:
        ((_, fields),) = client.xrange("orders", count=1)
    assert list(fields) == [b"envelope"]
    assert from_json(fields[b"envelope"]).id == "id-1"


def test_each_group_is_given_every_entry_and_its_workers_share_them(redis_url: str) -> None:
    """J9: including entries published before the group existed."""

    async def scenario() -> None:
        first, second = transport(redis_url), transport(redis_url)
        other = transport(redis_url, group="shipping")
        await first.publish([envelope(n) for n in range(4)])
        assert keys(await pull(first, limit=3)) == ["order-0", "order-1", "order-2"]
        assert keys(await pull(second)) == ["order-3"]
        assert len(await pull(other)) == 4
        for one in (first, second, other):
            await one.close()

    run(scenario)


def test_what_was_not_acknowledged_goes_to_another_when_its_lease_is_over(redis_url: str) -> None:
    """Fault 16: not before that; acknowledged entries do not come again."""

    async def scenario() -> None:
        dead, other = transport(redis_url), transport(redis_url)
        await dead.publish([envelope(n) for n in range(3)])
        had = await pull(dead)
        await dead.ack(had[:1])
        assert await pull(other) == []
        again = await pull(other, lease=NO_LEASE)
        assert [(one.handle, one.times) for one in again] == [(one.handle, 2) for one in had[1:]]
        await other.ack(again)
        assert await pull(dead, lease=NO_LEASE) == []

    run(scenario)


def test_a_stale_acknowledgement_does_no_harm_and_proves_nothing(redis_url: str) -> None:
    """Fault 10: Redis accepts it from any consumer, so nothing may depend on it."""

    async def scenario() -> None:
        stale, owner = transport(redis_url), transport(redis_url)
        await stale.publish([envelope()])
        had = await pull(stale)
        owned = await pull(owner, lease=NO_LEASE)
        await stale.ack(had)
        await owner.ack(owned)
        await owner.ack(owned)
        assert await pull(owner, lease=NO_LEASE) == []

    run(scenario)


def test_what_is_given_back_comes_again_after_its_delay(redis_url: str) -> None:
    """C11: at once or after the delay, at the latest when its lease is over."""

    async def scenario() -> None:
        one, other = transport(redis_url), transport(redis_url)
        await one.publish([envelope(n) for n in range(3)])
        now, later, never = await pull(one)
        await one.nack([now], delay=0)
        await one.nack([later], delay=20)
        await one.nack([never], delay=1_000)
        assert [delivery.handle for delivery in await pull(other)] == [now.handle]
        with raw(redis_url) as client:
            idle = [
                entry["time_since_delivered"] / 1000
                for entry in client.xpending_range("orders", "billing", later.handle, never.handle, 2)
            ]
        # Ten seconds of a lease of 30 have passed, or none; more only by the duration of the test.
        assert 10 <= idle[0] < 20
        assert 0 <= idle[1] < 10

    run(scenario)


def test_what_another_has_by_now_cannot_be_given_back(redis_url: str) -> None:
    """Fault 10: a paused worker must not take it from its successor."""

    async def scenario() -> None:
        stale, owner, third = transport(redis_url), transport(redis_url), transport(redis_url)
        await stale.publish([envelope()])
        had = await pull(stale)
        assert len(await pull(owner, lease=NO_LEASE)) == 1
        await stale.nack(had, delay=0)
        assert await pull(third) == []

    run(scenario)


def test_entries_that_are_no_envelopes_come_as_their_bytes(redis_url: str) -> None:
    """Fault 24: the receiver interprets them; an entry without our field arrives whole, as JSON."""
    with raw(redis_url) as client:
        client.xadd("orders", {"envelope": b"\xff\x00"})
        client.xadd("orders", {"number": "7", b"\xff": "x"})
        client.xadd("orders", {"envelope": b" " * (limits.ENVELOPE_BYTES_MAX + 1)})

    async def scenario() -> None:
        found = await pull(transport(redis_url))
        assert [one.content for one in found[:2]] == [b"\xff\x00", b'{"number":"7","\\\\xff":"x"}']
        assert isinstance(found[2].content, bytes)

    run(scenario)


def test_a_stream_that_is_gone_begins_anew(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 6: an operator removed it, or a server that may forget has forgotten it."""

    async def scenario() -> None:
        one = transport(redis_url)
        assert await pull(one) == []
        with raw(redis_url) as client:
            client.flushdb()
        assert await pull(one) == []
        await one.publish([envelope()])
        assert len(await pull(one)) == 1

    run(scenario)
    assert "stream_missing stream=orders group=billing" in caplog.text


def test_a_stream_is_kept_as_long_as_was_said_and_what_was_cut_off_shows(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """J7."""

    async def scenario() -> None:
        one = transport(redis_url, max_entries=limits.STREAM_ENTRIES_MIN)
        await one.publish([envelope()])
        await pull(one)
        for _ in range(3):
            await one.publish([envelope(n) for n in range(limits.STREAM_ENTRIES_MIN)])
        await pull(one, lease=NO_LEASE)

    run(scenario)
    with raw(redis_url) as client:
        assert client.xlen("orders") < 2 * limits.STREAM_ENTRIES_MIN
    assert "entries_removed_unread stream=orders group=billing" in caplog.text


def test_consumers_are_forgotten_unless_they_hold_something(redis_url: str) -> None:
    """J7: forgetting a consumer with pending entries would lose them."""

    def consumers() -> int:
        with raw(redis_url) as client:
            return len(client.xinfo_consumers("orders", "billing"))

    async def scenario() -> None:
        idle, busy = transport(redis_url), transport(redis_url)
        await idle.publish([envelope(1), envelope(2)])
        await pull(busy, limit=1)
        await idle.ack(await pull(idle, limit=1))
        assert consumers() == 2
        await idle.close()
        await busy.close()
        assert consumers() == 1
        other = transport(redis_url)
        assert len(await pull(other, lease=NO_LEASE)) == 1
        await other.close()

    run(scenario)


def test_one_transport_serves_one_event_loop_after_the_other(redis_url: str) -> None:
    """Fault 41: connections of an ended loop are not used again."""
    one = transport(redis_url)
    run(lambda: one.publish([envelope()]))

    async def scenario() -> None:
        assert len(await pull(one)) == 1
        await one.close()
        await one.close()

    run(scenario)


# names


@pytest.mark.parametrize("name", ["", "Orders", "a b", "{orders}", "orders*", "orders\r\nFLUSHALL", "é", "x" * 64])
def test_hostile_names_are_refused(name: str) -> None:
    """Fault 29: hash tags, patterns, whitespace and line ends; nothing is sent."""
    one = transport("redis://127.0.0.1:1")

    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match="stream name"):
            await one.pull(name, limit=1, lease=1.0)
        with pytest.raises(ConfigurationError, match="stream name"):
            await one.publish([envelope(queue=name)])

    run(scenario)
    with pytest.raises(ConfigurationError, match="group name"):
        transport("redis://127.0.0.1:1", group=name)
    if name not in ("", "Orders"):
        with pytest.raises(ConfigurationError, match="prefix"):
            transport("redis://127.0.0.1:1", prefix=name * 2)


def test_wrong_settings_are_refused_when_it_is_made() -> None:
    """L4."""
    for wrong in ({"max_entries": 10}, {"durability": "nothing"}, {"wait": -1}):
        with pytest.raises(ConfigurationError):
            transport("redis://127.0.0.1:1", **wrong)

    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match="group='billing'"):
            await pull(transport("redis://127.0.0.1:1", group=None))

    run(scenario)


def test_a_prefix_stands_before_every_stream(redis_url: str) -> None:
    async def scenario() -> None:
        one = transport(redis_url, prefix="shop:")
        await one.publish([envelope()])
        assert len(await pull(one)) == 1

    run(scenario)
    with raw(redis_url) as client:
        assert client.keys() == [b"shop:orders"]


def test_an_envelope_that_is_too_large_is_refused_and_nothing_is_published(redis_url: str) -> None:
    """Fault 23."""

    async def scenario() -> None:
        one = transport(redis_url)
        with pytest.raises(LimitError):
            await one.publish([envelope(), envelope(2, payload_inline=b'"%s"' % (b"x" * limits.ENVELOPE_BYTES_MAX))])
        assert await pull(one) == []

    run(scenario)


# durability of a server


@pytest.mark.parametrize(
    ("found", "durability"),
    [
        ({}, "power loss"),
        ({"no-appendfsync-on-rewrite": "yes"}, "process crash"),
        ({"appendfsync": "everysec"}, "all but the last seconds"),
        ({"appendfsync": "no"}, "process crash"),
        ({"appendonly": "no"}, None),
        ({"maxmemory-policy": "allkeys-lru"}, None),
        ({"maxmemory-policy": "volatile-ttl"}, None),
    ],
)
def test_a_server_is_judged_by_its_settings(found: dict[str, str], durability: Any) -> None:
    """Fault 6: without its log, or if it evicts keys, it loses entries, whatever its owner states.

    With ``everysec`` it may answer before it has written: seen with a disk with slow syncs.
    """
    settings = {**DURABLE, **found}
    if durability is not None:
        for stated in (None, "process crash", "power loss"):
            assert judge(settings, stated=stated, allow_volatile=False, server="s") == durability  # type: ignore[arg-type]
        return
    ((name, value),) = found.items()
    with pytest.raises(ConfigurationError, match=f"{name} is {value}, so .* set `{name} .*allow_volatile=True"):
        judge(settings, stated="power loss", allow_volatile=False, server="s")
    assert judge(settings, stated="power loss", allow_volatile=True, server="s") == "nothing"


def test_a_server_that_hides_its_settings_needs_an_explicit_durability() -> None:
    """Fault 6: a partial answer counts as none, unless it shows a bad setting."""
    for told in ({}, {"appendonly": "yes"}, {"appendonly": "yes", "appendfsync": "always"}):
        with pytest.raises(
            ConfigurationError, match=r"does not show .*durability='process crash'.*allow_volatile=True"
        ):
            judge(told, stated=None, allow_volatile=False, server="s")
        assert judge(told, stated="process crash", allow_volatile=False, server="s") == "process crash"
        assert judge(told, stated=None, allow_volatile=True, server="s") == "nothing"
    with pytest.raises(ConfigurationError, match="appendonly is no"):
        judge({"appendonly": "no"}, stated="power loss", allow_volatile=False, server="s")


def test_a_server_that_forbids_the_question_is_refused_until_durability_is_stated(redis_server: RedisServer) -> None:
    """Fault 6: as with a rented server, whose users may do everything but read settings."""
    with raw(redis_server.url()) as client:
        client.execute_command("ACL", "SETUSER", "rented", "on", ">open-sesame", "~*", "+@all", "-config")
    url = redis_server.url(user="rented", password="open-sesame")

    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match="does not show its appendonly") as caught:
            await transport(url).open()
        assert "open-sesame" not in str(caught.value)
        one = transport(url, durability="process crash")
        await one.open()
        assert one.capabilities.durability == "process crash"
        await one.close()

    run(scenario)


# errors


def test_a_full_server_is_unavailable_and_a_wrong_kind_of_key_is_an_error(redis_url: str) -> None:
    """Faults 12 and 34: the first may work later; the second needs an operator."""

    async def scenario() -> None:
        clock = FakeClock()
        one = transport(redis_url, clock=clock)
        with raw(redis_url) as client:
            client.set("orders", "a text")
            with pytest.raises(TransportError, match="WRONGTYPE") as caught:
                await one.publish([envelope()])
            assert not isinstance(caught.value, TransportUnavailableError)
            client.delete("orders")
            client.config_set("maxmemory", "1")
            try:
                with pytest.raises(TransportUnavailableError, match="maxmemory"):
                    await one.publish([envelope()])
            finally:
                client.config_set("maxmemory", "0")
        with pytest.raises(TransportUnavailableError, match="tried again soon"):
            await one.publish([envelope()])
        clock.advance(limits.TRANSPORT_PAUSE_SECONDS_MAX)
        await one.publish([envelope()])

    run(scenario)


def test_passwords_show_nowhere(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Fault 33: wrong ones, unreadable URLs, missing servers; in errors, causes, logs and repr."""
    caplog.set_level(logging.DEBUG)
    secret = "CANARY"
    shown: list[str] = []

    async def scenario() -> None:
        for url in (
            redis_server.url(user="user", password=secret),
            f"redis://:{secret}@127.0.0.1:1/0",
            f"redis://:{secret}@127.0.0.1:1/0?socket_timeout={secret}",
            f"http://user:{secret}@127.0.0.1",
            f"redis://user:{secret}@127.0.0.1:port",
            secret,
        ):
            try:
                one = transport(url)
                shown.append(repr(one))
                await one.open()
            except (ConfigurationError, TransportUnavailableError) as error:
                shown.extend([str(error), repr(error), str(error.__cause__)])

    run(scenario)
    assert len(shown) > 10
    assert secret not in "".join(shown) + caplog.text


def test_what_a_server_quotes_of_a_command_is_not_repeated() -> None:
    """Fault 33: a server without streams quotes the beginning of the command in its error."""
    link = RedisConnection("redis://h", clock=SystemClock(), chance=system_random(), allow_volatile=False, stated=None)
    said = "unknown command `XADD`, with args beginning with: `orders` `*` `envelope` `CANARY`"
    assert str(link._translate(ResponseError(said))) == "Redis at h:6379: unknown command `XADD`"


def test_a_server_that_is_away_is_tried_by_one_and_the_others_are_told_at_once() -> None:
    """Fault 34: after pauses that grow up to their limit."""

    async def scenario() -> None:
        clock = FakeClock()
        one = transport("redis://127.0.0.1:1", clock=clock)
        tried = 0
        for _ in range(600):
            answers = await asyncio.gather(*(one.publish([envelope()]) for _ in range(5)), return_exceptions=True)
            assert all(isinstance(answer, TransportUnavailableError) for answer in answers)
            tried += sum("tried again soon" not in str(answer) for answer in answers)
            clock.advance(1.0)
        # About every four seconds, after the first few.
        assert 600 / limits.TRANSPORT_PAUSE_SECONDS_MAX <= tried < 600 / 2

    run(scenario)


# the server of the tests


def test_the_server_keeps_its_port_and_its_data_and_leaves_nothing(redis_program: Path) -> None:
    with RedisServer(redis_program) as server:
        url, directory, process = server.url(), server._directory, server._process
        with raw(url) as client:
            client.set("kept", "1")
        server.kill()
        assert process is not None
        assert process.poll() == -9
        server.restart()
        with raw(url) as client:
            assert client.get("kept") == b"1"
        process = server._process
    assert process is not None
    assert process.poll() is not None
    assert directory is not None
    assert not directory.exists()


def test_other_users_of_the_machine_are_kept_out_of_the_server(redis_server: RedisServer) -> None:
    """Without the password no command is answered; the password is not among the server's arguments."""
    with raw(f"redis://127.0.0.1:{redis_server.port}") as client, pytest.raises(redis.AuthenticationError):
        client.config_get("dir")
    process = redis_server._process
    assert process is not None
    password = redis_server.url().split(":")[2].partition("@")[0]
    assert len(password) == 32
    assert password.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_the_environment_names_the_server_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEFOLD_REDIS_BIN", str(tmp_path))
    with pytest.raises(RuntimeError, match="ONEFOLD_REDIS_BIN"):
        find_redis()
    (tmp_path / "redis-server").touch(mode=0o755)
    assert find_redis() == tmp_path / "redis-server"


def test_a_server_that_does_not_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "redis-server").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "redis-server").chmod(0o755)
    made = tmp_path / "made"
    made.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(made))
    with pytest.raises(RuntimeError, match="did not start"):
        RedisServer(tmp_path / "redis-server").start()
    assert list(made.iterdir()) == []
