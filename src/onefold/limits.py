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
#: The body alone; larger ones belong into a blob store with only a reference in the message.
PAYLOAD_BYTES_MAX = 98_304
#: Results are kept as long as their key, so a large one is stored for weeks.
RESULT_BYTES_MAX = 1_048_576
#: Deeper values are refused: recursive readers in other languages give up not far above.
JSON_DEPTH_MAX = 64
#: Python itself refuses to read longer numbers; most other readers stop far earlier.
JSON_DIGITS_MAX = 309
#: A key is indexed and compared; a longer one is a payload in disguise.
KEY_BYTES_MAX = 512
#: A gate's name, a colon and a key.
GATE_BYTES_MAX = 63 + 1 + KEY_BYTES_MAX
#: A subject names one entity.
SUBJECT_BYTES_MAX = 256
#: Correlation and causation ids come from other systems; these are longer than any known one.
ID_BYTES_MAX = 256
#: Tags are for filtering, not for data.
TAGS_MAX = 16
TAG_BYTES_MAX = 256
#: One call of send_many is one transaction; more would hold SQLite's one writer for too long.
SEND_MANY_MAX = 100_000

#: What a step returned is kept in its line of the journal up to here, and set aside in parts of this size above.
STEP_BYTES_INLINE = 1_048_576
#: A journal is read whole whenever its run goes on; larger data belongs elsewhere, with a reference in the journal.
STEP_BYTES_MAX = 67_108_864
#: A run with more steps than this says so in the log, once: its journal is read whole whenever it goes on.
STEPS_WARNED = 1_024
#: Steps of one run before it is parked for a person, unless its workflow says otherwise: a loop that does not end would
#: go on for ever, and reading so long a journal takes about a tenth of a second.
STEPS_MAX = 10_000
#: More than this no workflow may ask for: so long a journal is tens of megabytes in memory; divide the work.
STEPS_RAISED_MAX = 100_000
#: A step's whole name, with the branches it lies in, is part of the causation of what it sends.
STEP_NAME_BYTES_MAX = 160
#: Signals waiting for one run: they are read whenever it goes on, so a mailbox is not a queue.
SIGNALS_MAX = 10_000
#: A claim reads the journals of the runs it takes, up to so many lines in all ...
CLAIMED_LINES_MAX = 10_000
#: ... and none with a larger value, because what is claimed lies in memory until its turn comes.
CLAIMED_VALUE_BYTES_MAX = 2_048
#: A retry due sooner than this is waited for in place; a longer one gives the worker free.
RETRY_IN_PLACE_SECONDS = 1.0
#: One try of a saga's step, or the answer to its command, unless it says otherwise: silence is a failure.
SAGA_STEP_SECONDS = 30.0
#: A child that somebody else had sent before does not report to its run: the run looks this often, later less.
FOREIGN_CHILD_SECONDS = 10.0

#: Total runs before a message becomes a dead letter.
ATTEMPTS_DEFAULT = 5
#: Cloudflare allows 100 retries, which are 101 runs.
ATTEMPTS_MAX = 101
#: A message that may have been running this often when its worker died is a suspect: from then on it runs alone,
#: so that its neighbours are not blamed for it, nor it for them.
SUSPECT_AFTER = 2
#: A suspect that was alone when its worker died yet again is quarantined as a dead letter at this count.
QUARANTINE_AFTER = 4

#: A supervisor knows what its processes had started, so it may suspect and judge sooner.
QUARANTINE_AFTER_SUPERVISED = 3
#: After a restore from backup every fence rises by this much: more than the claims of one message that can have been
#: lost with what the backup does not hold.
FENCE_LEAP = 1_000_000

RETRY_BASE = 5.0
RETRY_FACTOR = 2.0
RETRY_CAP = 300.0

LEASE = 30.0
LEASE_MIN = 1.0
#: A lease is renewed this many times within its length, so two renewals may fail before it is lost.
RENEWALS_PER_LEASE = 3

#: A handler's transaction holds locks, on SQLite the only write lock; longer work belongs before its first write.
TRANSACTION_SECONDS_MAX = 2.0

