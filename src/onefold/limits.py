"""Every limit, as a named number with its reason.

A limit is checked at the earliest moment, and the error names the field, the limit and the remedy.
Durations are in seconds.
"""

from __future__ import annotations

import re

from onefold.errors import DURATION_SECONDS_MAX as DURATION_SECONDS_MAX
from onefold.errors import ConfigurationError, LimitError

#: A message with its metadata must fit Cloudflare's 128 kB, which counts about 100 bytes of its own.
ENVELOPE_BYTES_MAX = 120_000
#: The body alone; larger data belongs in a blob store, with only a reference in the message.
PAYLOAD_BYTES_MAX = 98_304
#: Results are kept as long as their key, so a large one is stored for weeks.
RESULT_BYTES_MAX = 1_048_576
#: Deeper values are refused: recursive parsers in other languages fail not far above.
JSON_DEPTH_MAX = 64
#: A number with more digits is infinite as a double, which is how most languages read JSON numbers.
JSON_DIGITS_MAX = 309
#: A key is indexed and compared; longer data belongs in the payload.
KEY_BYTES_MAX = 512
#: A gate's name, a colon and a key.
GATE_BYTES_MAX = 63 + 1 + KEY_BYTES_MAX
#: A subject names one entity.
SUBJECT_BYTES_MAX = 256
#: Message, correlation and causation ids; those of other systems are all shorter.
ID_BYTES_MAX = 256
#: Tags are for filtering; data belongs in the payload.
TAGS_MAX = 16
TAG_BYTES_MAX = 256
#: One call of ``send_many`` is one transaction; more messages would hold SQLite's one writer for too long.
SEND_MANY_MAX = 100_000

#: The result of a step is kept in its line of the journal up to this size; a larger one in blob rows of this size.
STEP_BYTES_INLINE = 1_048_576
#: A journal is read whole whenever its run continues; larger data belongs elsewhere, with a reference in the journal.
STEP_BYTES_MAX = 67_108_864
#: A run with more steps than this is logged, once: its journal is read whole whenever it continues.
STEPS_WARNED = 1_024
#: Steps of one run before it is parked for an operator, unless its workflow has another limit: it may be in an endless
#: loop, and reading a journal of this length takes about a tenth of a second.
STEPS_MAX = 10_000
#: The largest limit that a workflow may set: a journal of this length takes tens of megabytes; divide the work.
STEPS_RAISED_MAX = 100_000
#: A step's full name, with the branches it is in, is part of the causation id of the messages it sends.
STEP_NAME_BYTES_MAX = 160
#: Signals waiting for one run: all of them are read whenever it continues.
SIGNALS_MAX = 10_000
#: A claim also reads the journals of the runs it takes, up to this many lines in all ...
CLAIMED_LINES_MAX = 10_000
#: ... and none with a larger value, because claimed journals stay in memory until a runner is free.
CLAIMED_VALUE_BYTES_MAX = 2_048
#: A run waits in memory for a retry that is due sooner than this; for a later one it is parked and frees its runner.
RETRY_IN_PLACE_SECONDS = 1.0
#: Timeout of one attempt of a saga's step, and of the reply to its command, unless the step has another.
SAGA_STEP_SECONDS = 30.0
#: A child that was sent before by another sender does not report its end to the run, so the run looks for it: after
#: this long at first, and later after a tenth of the time it has waited.
FOREIGN_CHILD_SECONDS = 10.0

#: Total runs before a message becomes a dead letter.
ATTEMPTS_DEFAULT = 5
#: Cloudflare allows 100 retries, which are 101 runs.
ATTEMPTS_MAX = 101
#: A message whose worker died this many times while it may have been running is a suspect: from then on it runs alone,
#: so that another crash has one possible cause.
SUSPECT_AFTER = 2
#: A suspect becomes a dead letter when this many crashes are counted.
QUARANTINE_AFTER = 4

#: The same below a supervisor: it knows which messages its processes had started, so fewer crashes are enough.
QUARANTINE_AFTER_SUPERVISED = 3
#: After a restore from backup every fence rises by this much, which is more than the number of claims of one message
#: that can have happened since the backup was made.
FENCE_LEAP = 1_000_000

