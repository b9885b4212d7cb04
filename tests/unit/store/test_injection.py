"""Names and texts that engines could take for commands: refused with a typed error, or kept to the last character."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest

from onefold import App, OnefoldError, Reject, State
from onefold.message.envelope import Envelope
from onefold.store import Query

if TYPE_CHECKING:
    from tests.unit.conftest import Bench

CORPUS = [
    # SQL
    "'; DROP TABLE onefold_message; --",
    "'; DROP SCHEMA onefold CASCADE; --",
    "' OR '1'='1",
    '" OR ""="',
    "1; DELETE FROM effect",
    "x') ON CONFLICT DO NOTHING; --",
    "\\'; SELECT pg_read_file('x'); --",
    "$$; DROP TABLE effect; $$",
    "?", "%s", "%(name)s", ":name", "$1", "{0}", "{order}", "%",
    "x\\", "\\x00", "E'\\x27'",
    "NULL", "default", "*",
    # NATS subjects and Redis tags
    "orders.>", "orders.*", ">", "a b", "a\tb", "{tag}", "key{tag}rest", "a.b.c", "$SYS.REQ", "_INBOX.x",
    # Headers, logs and terminals
    "x\r\nNats-Msg-Id: 1", "x\nSet-Cookie: a=b", "x\r", "\x1b[31mred\x1b[0m", "x\x00y", "\u202eevil", "\ufeffx", "\x7f",
    # JSON and text
    '{"a":1}', '"', "]", "\\u0000", "<script>alert(1)</script>", "../../etc/passwd", "%2e%2e%2f",
    "ünïcödé", "🙂", "\ud800",
    "a" * 63, "a" * 64, "a" * 5_000, "", " ", "unkeyed:x",
]  # fmt: skip


LONE_SURROGATE = "\ud800"


def queries_for(text: str) -> list[Query]:
    """Return every query that a person's text can be part of."""
    return [
        Query(ids=(text,)),
        Query(queue=text),
        Query(message_type=text, states=(State.DEAD,)),
        Query(correlation_id=text),
    ]


async def stored_or_refused(verb: Callable[[], Awaitable[Any]]) -> Any:
    """Return what the verb gave, or None when it was refused with an error of ours."""
    try:
        return await verb()
    except OnefoldError:
        return None


async def intact(bench: Bench, messages: int) -> None:
    """Every table is there, and no row more or less."""
    assert await bench.effects() == ["witness"]
    assert len(await bench.messages()) == messages
    assert sum(count.scheduled + count.leased + count.dead for count in (await bench.app.count()).values()) <= messages


@pytest.mark.parametrize(
    ("option", "read"),
    [
        ("queue", lambda e: e.queue),
        ("key", lambda e: e.idempotency_key),
        ("subject", lambda e: e.subject),
        ("correlation_id", lambda e: e.correlation_id),
        ("causation_id", lambda e: e.causation_id),
        ("ordering_key", lambda e: e.ordering_key),
        ("deduplicate", lambda e: e.deduplication_key),
        ("trace", lambda e: e.trace),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_text_in_an_option_is_refused_or_kept_as_it_is(
    bench: Bench, option: str, read: Callable[[Envelope], str]
) -> None:
    """Fault 29: and finds only its own message again."""

    @bench.app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "witness")
        kept = 0
        for text in CORPUS:
            options: Any = {option: text}

            async def send(options: Any = options) -> Any:
                return await ping.options(**options).send()

            if receipt := await stored_or_refused(send):
                kept += 1
                assert read((await bench.record(receipt)).envelope) == text
        assert 0 < kept < len(CORPUS)
        await intact(bench, kept)

    bench.run(scenario)


def test_hostile_text_in_tags_is_refused_or_kept_as_it_is(bench: Bench) -> None:
    """Fault 29: as name and as value."""

    @bench.app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "witness")
        kept = 0
        for text in CORPUS:
            for tags in ({text: "value"}, {"name": text}):

                async def send(tags: dict[str, str] = tags) -> Any:
                    return await ping.options(tags=tags).send()

                if receipt := await stored_or_refused(send):
                    kept += 1
                    assert (await bench.record(receipt)).envelope.tags == tags
        assert 0 < kept < 2 * len(CORPUS)
        await intact(bench, kept)

    bench.run(scenario)


def test_hostile_text_in_arguments_and_keys_made_of_them_is_refused_or_kept_as_it_is(bench: Bench) -> None:
    """Fault 29, B4: every key is a key of its own, and the handler is given what was sent."""
    given: list[str] = []

    @bench.app.task(key="{text}:{number}", subject="{text}")
    async def ping(text: str, number: int) -> str:
        given.append(text)
        return text

    async def scenario() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "witness")
        sent = {}
        for text in CORPUS:

            async def send(text: str = text) -> Any:
                return await ping.send(text, 1)

            if receipt := await stored_or_refused(send):
                assert not receipt.duplicate
                sent[text] = receipt
        await bench.work()
        assert sorted(given) == sorted(sent)
        for text, receipt in sent.items():
            assert await receipt.result() == text
        assert 0 < len(sent) < len(CORPUS)
        await intact(bench, len(sent))

    bench.run(scenario)