#: A read of the caller's on SQLite: other reads of callers in its process wait for it, and while it runs the log of
#: the file only grows.
FETCH_SECONDS_MAX = 30.0

#: A handler whose time is up has this long to come to an end; then its thread is abandoned, its process killed.
HANDLER_GRACE = 2.0
#: Threads that hang and cannot be ended take memory for ever; beyond this no more are put at risk.
ABANDONED_THREADS_MAX = 100
#: Each is a whole interpreter with everything the app imports, tens of megabytes.
ISOLATED_PROCESSES_MAX = 8
#: A new one that is not ready after this long, even on a busy machine, is ended; the message waits for another.
ISOLATED_START_SECONDS = 60.0
#: An idle one takes a message at once.  One that has not after this long hangs, and is replaced.
ISOLATED_BEGIN_SECONDS = 5.0
#: One statement, its rows or one result between a worker and an isolated handler.
FRAME_BYTES_MAX = 64 * 1_048_576
#: Messages that one run of a batch handler gets, unless it says otherwise, and at most.
BATCH_DEFAULT = 10
BATCH_MAX = 100

#: Numbers of an ordered line: exact in every language that reads JSON.
SEQUENCE_MAX = 2**53 - 1
#: Numbers that every engine can keep.
INTEGER_MAX = 2**63 - 1
SCHEMA_VERSION_MAX = 1_000_000
#: The last instant of the year 9999, in microseconds; later ones cannot be written as dates.
INSTANT_MAX = 253_402_300_799_999_999
#: The first instant of the year 9000: a message is due before it, so that its expiry and whatever else is counted from
#: that moment, by at most ``DURATION_SECONDS_MAX`` each, stays before ``INSTANT_MAX``.
DUE_AT_MAX = 221_845_392_000_000_000

DAY = 86_400.0
#: An upstream that asks for a longer pause is asked again after this long.
RETRY_AFTER_MAX = DAY
MESSAGE_RETENTION = 7 * DAY
DEAD_RETENTION = 14 * DAY
#: An idempotency key outlives the message and its time as a dead letter by this long, for a person to act.
KEY_MARGIN = 2 * DAY
KEY_WINDOW = MESSAGE_RETENTION + DEAD_RETENTION + KEY_MARGIN
DEDUPLICATION_WINDOW = 3_600.0
DEDUPLICATION_WINDOW_MIN = 60.0
DEDUPLICATION_WINDOW_MAX = 30 * DAY

#: Handlers that run at once in one process.
CONCURRENCY = 10
#: One event loop runs them all; beyond this a second process is the better answer.
CONCURRENCY_MAX = 1_000
#: Never claim more than this at once, however fast the handlers are.
CLAIM_MAX = 1_000
#: Claim what will start within about this time at the measured rate.
CLAIM_AHEAD_SECONDS = 0.1

#: Gates that one claim looks at; the next goes on where it stopped, so many keys do not make claims long.
GATES_PER_CLAIM = 256
#: One claim that finds nothing looks at so many portions of that many gates before it says so.
GATE_PORTIONS_MAX = 16
#: Those who run are counted at every claim, so this many are a limit that nobody would feel.
RUNNING_MAX = 10_000
RATE_COUNT_MAX = 1_000_000
#: A rate over a shorter time is a pause between two messages, and over a longer one a plan.
RATE_SECONDS_MIN, RATE_SECONDS_MAX = 0.1, 30 * DAY
#: While tokens are waited for, a worker looks this often at most.
TOKEN_SECONDS_MIN = 0.05
#: 0 to 9, as everywhere.
PRIORITY_MAX = 9
#: A step of priority is worth this much waiting: a message of the lowest overtakes new ones of the highest after nine.
PRIORITY_STEP_SECONDS = 60.0
#: A message that arrives before one with a lower number waits this long for it, unless its task says otherwise.
GAP_SECONDS = 60.0
GAP_SECONDS_MAX = MESSAGE_RETENTION
#: With ``on_failure="skip"`` so many that wait for their next attempt are passed over; behind more, others wait too.
PASSED_OVER_MAX = 100
#: How long the last number of a line is remembered after its last message ended; then it begins anew with 1.
LINE_RETENTION = 366 * DAY