RETRY_BASE = 5.0
RETRY_FACTOR = 2.0
RETRY_CAP = 300.0

LEASE = 30.0
LEASE_MIN = 1.0
#: A lease is renewed this many times within its length, so that two renewals may fail before it is lost.
RENEWALS_PER_LEASE = 3

#: A handler's transaction holds locks, on SQLite the only write lock; slow work belongs before its first write.
TRANSACTION_SECONDS_MAX = 2.0

#: One read of a caller on SQLite: other callers' reads of the same process wait for it, and while it runs no
#: checkpoint can shorten the log of the file.
FETCH_SECONDS_MAX = 30.0

#: A handler that is cancelled has this long to end; then its thread is abandoned, or its process killed.
HANDLER_GRACE = 2.0
#: Abandoned threads keep their memory for ever; with this many no further handler is started in a thread.
ABANDONED_THREADS_MAX = 100
#: Each is a whole interpreter with everything the app imports, tens of megabytes.
ISOLATED_PROCESSES_MAX = 8
#: An isolated process that is not ready this long after its start is ended; the message waits for another.
ISOLATED_START_SECONDS = 60.0
#: An idle isolated process takes a message at once; one that has not taken it after this long hangs and is replaced.
ISOLATED_BEGIN_SECONDS = 5.0
#: One statement, its rows or one result between a worker and an isolated handler.
FRAME_BYTES_MAX = 64 * 1_048_576
#: Messages in one run of a batch handler: the default of ``batch=``, and its maximum.
BATCH_DEFAULT = 10
BATCH_MAX = 100

#: Sequence numbers of an ordering key: up to here integers are exact in a double, and so in every reader of JSON.
SEQUENCE_MAX = 2**53 - 1
#: The largest integer that both databases can keep.
INTEGER_MAX = 2**63 - 1
SCHEMA_VERSION_MAX = 1_000_000
#: The last instant of the year 9999, in microseconds; later ones cannot be written as dates.
INSTANT_MAX = 253_402_300_799_999_999
#: The first instant of the year 9000.  A message is due before it, so that its expiry and retention, each counted from
#: there and at most ``DURATION_SECONDS_MAX`` long, end before ``INSTANT_MAX``.
DUE_AT_MAX = 221_845_392_000_000_000

DAY = 86_400.0
#: The longest pause that the ``Retry-After`` header of an upstream can ask for.
RETRY_AFTER_MAX = DAY
MESSAGE_RETENTION = 7 * DAY
DEAD_RETENTION = 14 * DAY
#: An idempotency key outlives the message and its time as a dead letter by this long, so that operators can act.
KEY_MARGIN = 2 * DAY
KEY_WINDOW = MESSAGE_RETENTION + DEAD_RETENTION + KEY_MARGIN
DEDUPLICATION_WINDOW = 3_600.0
DEDUPLICATION_WINDOW_MIN = 60.0
DEDUPLICATION_WINDOW_MAX = 30 * DAY

#: Handlers that run at once in one process.
CONCURRENCY = 10
#: One event loop runs them all; beyond this a second process helps more.
CONCURRENCY_MAX = 1_000
#: Never claim more than this at once, however fast the handlers are.
CLAIM_MAX = 1_000
#: Claim as many messages as will start within about this time at the measured rate.
CLAIM_AHEAD_SECONDS = 0.1

#: Gates in one portion of a claim; the next claim goes on after the last, so many gates do not make one claim slow.
GATES_PER_CLAIM = 256
#: Largest cap of a gate: the running messages of a gate are counted at every claim.
RUNNING_MAX = 10_000
RATE_COUNT_MAX = 1_000_000
#: Shortest and longest period of a rate: a due time does for a shorter or a longer one.
RATE_SECONDS_MIN, RATE_SECONDS_MAX = 0.1, 30 * DAY
#: A worker that waits for tokens of a rate claims no more often than this.
TOKEN_SECONDS_MIN = 0.05
#: Priorities are 0 to 9, the highest first.
PRIORITY_MAX = 9
#: One step of priority counts as much as this time of waiting: a message of the lowest priority overtakes new ones of
#: the highest after nine steps.
PRIORITY_STEP_SECONDS = 60.0
#: A message waits this long for a missing one with a lower sequence number, unless its task says otherwise.
GAP_SECONDS = 60.0
GAP_SECONDS_MAX = MESSAGE_RETENTION
#: With ``on_failure="skip"`` up to this many messages of an ordering key that wait for a retry are passed over; with
#: more, the messages behind them wait too, because a claim reads them all.
PASSED_OVER_MAX = 100
#: The last sequence number of an ordering key is kept this long after its last message ended; then it restarts at 1.
LINE_RETENTION = 366 * DAY

