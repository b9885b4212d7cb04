"""What becomes of PostgreSQL sessions: lost ones, lost replies, joined ones, and what is sent over them."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Literal

import psycopg
import pytest
from psycopg import errors
from test_postgres_engine import claim, envelope, opened, run, terminate_sessions

from onefold.errors import ConfigurationError, StoreError, StoreUnavailableError
from onefold.store import Again, Counts, Dead, Done, Failure, HandBack, PutOptions, Query, State
from onefold.store.journal_lines import Line, LineKind
from onefold.store.postgres import PostgresStore
from onefold.store.postgres.wire.statements import BEGIN, SQL
from onefold.store.postgres.wire.wire import Wire

WHEN = ("before", "after")
FAILURE = Failure(reason="exception", error_type="ValueError", error_message="no")

# lost sessions


def test_terminated_sessions_cost_nothing_but_time(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope("a"), envelope("b")])
            terminate_sessions(postgres_url)
            await store.put([envelope("c")])
            terminate_sessions(postgres_url)
            leases = await claim(store)
            assert len(leases) == 3
            terminate_sessions(postgres_url)
            assert await store.extend(leases, lease=60) == [True, True, True]
            terminate_sessions(postgres_url)
            assert await store.settle([(lease, Done(b"1")) for lease in leases]) == [True, True, True]
            terminate_sessions(postgres_url)
            assert (await store.find(Query(ids=(leases[0].id,))))[0].state is State.DONE
            terminate_sessions(postgres_url)
            async with store.transaction() as transaction:
                await transaction.put([envelope("d")])
            assert (await store.count())["default"].scheduled == 1

    run(scenario)


def test_a_session_lost_inside_a_transaction_is_a_typed_error(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:

            async def interrupted() -> None:
                async with store.transaction() as transaction:
                    await transaction.put([envelope("a")])
                    terminate_sessions(postgres_url)
                    await transaction.execute("SELECT 1")

            with pytest.raises(StoreUnavailableError):
                await interrupted()
            assert await store.count() == {}

    run(scenario)


def test_a_server_that_cannot_be_reached_is_a_typed_error() -> None:
    store = PostgresStore("postgresql://nobody@127.0.0.1:1/none", patience=0.1)
    with pytest.raises(StoreUnavailableError) as caught:
        asyncio.run(store.open())
    assert isinstance(caught.value.__cause__, psycopg.OperationalError)


@pytest.mark.parametrize("wrong", ["database", "role"])
def test_a_database_or_role_that_does_not_exist_is_said_at_once(postgres_url: str, wrong: str) -> None:
    """It is a mistake in the URL, and no reason to try for as long as patience lasts."""
    parts = psycopg.conninfo.conninfo_to_dict(postgres_url)
    parts["dbname" if wrong == "database" else "user"] = "no_such_thing"
    store = PostgresStore(psycopg.conninfo.make_conninfo("", **parts), patience=60)
    for verb in (store.open, store.migrate):
        with pytest.raises(ConfigurationError, match=r"no_such_thing|password"):
            asyncio.run(asyncio.wait_for(verb(), 5))


def test_a_caller_that_gives_up_while_a_transaction_begins_leaves_none_open(postgres_url: str) -> None:
    """What comes next on that connection would be answered, never committed, and lost with it."""
    impatient: asyncio.Task[object] | None = None

    def give_up(moment: Literal["before", "after"], statement: str) -> None:
        if impatient is not None and (moment, statement) == ("before", BEGIN):
            impatient.cancel()

    async def scenario() -> None:
        nonlocal impatient
        async with opened(postgres_url, trace=give_up) as store:
            await store.put([envelope("a")])
            (lease,) = await claim(store)
            impatient = asyncio.create_task(store.record(lease.id, [Line("s", LineKind.SIGNAL, b"1")]))
            with pytest.raises(asyncio.CancelledError):
                await impatient
            impatient = None
            await store.record(lease, [Line("t", LineKind.RESULT, b"1")])
            with psycopg.connect(postgres_url) as direct:
                assert direct.execute("SELECT name FROM onefold.step").fetchall() == [("t",)]

    run(scenario)


def test_a_session_that_is_left_in_a_failed_transaction_counts_as_lost(postgres_url: str) -> None:
    async def fail(wire: Wire, _: bool) -> None:
        await wire.script(BEGIN)
        with pytest.raises(errors.UndefinedTable):
            await wire.script("SELECT FROM nowhere")

    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope("a"), envelope("b")])
            one, two = await claim(store)
            await store._links["settle"].run(fail)
            assert await store.settle([(one, Done(b"1"))]) == [True]
            await store._links["settle"].run(fail)
            assert await store.settle([(two, Again(60, FAILURE))]) == [True]
            assert (await store.find(Query(ids=(two.id,))))[0].attempt == 1
            assert await store.count() == {"default": Counts(scheduled=1)}

    run(scenario)


class Loser:
    """Loses the connection at one moment: before a statement reached the server, or after it was done there."""

    def __init__(self) -> None:
        self.at: int | None = None
        self.seen = 0
        self.lost = ""

    def __call__(self, moment: Literal["before", "after"], statement: str) -> None:
        if self.at is None or "pg_notify" in statement:
            return
        self.seen += 1
        if self.seen == self.at:
            self.lost = f"{moment} {statement}"
            raise errors.ConnectionFailure(self.lost)


def test_whichever_reply_is_lost_puts_and_settles_happen_once(postgres_url: str) -> None:
    async def scenario() -> None:
        loser = Loser()
        async with opened(postgres_url, trace=loser) as store:
            for at in itertools.count(1):
                loser.at = None
                first = await store.put([envelope(f"{at}:old")])
                outcomes = [
                    Done(b"1", sends=(envelope(f"{at}:child"), envelope())),
                    Dead(FAILURE),
                    Again(60, FAILURE),
                    Again(60, None, counted=False),
                    HandBack(),
                ]
                await store.put([envelope() for _ in outcomes])
                leases = [lease for lease in await claim(store) if not lease.envelope.keyed]
                loser.at, loser.seen = at, 0

                assert not (await store.put([envelope(f"{at}:new")]))[0].duplicate
                assert (await store.put([envelope(f"{at}:old")]))[0].id == first[0].id
                many = await store.put([envelope(f"{at}:m1"), envelope(), envelope(f"{at}:old")])
                assert [stored.duplicate for stored in many] == [False, False, True]
                assert await store.settle(list(zip(leases, outcomes, strict=True))) == [True] * 5

                fired = loser.seen >= at
                loser.at = None
                # new, m1 and its neighbour, child and its sibling; again twice, handed back; old is leased.
                await _expect_and_clear(store, scheduled=8, leased=1, dead=1)
                if not fired:
                    break
            assert at > 30

    run(scenario)


def test_a_claim_whose_answer_is_lost_returns_what_it_took(postgres_url: str) -> None:
    """Fault 9: the leases are not left to run out, and no crash is counted where there was none."""

    async def scenario() -> None:
        loser = Loser()
        async with opened(postgres_url, trace=loser) as store:
            for at in itertools.count(1):
                loser.at = None
                await store.put([envelope(f"{at}:{n}") for n in range(3)])
                loser.at, loser.seen, loser.lost = at, 0, ""
                leases = await claim(store, 2)
                loser.at = None
                assert (await store.count())["default"] == Counts(scheduled=1, leased=2)
                leases += await claim(store)
                assert len({lease.id for lease in leases}) == 3
                assert await store.settle([(lease, Done(b"1")) for lease in leases]) == [True] * 3
                if not loser.lost:
                    break
            assert at > 2

    run(scenario)


async def _expect_and_clear(store: PostgresStore, **expected: int) -> None:
    counts = (await store.count())["default"]
    assert {name: getattr(counts, name) for name in expected} == expected
    async with store.transaction() as transaction:
        await transaction.execute("TRUNCATE onefold.message, onefold.delivery, onefold.outcome, onefold.key")


def test_a_lost_commit_of_a_transaction_is_resolved(postgres_url: str) -> None:
    async def scenario() -> None:
        loser = Loser()
        async with opened(postgres_url, trace=loser) as store:
            async with store.transaction() as transaction:
                await transaction.execute("CREATE TABLE effect (n int)")
            for ending, at in itertools.product(("settle", "conclude", "neither"), range(1, 13)):
                loser.at = None
                await store.put([envelope()])
                (lease,) = await claim(store)
                loser.at, loser.seen, loser.lost = at, 0, ""
                committed = True
                try:
                    async with store.transaction() as transaction:
                        await transaction.execute("INSERT INTO effect VALUES (%s)", [at])
                        await transaction.put([envelope(f"{ending}{at}")])
                        if ending == "settle":
                            assert await transaction.settle([(lease, Done(b"1"))]) == [True]
                        if ending == "conclude":
                            await transaction.conclude([(lease, Done(b"1"))])
                except StoreUnavailableError:
                    committed = False
                loser.at = None
                if loser.lost in ("", "after COMMIT"):
                    assert committed
                effects = await store.fetch("SELECT count(*) FROM effect")
                assert effects == [(1 if committed else 0,)]
                assert (await store.count())["default"].leased == (0 if committed and ending != "neither" else 1)
                async with store.transaction() as transaction:
                    await transaction.execute("TRUNCATE effect, onefold.message, onefold.delivery, onefold.outcome")

    run(scenario)


def test_a_session_lost_while_concluding_leaves_nothing_or_everything(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope()])
            (lease,) = await claim(store)

            async def conclude() -> None:
                async with store.transaction() as transaction:
                    await transaction.put([envelope("child")])
                    terminate_sessions(postgres_url)
                    await transaction.conclude([(lease, Done(b"1"))])

            with pytest.raises(StoreUnavailableError):
                await conclude()
            assert (await store.count())["default"] == Counts(scheduled=0, leased=1)

    run(scenario)


def _ours(seen: list[str]) -> list[str]:
    """Without what other connections do at their own time."""
    return [text for text in seen if not re.search("pg_notify|set_config|LISTEN|pg_control_system", text)]


def test_a_transaction_is_marked_when_it_begins_and_ends_with_its_last_statement(postgres_url: str) -> None:
    """BEGIN and a savepoint are one round trip; the savepoint's release, the settle and COMMIT are another."""

    async def scenario() -> None:
        seen: list[str] = []
        async with opened(postgres_url, trace=lambda moment, text: seen.append(f"{moment} {text}")) as store:
            await store.put([envelope(), envelope()])
            leases = await claim(store)
            seen.clear()
            async with store.transaction() as transaction:
                begun = _ours(seen)
                name = begun[1].removeprefix("before SAVEPOINT ")
                assert re.fullmatch("onefold_[0-9a-f]{16}", name)
                assert begun == [f"{moment} {text}" for moment in WHEN for text in (BEGIN, f"SAVEPOINT {name}")]
                seen.clear()
                await transaction.execute("SELECT %s", [1])
                assert _ours(seen) == ["before SELECT %s", "after SELECT %s"]
                seen.clear()
                await transaction.conclude([(leases[0], Done(b"1"))])
                texts = [f"RELEASE SAVEPOINT {name}", SQL["settle_planned"], SQL["settle_one"], "COMMIT"]
                sent = [f"{moment} {text}" for moment in WHEN for text in texts]
                assert _ours(seen) == sent
                with pytest.raises(StoreError, match="too late"):
                    await transaction.settle([(leases[1], Done(b"1"))])
            assert _ours(seen) == sent
            assert (await store.count())["default"].leased == 1

    run(scenario)