#: Without a wake-up a worker looks this often; wake-ups are hints and may be lost.
POLL_SECONDS = 1.0
#: What handlers say about themselves is written this often, and a cancelled one is told within this time.
REPORT_SECONDS = 1.0
#: A sentence for people, cut here; what is longer belongs into a log.
PROGRESS_MESSAGE_MAX = 500
#: Checkpoints of one message: they are kept until it is purged, and read when it runs again.
CHECKPOINTS_MAX = 1_024
#: A handler that has reported once and then says nothing for this long is shown as stalled, unless its task says more.
BEAT_SECONDS = 60.0
#: Rows of each kind removed in one transaction: about ten milliseconds, for which senders may have to wait.
PURGE_BATCH = 1_000
#: What has outlived its time is looked for this often ...
PURGE_SECONDS = 60.0
#: A message of a type that a worker does not have is left to others for this long after it has expired.
EXPIRY_GRACE_SECONDS = 3_600.0
#: So many of them are claimed and ended in one commit.
EXPIRY_BATCH = 100
#: ... and removed batch after batch, which takes at most this part of the time: the rest is for senders and workers.
PURGE_SHARE_MAX = 0.2
#: What people did is kept for longer than the messages they did it to: a yearly audit looks back over a whole year.
ACT_RETENTION = 366 * DAY

#: A store's URL in a file of its own; with every option of a driver it has a few hundred bytes.
URL_BYTES_MAX = 4_096
#: Text of an error and of its stack that is kept per attempt.
ERROR_TEXT_MAX = 4_000
STACK_TEXT_MAX = 16_000
#: Records in one page of a listing.
PAGE = 100
PAGE_MAX = 1_000
#: How far a run is followed into its children, and theirs, when it is shown ...
CHRONICLE_DEPTH = 3
#: ... and how many messages are read whole for it, each with statements of its own; of the others only the head is.
CHRONICLE_MESSAGES = 100
#: Dead letters redriven by one bulk call unless the caller raises it.
REDRIVE_MAX = 100

#: How long the graceful stop waits for running handlers before it hands them back.
STOP_SECONDS = 25.0
#: After its time to stop a process has this much more to hand back what it runs; then it is killed.
STOP_MARGIN_SECONDS = 2.0
#: After a stop a store that does not answer is waited for no longer than this, at each of the few points where a worker
#: and its supervisor wait for one: what is not handed back by then is left to its lease.
STOP_STORE_SECONDS = 5.0
#: After its timeout a handler is cancelled; one that is still there after this long more is killed with its process.
HARD_TIMEOUT_GRACE = 5.0

#: Worker processes below one supervisor; more than a machine has cores seldom helps.
PROCESSES_MAX = 256
#: An event loop that has not moved for this long is logged and shown as stalled ...
STALL_WARNING_SECONDS = 10.0
#: ... and after this long its process is killed: the longest that the portable profile lets a message take.
STALL_SECONDS = 900.0
#: A worker's entry in the register is written this often, and expires after this long without.
WORKER_CHECK_SECONDS = 10.0
WORKER_ENTRY_SECONDS = 60.0

#: An occurrence that is late by less than this still fires when missed ones are skipped: every tick is a little late.
CATCH_UP_GRACE_SECONDS = 60.0
#: Missed occurrences put in one transaction; the rest follows in the next, so that nobody waits long for either.
CATCH_UP_MAX = 1_000
#: Missed occurrences are counted no further than this: a year of minutes would keep an event loop busy for seconds.
MISSED_MAX = 10_000
#: The register is read again this often, for schedules that another process has changed.
SCHEDULE_RELOAD_SECONDS = 60.0
#: Workers that would all tick at the same moment are spread over this much; one of them is always early.
TICK_JITTER_SECONDS = 0.25
#: A shorter interval is a loop, and belongs into one handler.
EVERY_SECONDS_MIN = 1.0
#: Ten years; whoever means more means a date.
EVERY_SECONDS_MAX = 3_650 * DAY
#: A 29 February that is a Monday comes after 28 years, or 40 around a century without one; look a little further.
RECURRING_YEARS_MAX = 50
#: Triggers closer to each other than this are better counted by the one who makes them.
DEBOUNCE_SECONDS_MIN = 1.0
#: A trigger that waits for longer is forgotten by the one who made it.
DEBOUNCE_SECONDS_MAX = 30 * DAY
#: Every worker reads all schedules when one is due; many more belong into a table of the user's own and one schedule.
SCHEDULES_MAX = 1_000
#: A schedule carries its call in the register; larger arguments belong into a table of the user's own.
SCHEDULE_BYTES_MAX = 16_384