def test_hostile_names_of_tasks_and_workers_queues_are_refused(sqlite_url: str) -> None:
    """Fault 29: names are from an allow-list, so no engine has to quote them."""
    app = App(sqlite_url)

    async def handler() -> None: ...

    harmless = {"default", "a.b.c", "a" * 63}
    for text in CORPUS:
        if text in harmless or not text:
            continue
        with pytest.raises(OnefoldError):
            app.task(name=text)(handler)
        with pytest.raises(OnefoldError):
            app.task(queue=text)(handler)
    assert app.tasks == {}


def test_hostile_text_in_queries_finds_nothing_and_breaks_nothing(bench: Bench) -> None:
    """Fault 29: ids, queues, types and correlation ids come from people's keyboards."""

    @bench.app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "witness")
        sent = await ping.options(queue="other").send()
        for text in CORPUS:
            for query in queries_for(text) if text != LONE_SURROGATE else ():

                async def find(query: Query = query) -> Any:
                    return await bench.app.find(query)

                assert not await stored_or_refused(find)

            async def cancel(text: str = text) -> Any:
                return await bench.app.cancel(text, actor="ada", reason="typo")

            assert not await stored_or_refused(cancel)
        assert (await bench.record(sent)).state is State.SCHEDULED
        await intact(bench, 1)

    bench.run(scenario)


def test_hostile_actors_and_reasons_are_refused_or_kept_as_they_are(bench: Bench) -> None:
    """Fault 29, N3: the log of acts shows what was typed."""

    @bench.app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "witness")
        table = "onefold_act" if bench.url.startswith("sqlite") else "onefold.act"
        kept = []
        for text in CORPUS:
            sent = await ping.send()

            async def cancel(text: str = text, message_id: str = sent.id) -> Any:
                return await bench.app.cancel(message_id, actor=text, reason=text)

            if await stored_or_refused(cancel):
                kept.append((text, text))
        assert sorted(await bench.app.store.fetch(f"SELECT actor, reason FROM {table}")) == sorted(kept)
        assert 0 < len(kept) < len(CORPUS)

    bench.run(scenario)


def test_hostile_worker_names_are_refused_or_kept_as_they_are(bench: Bench) -> None:
    """Fault 29: the name is written beside every message the worker holds."""
    seen: list[str] = []

    @bench.app.task
    async def ping() -> None:
        seen.extend(r.worker or "" for r in await bench.app.find(Query(states=(State.LEASED,))))
        raise Reject("no")

    async def scenario() -> None:
        async with bench.app.transaction() as tx:
            await bench.insert(tx, "witness")
        names = [text for text in CORPUS if text != LONE_SURROGATE]
        for text in names:
            seen.clear()
            sent = await ping.send()

            async def work(text: str = text) -> Any:
                return await bench.app.work(until_idle=True, name=text)

            if await stored_or_refused(work) and text:
                assert seen == [text]
                (attempt,) = await bench.app.store.attempts(sent.id)
                assert attempt.worker == text
            else:
                await bench.work()
        assert len(await bench.messages()) == len(names)

    bench.run(scenario)


def test_hostile_error_texts_are_kept_readable(bench: Bench) -> None:
    """Faults 29 and 33: what an exception says reaches the dead letter, without what no database can keep."""

    @bench.app.task
    async def fails(text: str) -> None:
        raise Reject(CORPUS[int(text)])

    async def scenario() -> None:
        receipts = await bench.app.send_many(fails.call(str(number)) for number in range(len(CORPUS)))
        await bench.work()
        for text, receipt in zip(CORPUS, receipts, strict=True):
            failure = (await bench.record(receipt)).failure
            assert failure is not None
            cleaned = text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
            assert failure.error_message == cleaned[:4_000]

    bench.run(scenario)


def test_a_lone_surrogate_in_a_query_or_a_workers_name_is_a_typed_error(bench: Bench) -> None:
    """Faults 26 and 29: no driver's exception crosses the store's seam."""

    @bench.app.task
    async def ping() -> None: ...

    async def scenario() -> None:
        await ping.send()
        for name in ("queue", "message_type", "correlation_id"):
            with pytest.raises(OnefoldError):
                Query(**{name: LONE_SURROGATE})
        with pytest.raises(OnefoldError):
            await bench.app.work(until_idle=True, name=LONE_SURROGATE)

    bench.run(scenario)
