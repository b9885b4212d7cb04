"""Declaring and calling: mistakes are refused at the declaration or at the call, and not later."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from onefold import App, Call, Context, limits
from onefold.clock import MICROSECONDS, to_instant
from onefold.errors import ConfigurationError, DecodeError, EnvelopeError, LimitError
from onefold.tasks.options import SendOptions
from onefold.tasks.task import Task


@pytest.fixture
def app() -> App:
    return App("sqlite:///:memory:")


async def handler(order_id: int, cents: int = 0) -> str:
    return f"{order_id}: {cents}"


def declared(app: App, **settings: Any) -> Task[..., str]:
    task: Task[..., str] = app.task(**settings)(handler)
    return task


@pytest.mark.parametrize("name", ["", "Charge", "charge order", "charge;", "-x", "x" * 64, "charge\n", "süß"])
def test_a_name_that_some_engine_could_misread_is_refused(app: App, name: str) -> None:
    """A4, fault 29: for tasks and queues; nothing is registered."""
    if name:
        with pytest.raises(ConfigurationError, match="task name"):
            declared(app, name=name)
    with pytest.raises(ConfigurationError, match="queue name"):
        declared(app, queue=name)
    assert app.tasks == {}


def test_the_name_is_that_of_the_function_unless_given(app: App) -> None:
    """A4."""
    assert declared(app).name == "handler"
    assert declared(app, name="shop.charge").name == "shop.charge"
    assert sorted(app.tasks) == ["handler", "shop.charge"]


def test_two_tasks_of_one_name_are_refused(app: App) -> None:
    """A4: their messages would be ambiguous."""
    declared(app)
    with pytest.raises(ConfigurationError, match="two tasks are named 'handler'"):
        declared(app)


def test_what_is_no_function_is_refused(app: App) -> None:
    """P3: the error names the value's type."""
    with pytest.raises(ConfigurationError, match="a handler is a function, not a str"):
        app.task(name="text")("charge")  # type: ignore[call-overload]


async def many(*orders: int) -> None: ...
async def named(**orders: int) -> None: ...
async def positional(order: int, /) -> None: ...


@pytest.mark.parametrize("function", [many, named, positional])
def test_a_signature_that_messages_cannot_carry_is_refused(app: App, function: Callable[..., Any]) -> None:
    """P3: arguments travel by name."""
    with pytest.raises(ConfigurationError):
        app.task(function)


@pytest.mark.parametrize(
    "settings",
    [
        {"version": 0},
        {"version": limits.SCHEMA_VERSION_MAX + 1},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"expires": -1},
        {"key_window": float("inf")},
        {"fingerprint": ("nothing",)},
        {"key": "{nothing}"},
        {"subject": "{nothing}"},
    ],
    ids=str,
)
def test_a_setting_outside_its_range_is_refused_at_the_declaration(app: App, settings: dict[str, Any]) -> None:
    """P3, Q2."""
    with pytest.raises(ConfigurationError):
        declared(app, **settings)
    assert app.tasks == {}


def test_an_unknown_setting_is_refused_at_the_declaration(app: App) -> None:
    """P1, P3: a misspelt setting is not ignored."""
    with pytest.raises(ConfigurationError, match="'qeue'; write queue="):
        declared(app, qeue="fast")


def test_a_key_window_must_cover_the_message_and_its_time_as_a_dead_letter(app: App) -> None:
    """B10: otherwise a redrive could let the effect happen twice."""
    needed = timedelta(seconds=limits.MESSAGE_RETENTION + limits.DEAD_RETENTION + limits.KEY_MARGIN)
    with pytest.raises(ConfigurationError, match=r"key_window is .* 23 days"):
        declared(app, key_window=needed - timedelta(seconds=1))
    assert declared(app, key_window=needed).key_window == needed.total_seconds()
    shorter = needed - timedelta(days=6)
    assert declared(app, name="b", expires=timedelta(days=1), key_window=shorter).key_window == shorter.total_seconds()


def test_the_context_is_known_by_its_type_or_by_its_bare_name(app: App) -> None:
    """P4: the context is no argument of the message."""

    async def typed(whatever: Context, order_id: int) -> None: ...
    async def bare(ctx, order_id: int) -> None: ...  # type: ignore[no-untyped-def]
    async def without(order_id: int) -> None: ...
    async def elsewhere(ctx: int) -> None: ...

    tasks = [app.task(function) for function in (typed, bare, without, elsewhere)]
    assert [task.takes_context for task in tasks] == [True, True, False, False]
    assert [task.signature.names for task in tasks] == [("order_id",), ("order_id",), ("order_id",), ("ctx",)]


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        ((), {}, TypeError),
        ((1, 2, 3), {}, TypeError),
        ((1,), {"order_id": 1}, TypeError),
        ((1,), {"cent": 5}, TypeError),
        (("seven",), {}, DecodeError),
        ((1,), {"cents": None}, DecodeError),
        ((float("nan"),), {}, EnvelopeError),
        ((10**400,), {}, LimitError),
    ],
    ids=str,
)
def test_a_wrong_argument_raises_at_the_call_and_not_when_awaited(
    app: App, args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception]
) -> None:
    """P3, P5: for send and call, with and without options; the app is not even open."""
    task = declared(app)
    for call in (task.send, task.call, task.options(delay=1).send, task.options(delay=1).call):
        with pytest.raises(error):
            call(*args, **kwargs)