#: An event is copied to all of its subscribers in one commit, each with a body of its own.
SUBSCRIBERS_MAX = 200
#: Messages in one chain that are shown, which is one page; what goes on further is a history, not a chain.
CHAIN_MAX = 1_000

#: Entries of a broker that are taken and put into the store in one commit.
INTAKE_BATCH = 100
#: What one pull takes into memory: a whole batch of the largest envelopes; entries that are larger are cut.
PULL_BYTES_MAX = 16 * 1_048_576
#: An entry whose worker has not acknowledged it for this long is given to another; putting a batch takes far less.
INTAKE_LEASE = 30.0
#: A worker that stops waits for its last pull, so a pull that finds nothing waits no longer than this.
PULL_WAIT_SECONDS = 0.5
#: So much of an entry that is refused fits as base64 into a payload; of a longer one only the beginning is kept.
REFUSED_BYTES_MAX = 72_000
#: An entry of a type that this app does not know waits this long for a newer worker, looked at this often.
UNKNOWN_TYPE_SECONDS, UNKNOWN_TYPE_LOOK_SECONDS = 3_600.0, 30.0
#: A broker that cannot be reached is tried again after a pause that doubles from the first figure up to the second.
TRANSPORT_PAUSE_SECONDS, TRANSPORT_PAUSE_SECONDS_MAX = 0.05, 5.0
#: What cannot be published meanwhile is put off likewise: each of these messages costs a claim.
RELAY_PAUSE_SECONDS, RELAY_PAUSE_SECONDS_MAX = 1.0, 60.0
#: A stream that keeps fewer entries would forget them before a reader that was restarted comes back.
STREAM_ENTRIES_MIN = 1_000

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def check_name(kind: str, name: str) -> str:
    """Refuse a queue, task or worker name that some engine could misread; return it otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{kind} name {name!r} is not allowed: use 1 to 63 characters of a-z, 0-9, '.', '_', '-', "
            "beginning with a letter or digit"
        )
    return name


_STEP_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,62}")


def check_step_name(kind: str, name: str) -> str:
    """Refuse the name of a step, signal or effect that could be mistaken for a part of another; return it otherwise."""
    if not isinstance(name, str) or not _STEP_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{kind} name {name!r} is not allowed: use 1 to 63 letters, digits, '.', '_', '-', beginning with none of "
            "the signs but '_'; a function without such a name needs run.options(name=…)"
        )
    return name


def check_text(field: str, text: str) -> int:
    """Refuse what no store could be asked for; return the length in bytes otherwise."""
    if not isinstance(text, str):
        raise LimitError(field, f"is a {type(text).__name__}, not text")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise LimitError(field, "holds a lone surrogate, which is not text") from error


def check_bytes(field: str, text: str, most: int) -> str:
    """Refuse text that is empty, too long, or holds characters that travel badly; return it otherwise."""
    size = check_text(field, text)
    if not 0 < size <= most:
        raise LimitError(field, f"has {size} bytes; 1 to {most} are allowed")
    if not text.isprintable():
        raise LimitError(field, "holds control or other unprintable characters")
    return text


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Refuse a setting outside its range; so is NaN, and a truth value is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(f"{name} is a {type(value).__name__}; it must be a number from {least:g} to {most:g}")
    if not least <= value <= most:
        raise ConfigurationError(f"{name} is {value:g}; it must be from {least:g} to {most:g}")