#: A worker polls this often, because wake-ups are hints and may be lost.
POLL_SECONDS = 1.0
#: Progress of handlers is written this often, and a cancelled handler learns of it within this time.
REPORT_SECONDS = 1.0
#: Characters of a progress message; a longer one is cut.
PROGRESS_MESSAGE_MAX = 500
#: Checkpoints of one message: they are kept until it is purged, and read when it runs again.
CHECKPOINTS_MAX = 1_024
#: A handler that reported progress and then none for this long is shown as stalled, unless its task allows longer.
BEAT_SECONDS = 60.0
#: Expired rows of each table are removed in batches of this size: about ten milliseconds, for which senders may wait.
PURGE_BATCH = 1_000
#: The purge begins this often ...
PURGE_SECONDS = 60.0
#: ... and takes at most this share of the time, so that the rest is left to senders and workers.
PURGE_SHARE_MAX = 0.2
#: A worker leaves an expired message of a type it does not have to other workers for this long, then ends it.
EXPIRY_GRACE_SECONDS = 3_600.0
#: Expired messages that are ended in one commit.
EXPIRY_BATCH = 100
#: Acts of operators are kept longer than their messages, so that a yearly audit sees a whole year.
ACT_RETENTION = 366 * DAY

#: A file that holds a store's URL; with every option of a driver a URL has a few hundred bytes.
URL_BYTES_MAX = 4_096
#: Characters of an error and of its stack that are kept per attempt.
ERROR_TEXT_MAX = 4_000
STACK_TEXT_MAX = 16_000
#: Records in one page of a listing.
PAGE = 100
PAGE_MAX = 1_000
#: Levels of children that are shown below a run ...
CHRONICLE_DEPTH = 3
#: ... and messages of which it shows the journal, each read by statements of its own; the others have one line.
CHRONICLE_MESSAGES = 100
#: Dead letters redriven by one bulk call unless the caller raises it.
REDRIVE_MAX = 100

#: A graceful stop waits this long for running handlers before it hands their messages back.
STOP_SECONDS = 25.0
#: After that a process has this much longer to hand its messages back; then it is killed.
STOP_MARGIN_SECONDS = 2.0
#: During a stop, each call of the store is waited for no longer than this; a message that could not be handed back
#: becomes due when its lease runs out.
STOP_STORE_SECONDS = 5.0
#: A handler is cancelled at its timeout; if it has not ended this much later, its process is killed.
HARD_TIMEOUT_GRACE = 5.0

#: Worker processes below one supervisor; more than a machine has cores seldom helps.
PROCESSES_MAX = 256
#: An event loop that has not run for this long is logged and shown as stalled ...
STALL_WARNING_SECONDS = 10.0
#: ... and after this long its process is killed: no handler of the portable profile may take longer.
STALL_SECONDS = 900.0
#: A worker writes its entry in the register this often; the entry expires this long after the last write.
WORKER_CHECK_SECONDS = 10.0
WORKER_ENTRY_SECONDS = 60.0