def test_a_joined_transaction_is_not_concluded(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store, await psycopg.AsyncConnection.connect(postgres_url) as connection:
            await store.put([envelope()])
            (lease,) = await claim(store)
            async with store.transaction(connection) as transaction:
                with pytest.raises(StoreError, match="joined"):
                    await transaction.conclude([(lease, Done(b"1"))])

    run(scenario)


# transactions


def test_a_joined_connection_is_not_committed(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            connection = await psycopg.AsyncConnection.connect(postgres_url, row_factory=psycopg.rows.dict_row)
            async with connection:
                async with store.transaction(connection) as transaction:
                    assert transaction.connection is connection
                    await transaction.put([envelope("a"), envelope("b")])
                    assert await transaction.execute("SELECT 1") == [(1,)]
                assert await store.count() == {}
                await connection.rollback()
                async with store.transaction(connection) as transaction:
                    assert not (await transaction.put([envelope("a")]))[0].duplicate
                await connection.commit()
                assert (await store.count())["default"].scheduled == 1

    run(scenario)


def test_what_cannot_be_joined_is_refused_by_name(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            with pytest.raises(ConfigurationError, match=r"psycopg\.AsyncConnection"):
                async with store.transaction(object()):
                    pass
            async with await psycopg.AsyncConnection.connect(postgres_url, autocommit=True) as connection:
                with pytest.raises(ConfigurationError, match="autocommit"):
                    async with store.transaction(connection):
                        pass

    run(scenario)


def test_a_transaction_that_had_failed_does_not_pretend_to_commit(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:

            async def careless() -> None:
                async with store.transaction() as transaction:
                    await transaction.put([envelope("a")])
                    with pytest.raises(errors.DivisionByZero):
                        await transaction.execute("SELECT 1 / 0")

            with pytest.raises(StoreError, match="nothing of it was committed"):
                await careless()
            assert await store.count() == {}

    run(scenario)


def test_fetch_refuses_to_write(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            with pytest.raises(errors.ReadOnlySqlTransaction):
                await store.fetch("CREATE TABLE mine (n int)")

    run(scenario)


@pytest.mark.empty
def test_behind_a_transaction_pooler_nothing_is_prepared_or_set(postgres_url: str) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        async with opened(postgres_url, pooler="transaction", trace=lambda _, text: seen.append(text)) as store:
            assert not store.capabilities.notifies
            for number in range(8):
                await store.put([envelope(f"k{number}")])
            leases = await claim(store)
            assert await store.settle([(lease, Done(b"1")) for lease in leases]) == [True] * 8
            await store.wait(["default"], timeout=0)
        assert not any("set_config" in text or "LISTEN" in text for text in seen)

    run(scenario)


def test_a_batch_of_successes_is_one_statement(postgres_url: str) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        async with opened(postgres_url, trace=lambda moment, text: seen.append(text)) as store:
            await store.put([envelope() for _ in range(10)])
            await store.wait(["default"], timeout=0)
            leases = await claim(store)
            await store.settle([])
            seen.clear()
            await store.settle([(lease, Done(b"1")) for lease in leases])
            assert _ours(seen) == [SQL["settle_done"]] * 2
            seen.clear()
            await store.put([envelope("one")])
            assert _ours(seen) == [SQL["put_one"]] * 2

    run(scenario)


@pytest.mark.parametrize(
    ("state", "lease_until", "worker", "target", "fits"),
    [
        (0, None, None, None, True),
        (0, None, None, 1, False),
        (1, 1, "w", None, True),
        (0, 1, "w", None, False),
        (0, 1, None, None, False),
        (0, None, "w", 1, False),
        (1, None, None, None, False),
        (1, 1, None, None, False),
        (1, None, "w", None, False),
        (1, 1, "w", 1, False),
        (2, None, None, 1, True),
        (2, None, None, None, False),
        (2, 1, "w", None, False),
        (2, 1, "w", 1, False),
        (2, 1, None, 1, False),
        (3, 1, "w", 1, False),
        (3, None, None, 1, False),
        (-1, None, None, 1, False),
    ],
)
def test_a_delivery_that_makes_no_sense_is_refused_by_the_server(
    postgres_url: str, state: int, lease_until: int | None, worker: str | None, target: int | None, fits: bool
) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as store:
            await store.put([envelope("one")])
        statement = "UPDATE onefold.delivery SET state = %s, lease_until = %s, worker = %s, wake_target = %s"
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            try:
                connection.execute(statement, (state, lease_until, worker, target))
            except errors.CheckViolation:
                assert not fits
            else:
                assert fits

    run(scenario)


def test_a_batch_key_covers_the_whole_batch(postgres_url: str) -> None:
    async def scenario() -> None:
        async with opened(postgres_url) as one, opened(postgres_url) as other:
            options = PutOptions(batch_key="b")
            batches = [[envelope("x"), envelope("y")] for _ in range(4)]
            stores = itertools.cycle((one, other))
            answers = await asyncio.gather(*(next(stores).put(batch, options) for batch in batches))
            assert sum(not stored.duplicate for answer in answers for stored in answer) == 2
            assert (await one.count())["default"].scheduled == 2

    run(scenario)


def test_a_connection_that_was_lent_is_closed_when_its_transaction_fails(postgres_url: str) -> None:
    """A handler past its limit still holds the connection; it must not go on writing outside of any transaction."""

    async def scenario() -> None:
        store = PostgresStore(postgres_url)
        await store.migrate()
        await store.open()
        lent = None

        async def fail() -> None:
            nonlocal lent
            async with store.transaction() as transaction:
                lent = transaction.connection
                raise LookupError

        with pytest.raises(LookupError):
            await fail()
        assert lent is not None
        assert lent.closed
        assert await store.fetch("SELECT 1") == [(1,)]
        await store.close()

    asyncio.run(scenario())