WRONG_OPTIONS: list[dict[str, Any]] = [
    {"dealy": 5},
    {"delay": -1},
    {"delay": timedelta(seconds=-1)},
    {"delay": float("inf")},
    {"delay": 1, "at": datetime(2030, 1, 1, tzinfo=UTC)},
    {"at": datetime(2030, 1, 1)},  # noqa: DTZ001
    {"expires": -1},
    {"queue": "Fast Lane"},
    {"queue": None},
    {"deduplicate_for": 59},
    {"deduplicate_for": timedelta(days=31)},
]


@pytest.mark.parametrize("options", WRONG_OPTIONS, ids=str)
def test_options_that_are_unknown_contradictory_or_out_of_range_raise_at_once(
    app: App, options: dict[str, Any]
) -> None:
    """P3: a ConfigurationError, when the options are given."""
    with pytest.raises(ConfigurationError):
        declared(app).options(**options)


@pytest.mark.parametrize("option", ["key", "subject", "correlation_id", "causation_id", "deduplicate"])
@pytest.mark.parametrize("value", ["", "\0", 7, "x" * (limits.KEY_BYTES_MAX + 1)], ids=["empty", "NUL", "int", "long"])
def test_an_option_that_is_no_good_text_raises_at_once(app: App, option: str, value: Any) -> None:
    """P3: an empty key does not mean "no key"."""
    options: Any = {option: value}
    with pytest.raises(LimitError) as refused:
        declared(app).options(**options)
    assert refused.value.field == option


def test_contradictions_are_found_across_two_calls_of_options(app: App) -> None:
    """P3."""
    with pytest.raises(ConfigurationError, match="exclude each other"):
        declared(app).options(delay=1).options(at=datetime(2030, 1, 1, tzinfo=UTC))


def test_options_add_up_and_leave_the_task_as_it_was(app: App) -> None:
    """P1: options never mix with arguments."""
    task = declared(app)
    bound = task.options(queue="fast").options(delay=5)
    assert bound.bound == {"queue": "fast", "delay": 5}
    assert bound.call(1).envelope("id").queue == "fast"
    assert task.call(1).envelope("id").queue == "default"


def test_every_option_reaches_the_message(app: App) -> None:
    """A2 to A12, E1: or the store's answer to a second send."""
    at = datetime(2031, 1, 1, tzinfo=UTC)
    given: SendOptions = {
        "key": "k",
        "at": at,
        "deduplicate": "d",
        "deduplicate_for": timedelta(minutes=5),
        "expires": timedelta(days=1),
        "queue": "fast",
        "subject": "order:1",
        "correlation_id": "request-1",
        "causation_id": "event-1",
        "ordering_key": "customer:1",
        "sequence": 3,
        "trace": "00-1-2-01",
        "tags": {"tenant": "t"},
        "if_dead": "redrive",
    }
    assert given.keys() | {"delay", "priority"} == SendOptions.__annotations__.keys()
    e = declared(app).options(**given).call(1).envelope("id")
    assert (e.idempotency_key, e.due_at, e.deduplication_key) == ("k", to_instant(at), "d")
    assert (e.deduplicate_for, e.retention) == (300 * MICROSECONDS, 86_400 * MICROSECONDS)
    assert (e.queue, e.subject, e.correlation_id, e.causation_id) == ("fast", "order:1", "request-1", "event-1")
    assert (e.ordering_key, e.sequence, e.trace, e.tags) == ("customer:1", 3, "00-1-2-01", {"tenant": "t"})
    assert (
        declared(app, name="b").options(delay=timedelta(hours=1)).call(1).envelope("id").delay == 3_600 * MICROSECONDS
    )
    assert declared(app, name="c").options(expires=None).call(1).envelope("id").retention == 0


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("retries", r"retry=RetryPolicy\(max_attempts="),
        ("delay", r"task\.options\(delay="),
        ("timout", "timeout="),
        ("queues", "queue="),
        ("nonsense_of_all_kinds", "known: .*queue"),
    ],
)
def test_an_unknown_option_is_refused_with_the_right_one(app: App, option: str, remedy: str) -> None:
    """For every decorator: a bare TypeError would not name the right option."""
    wrong: dict[str, Any] = {option: 3}
    for declare in (
        lambda: app.task(**wrong),
        lambda: app.recurring("0 3 * * *", **wrong),
        lambda: app.workflow(**wrong),
        lambda: app.saga(**wrong),
        lambda: app.topic("placed", int, **wrong),
        lambda: app.on("placed", **wrong),
    ):
        with pytest.raises(ConfigurationError, match=f"unknown option '{option}'; .*{remedy}"):
            declare()


@pytest.mark.parametrize("effects", [("Z",), "T", ["T"], ("T", "t")])
def test_effects_that_do_not_exist_are_refused(app: App, effects: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"effects is .*'T', 'K', 'F', 'N'"):
        app.task(effects=effects)


def test_a_delay_beyond_all_calendars_is_a_typed_error(app: App) -> None:
    """C11: SQL stores have no cap, but they count in 64 bits."""
    with pytest.raises(ConfigurationError, match="delay is 1e\\+300 s; at most"):
        declared(app).options(delay=1e300)


def test_a_call_is_checked_and_encoded_but_not_sent(app: App) -> None:
    """P5: a call can be made while the app is closed."""
    call = declared(app, key="{order_id}:charge").call(7, cents=5)
    assert isinstance(call, Call)
    assert (call.payload, call.key) == (b'{"order_id":7,"cents":5}', "7:charge")


def test_the_queues_of_an_app_are_those_of_its_tasks(app: App) -> None:
    """F1: these are a worker's queues unless others are given."""
    assert app.registry.queues() == ["default"]
    declared(app, queue="slow")
    declared(app, name="b", queue="fast")
    assert app.registry.queues() == ["fast", "slow"]
    assert app.registry.types() == ["b", "handler"]