#: An occurrence that is late by less than this still fires when missed ones are skipped: every tick is a little late.
CATCH_UP_GRACE_SECONDS = 60.0
#: Missed occurrences put in one transaction; the rest follows in further ones, so that other writers wait briefly.
CATCH_UP_MAX = 1_000
#: Missed occurrences are counted up to here: counting a year of minutes would block an event loop for seconds.
MISSED_MAX = 10_000
#: The register is read this often, for schedules that another process has changed.
SCHEDULE_RELOAD_SECONDS = 60.0
#: Each worker delays its tick by a random time up to this, so that not all of them write at the same moment.
TICK_JITTER_SECONDS = 0.25
#: For a shorter interval a loop in one handler is cheaper than a message each time.
EVERY_SECONDS_MIN = 1.0
#: Ten years; send a message with a due time for a later date.
EVERY_SECONDS_MAX = 3_650 * DAY
#: The rarest cron date, a 29 February on a given weekday, comes after 28 years, or 40 around a year such as 2100.
RECURRING_YEARS_MAX = 50
#: Triggers closer than this are cheaper to collect in the memory of the process that makes them.
DEBOUNCE_SECONDS_MIN = 1.0
#: The longest that a trigger may wait; a due time does for longer.
DEBOUNCE_SECONDS_MAX = 30 * DAY
#: Every worker reads all schedules when one is due; keep more of them in a table of yours, read by one schedule.
SCHEDULES_MAX = 1_000
#: A schedule's arguments are in the register, which workers read often; keep larger ones in a table of yours.
SCHEDULE_BYTES_MAX = 16_384

#: An event is copied to all of its subscribers in one commit, each copy with a body of its own.
SUBSCRIBERS_MAX = 200
#: Messages that are shown of one chain: one page of a listing.
CHAIN_MAX = 1_000

#: Entries of a broker that are put into the store in one commit.
INTAKE_BATCH = 100
#: Bytes of one pull: a full batch of the largest envelopes; a larger entry is cut.
PULL_BYTES_MAX = 16 * 1_048_576
#: An entry that a worker has not acknowledged after this long goes to another one; putting a batch takes far less.
INTAKE_LEASE = 30.0
#: A pull of an empty stream returns after this long, because a worker that stops waits for its last pull.
PULL_WAIT_SECONDS = 0.5
#: Bytes of a refused entry that are kept: as base64 they fit into a payload.
REFUSED_BYTES_MAX = 72_000
#: An entry of a type that this app does not have waits for a newer worker: how long, and how often it is looked at.
UNKNOWN_TYPE_SECONDS, UNKNOWN_TYPE_LOOK_SECONDS = 3_600.0, 30.0
#: Pauses between attempts to reach a broker: they double from the first figure up to the second.
TRANSPORT_PAUSE_SECONDS, TRANSPORT_PAUSE_SECONDS_MAX = 0.05, 5.0
#: Pauses of messages that could not be relayed; longer, because each attempt costs a claim.
RELAY_PAUSE_SECONDS, RELAY_PAUSE_SECONDS_MAX = 1.0, 60.0
#: A stream with fewer entries would drop some while a reader restarts.
STREAM_ENTRIES_MIN = 1_000

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def check_name(kind: str, name: str) -> str:
    """Refuse the name of a queue, task or worker that a database or broker could misread; return it otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{kind} name {name!r} is not allowed: use 1 to 63 characters of a-z, 0-9, '.', '_', '-', "
            "beginning with a letter or digit"
        )
    return name


_STEP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")


def check_step_name(kind: str, name: str) -> str:
    """Refuse the name of a step, signal or effect that holds a separator of journal names; return it otherwise."""
    if not isinstance(name, str) or not _STEP_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{kind} name {name!r} is not allowed: use 1 to 63 letters, digits, '.', '_', '-', beginning with a "
            "letter, digit or '_'; a function without such a name needs run.options(name=…)"
        )
    return name


def check_text(field: str, text: str) -> int:
    """Refuse text that has no UTF-8 form, as no store could keep it; return its length in bytes otherwise."""
    if not isinstance(text, str):
        raise LimitError(field, f"is a {type(text).__name__}; write a str")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise LimitError(field, "holds a lone surrogate, which has no UTF-8 form; remove it") from error


def check_bytes(field: str, text: str, most: int) -> str:
    """Refuse text that is empty, too long or not printable; return it otherwise."""
    size = check_text(field, text)
    if not 0 < size <= most:
        raise LimitError(field, f"has {size} bytes; 1 to {most} are allowed")
    if not text.isprintable():
        raise LimitError(field, "holds control or other unprintable characters; remove them")
    return text


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Refuse a setting that is outside its range, NaN, or not a number; ``True`` and ``False`` are not numbers here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{name} is a {type(value).__name__}; it must be a number from {least:g} to {most:g}")
    if not least <= value <= most:
        raise ConfigurationError(f"{name} is {value:g}; it must be from {least:g} to {most:g}")
