-- The statements of the SQLite store, in the order of a message's life.
-- SQLite has one writer, so within BEGIN IMMEDIATE a read followed by a write is one atomic act.

-- part: dates
d.due_at, d.expires_at, d.fence, d.attempt, d.crashes, d.replay_count

-- part: record
{columns_of_m},
    coalesce(d.due_at, 0), coalesce(d.expires_at, 0), coalesce(d.fence, o.fence), coalesce(d.attempt, o.attempt),
    coalesce(d.crashes, o.crashes), coalesce(d.replay_count, o.replay_count), coalesce(d.state, o.state),
    d.worker, o.ended_at, o.kept_until, o.body_until

-- part: failure_shown
CASE d.state WHEN {parked} THEN
        (SELECT a.failure FROM onefold_attempt a WHERE a.seq = d.seq AND a.fence = d.fence - 1) ELSE o.failure END

-- part: where_it_is
LEFT JOIN onefold_delivery d ON d.seq = m.seq
LEFT JOIN onefold_outcome o ON o.seq = m.seq

-- part: next_place
-- The end of the line of gate `g.gate`: behind all messages there that follow the order of sends.
coalesce((
        SELECT l.place + 1 FROM onefold_delivery l INDEXED BY onefold_delivery_line
        WHERE l.gate = g.gate AND l.place IS NOT NULL AND l.place < 0 ORDER BY l.place DESC LIMIT 1), {first_place})

-- name: near
-- All messages whose numbers may be those of these ids: the caller compares the ids.
SELECT m.seq, m.id
FROM json_each(?) given
CROSS JOIN onefold_message m ON m.seq BETWEEN given.value AND given.value + {tries}

-- name: states
SELECT m.id, coalesce(d.state, o.state)
FROM json_each(?) given
CROSS JOIN onefold_message m ON m.seq = given.value
{where_it_is}

-- name: put_key
INSERT INTO onefold_key (scope, key, kind, seq, fingerprint, schema_version, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING

-- name: key_owner
SELECT seq FROM onefold_key WHERE scope = ? AND key = ? AND kind = ?

-- name: put_message
INSERT INTO onefold_message (seq, {message_columns}) VALUES (?, {message_values})

-- name: put_deliveries
-- Those of plain messages, which are due at once: one statement for many opens the indexes only once.
INSERT INTO onefold_delivery (seq, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
    replay_count)
SELECT m.seq, m.queue, m.message_type, {scheduled}, m.created_at,
    iif(m.retention > 0, m.created_at + m.retention, 0), 1, 0, 0, 0
FROM json_each(?) given
CROSS JOIN onefold_message m ON m.seq = given.value

-- name: put_delivery
INSERT INTO onefold_delivery (seq, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
    replay_count, priority, gate, place)
SELECT ?1, ?2, ?3, {scheduled}, ?4, ?5, 1, 0, 0, 0, ?6, ?7, CASE WHEN ?8 THEN coalesce(?9, {next_place}) END
FROM (SELECT ?7 AS gate) g

-- name: key_holder
SELECT k.seq, m.id, k.fingerprint, k.schema_version, k.expires_at,
    coalesce(d.state, o.state), o.kept_until
FROM onefold_key k
LEFT JOIN onefold_message m ON m.seq = k.seq
{where_it_is}
WHERE k.scope = ? AND k.key = ? AND k.kind = ?

-- name: take_key
UPDATE onefold_key
SET seq = ?4, fingerprint = ?5, schema_version = ?6, expires_at = ?7, suppressed = 0
WHERE scope = ?1 AND key = ?2 AND kind = ?3

-- name: count_suppressed
UPDATE onefold_key SET suppressed = suppressed + 1 WHERE scope = ? AND key = ? AND kind = ?

-- name: claim_grace
-- A lease that ran out is extended once, in case its owner lives and only waited for the write lock to renew it.
UPDATE onefold_delivery SET graced = 1, lease_until = ?2 WHERE state = {leased} AND lease_until <= ?1 AND graced = 0

-- name: claim_expired
-- A lease that ran out: its worker died or is too slow.  The fence rises when the message is claimed again.
UPDATE onefold_delivery
SET state = {scheduled}, crashes = crashes + started, lease_until = NULL, worker = NULL
WHERE state = {leased} AND lease_until <= ?
RETURNING queue, gate, place IS NOT NULL

-- name: claim_run_out
SELECT EXISTS (SELECT 1 FROM onefold_delivery WHERE state = {leased} AND lease_until <= ?1)

-- name: claim_heads
-- Of which types that are asked for a message is due, on each level of priority that has messages.  Types that are not
-- asked for are never visited.
-- The index is named here and below because the owner of the file may have made statistics that suggest another way.
WITH RECURSIVE level (priority) AS (
    VALUES (0)
    UNION ALL
    SELECT (SELECT priority FROM onefold_delivery INDEXED BY onefold_delivery_due
        WHERE queue = ?1 AND state <> {leased} AND gate IS NULL AND priority > level.priority ORDER BY priority LIMIT 1)
    FROM level WHERE level.priority IS NOT NULL
)
SELECT level.priority, type.value
FROM level CROSS JOIN json_each(?3) type
WHERE level.priority IS NOT NULL AND EXISTS (
    SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_due
    WHERE queue = ?1 AND state <> {leased} AND gate IS NULL AND priority = level.priority AND message_type = type.value
        AND due_at <= ?2 AND crashes <= ?4)

-- name: claim_of_type
-- The messages of one type on one level that have been due for longest, behind the one that was read last.
SELECT due_at, seq FROM onefold_delivery INDEXED BY onefold_delivery_due
WHERE queue = ?1 AND state <> {leased} AND gate IS NULL AND priority = ?4 AND message_type = ?5
    AND due_at <= ?2 AND (due_at, seq) > (?6, ?7) AND crashes <= ?3
ORDER BY due_at, seq LIMIT ?8

-- name: claim_crashed
SELECT due_at, seq FROM onefold_delivery INDEXED BY onefold_delivery_crashed
WHERE crashes > 0 AND queue = ?1 AND state <> {leased} AND gate IS NULL AND due_at <= ?2
    AND message_type IN (SELECT value FROM json_each(?3))
ORDER BY due_at LIMIT ?4

-- name: claim_rows
SELECT {columns_of_m},
    d.due_at, d.expires_at, d.fence, d.attempt, d.crashes, d.replay_count, d.wake, d.seq
FROM json_each(?1) given
CROSS JOIN onefold_delivery d ON d.seq = given.value
CROSS JOIN onefold_message m ON m.seq = d.seq

-- name: claim_take
-- A message that is no suspect counts as started, because its start is not reported; a suspect is marked when it begins.
-- Under a supervisor all count as started: the supervisor hands back those that were not.
UPDATE onefold_delivery
SET state = {leased}, fence = fence + 1, lease_until = ?1, graced = 0, worker = ?2, started = (crashes < ?3),
    wake_target = NULL
WHERE seq IN (SELECT value FROM json_each(?4))

-- name: claim_set_aside
-- A message that cannot be claimed becomes a dead letter, so that it is not in the way of the others.
INSERT INTO onefold_outcome (seq, state, fence, attempt, crashes, replay_count, ended_at, kept_until, body_until, failure,
    letter)
SELECT d.seq, {dead}, CAST(min(d.fence, 9223372036854775807) AS INTEGER), d.attempt, d.crashes, d.replay_count, ?3, ?4, ?5,
    ?2, m.id
FROM onefold_delivery d JOIN onefold_message m ON m.seq = d.seq
WHERE d.seq = ?1

-- name: lease_fences
-- With the ids, because the number of a message that is gone may be another's by now.
SELECT d.seq, m.id, d.fence, d.state
FROM json_each(?) given
CROSS JOIN onefold_delivery d ON d.seq = given.value
CROSS JOIN onefold_message m ON m.seq = d.seq

-- name: extend
UPDATE onefold_delivery SET lease_until = ?1, graced = 0, started = max(started, ?2)
WHERE seq IN (SELECT value FROM json_each(?3))

-- name: report_owners
-- The owner of a message, or of the claim that ended when no worker has claimed the message since.
SELECT m.seq, m.id, coalesce(d.state, o.state), coalesce(d.fence, o.fence)
FROM json_each(?) given
CROSS JOIN onefold_message m ON m.seq = given.value
{where_it_is}

-- name: report
-- A beat alone leaves what the same owner said before, and forgets what an earlier one did.
INSERT INTO onefold_progress (seq, fence, percent, message, at, beat_at)
VALUES (?1, ?2, coalesce(?3, 0), ?4, CASE WHEN ?3 IS NULL THEN NULL ELSE ?5 END, ?5)
ON CONFLICT (seq) DO UPDATE SET
    percent = CASE WHEN ?3 IS NULL AND fence = ?2 THEN percent ELSE excluded.percent END,
    message = CASE WHEN ?3 IS NULL AND fence = ?2 THEN message ELSE excluded.message END,
    at = CASE WHEN ?3 IS NULL AND fence = ?2 THEN at ELSE excluded.at END,
    fence = ?2, beat_at = ?5
WHERE fence <= ?2

-- name: progress
SELECT m.id, m.message_type, p.fence, d.state IS {leased}, p.percent, p.message, p.at, p.beat_at
FROM json_each(?) given
CROSS JOIN onefold_message m ON m.seq = given.value
CROSS JOIN onefold_progress p ON p.seq = m.seq
LEFT JOIN onefold_delivery d ON d.seq = m.seq
WHERE d.state IS NOT {leased} OR d.fence = p.fence

-- name: settle_end
DELETE FROM onefold_delivery WHERE seq IN (SELECT value FROM json_each(?))

-- name: settle_outcome
INSERT INTO onefold_outcome (seq, state, fence, attempt, crashes, replay_count, ended_at, kept_until, body_until,
    result, failure, letter)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: settle_again
-- The fence rises here too, so that an answer lost on the way cannot be settled a second time.
UPDATE onefold_delivery
SET state = {scheduled}, fence = fence + 1, attempt = ?, crashes = crashes + ?, due_at = ?, lease_until = NULL, worker = NULL
WHERE seq = ?

-- name: settle_hand_back
UPDATE onefold_delivery SET state = {scheduled}, fence = fence + 1, lease_until = NULL, worker = NULL
WHERE seq IN (SELECT value FROM json_each(?))

-- name: gate_adopt
UPDATE onefold_delivery
SET state = {scheduled}, fence = fence + 1, lease_until = NULL, worker = NULL, gate = g.gate,
    place = CASE WHEN ?3 THEN {next_place} END
FROM (SELECT ?2 AS gate) g
WHERE seq = ?1

-- name: settle_attempt
INSERT INTO onefold_attempt (seq, fence, attempt, at, worker, failure, delay) VALUES (?, ?, ?, ?, ?, ?, ?)

-- name: move_redrive
-- Only a letter whose body is still to be kept can run again; its fence starts above the one that ended it.
-- When its time is over it is too late, though a purge may not have come by yet; with its key's window over, its key may
-- already be another message's.
INSERT INTO onefold_delivery (seq, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
    replay_count, priority, gate, place)
SELECT g.seq, g.queue, g.claimed_as, {scheduled}, ?1, CASE g.retention WHEN 0 THEN 0 ELSE ?1 + g.retention END,
    g.fence + 1, 0, 0, g.replay_count + 1, coalesce(g.headers ->> '$.priority', 0), g.gate,
    CASE WHEN g.headers ->> '$.ordering_key' IS NOT NULL THEN coalesce(g.headers ->> '$.sequence', {next_place}) END
FROM (
    SELECT m.seq, m.queue, m.retention, o.fence, o.replay_count, CAST(m.headers AS TEXT) AS headers,
        m.message_type || CASE WHEN CAST(m.headers AS TEXT) ->> '$.pinned' THEN '@' || m.schema_version ELSE '' END
            AS claimed_as,
        coalesce(CAST(m.headers AS TEXT) ->> '$.gate',
            m.message_type || ':' || (CAST(m.headers AS TEXT) ->> '$.ordering_key')) AS gate
    FROM onefold_message m JOIN onefold_outcome o ON o.seq = m.seq
    WHERE m.seq = ?2 AND o.state = {dead} AND o.body_until > ?1 AND m.payload IS NOT NULL
) g
WHERE true
RETURNING seq

-- name: move_reopened
DELETE FROM onefold_outcome WHERE seq = ?

-- name: move_discard
UPDATE onefold_outcome SET state = {discarded}, fence = fence + 1, kept_until = ?1, body_until = ?1, letter = NULL
WHERE seq = ?2 AND state = {dead}
RETURNING seq

-- name: move_cancel
-- A message that was never claimed leaves its key free at once; one that may have run keeps it.
INSERT INTO onefold_outcome (seq, state, fence, attempt, crashes, replay_count, ended_at, kept_until, body_until)
SELECT d.seq, {cancelled}, d.fence + 1, d.attempt, d.crashes, d.replay_count, ?1,
    CASE WHEN d.fence = 1 THEN ?1 ELSE ?2 END, CASE WHEN d.fence = 1 THEN ?1 ELSE ?2 END
FROM onefold_delivery d
WHERE d.seq = ?3
RETURNING seq

-- name: move_cancelled
DELETE FROM onefold_delivery WHERE seq = ?

-- name: move_act
INSERT INTO onefold_act (at, message_id, kind, actor, reason) VALUES (?, ?, ?, ?, ?)

-- name: register_insert
INSERT INTO onefold_register (kind, name, value, version, expires_at) VALUES (?1, ?2, ?3, 1, ?4)
ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value, version = onefold_register.version + 1,
    expires_at = excluded.expires_at
WHERE onefold_register.expires_at <= ?5
RETURNING version

-- name: register_update
UPDATE onefold_register SET value = ?3, version = version + 1, expires_at = ?4
WHERE kind = ?1 AND name = ?2 AND version = ?6 AND (expires_at IS NULL OR expires_at > ?5)
RETURNING version

-- name: register_delete
DELETE FROM onefold_register WHERE kind = ?1 AND name = ?2 AND version = ?3 RETURNING version

-- name: registered
SELECT value, version FROM onefold_register WHERE kind = ? AND name = ? AND (expires_at IS NULL OR expires_at > ?)

-- name: entries
SELECT name, value, version FROM onefold_register WHERE kind = ? AND (expires_at IS NULL OR expires_at > ?)

-- name: purge_gone
-- How many messages are over, up to a limit; the highest number, and between which numbers and ids they lie.
-- This and what follows name the same messages, as long as their outcomes go last.
SELECT count(*), max(m.seq), min(m.seq), min(m.id), max(m.id)
FROM (SELECT seq FROM onefold_outcome WHERE kept_until <= ?1 ORDER BY kept_until LIMIT ?2) gone
CROSS JOIN onefold_message m ON m.seq = gone.seq

-- name: purge_any
-- Most messages have no attempts, steps or progress; then one look spares a thousand.
SELECT EXISTS (SELECT 1 FROM onefold_attempt WHERE seq BETWEEN ?1 AND ?2)
        OR EXISTS (SELECT 1 FROM onefold_progress WHERE seq BETWEEN ?1 AND ?2),
    EXISTS (SELECT 1 FROM onefold_step WHERE message_id BETWEEN ?3 AND ?4)
        OR EXISTS (SELECT 1 FROM onefold_blob WHERE message_id BETWEEN ?3 AND ?4)

-- name: purge_message_keys
SELECT m.message_type, m.idempotency_key, m.seq
FROM (SELECT seq FROM onefold_outcome WHERE kept_until <= ?1 ORDER BY kept_until LIMIT ?2) gone
CROSS JOIN onefold_message m ON m.seq = gone.seq

-- name: purge_message_key
DELETE FROM onefold_key WHERE scope = ? AND key = ? AND kind = {key_idempotency} AND seq = ?

-- name: purge_attempts
DELETE FROM onefold_attempt
WHERE seq IN (SELECT seq FROM onefold_outcome WHERE kept_until <= ?1 ORDER BY kept_until LIMIT ?2)

-- name: purge_progress
DELETE FROM onefold_progress
WHERE seq IN (SELECT seq FROM onefold_outcome WHERE kept_until <= ?1 ORDER BY kept_until LIMIT ?2)

-- name: purge_steps
DELETE FROM onefold_step WHERE message_id IN (
    SELECT m.id FROM (SELECT seq FROM onefold_outcome WHERE kept_until <= ?1 ORDER BY kept_until LIMIT ?2) gone
    CROSS JOIN onefold_message m ON m.seq = gone.seq)

-- name: purge_parts
DELETE FROM onefold_blob WHERE message_id IN (
    SELECT m.id FROM (SELECT seq FROM onefold_outcome WHERE kept_until <= ?1 ORDER BY kept_until LIMIT ?2) gone
    CROSS JOIN onefold_message m ON m.seq = gone.seq)

-- name: purge_messages
DELETE FROM onefold_message
WHERE seq IN (SELECT seq FROM onefold_outcome WHERE kept_until <= ?1 ORDER BY kept_until LIMIT ?2)

-- name: purge_outcomes
DELETE FROM onefold_outcome
WHERE seq IN (SELECT seq FROM onefold_outcome WHERE kept_until <= ?1 ORDER BY kept_until LIMIT ?2)

-- name: purge_range
-- From where bodies are still there, and up to where they go now: those of one moment go together.
-- After the clock was set back it begins anew from there: what ends then has an earlier time than what was purged before.
SELECT since, coalesce((
    SELECT body_until FROM onefold_outcome WHERE body_until > since AND body_until <= ?1
    ORDER BY body_until LIMIT 1 OFFSET ?2 - 1), ?1)
FROM (SELECT min(bodies, ?1) AS since FROM onefold_purge)

-- name: purge_bodies
UPDATE onefold_message SET payload = NULL
WHERE seq IN (SELECT seq FROM onefold_outcome WHERE body_until > ?1 AND body_until <= ?2)

-- name: purge_bodies_done
UPDATE onefold_purge SET bodies = ?2 WHERE ?3 OR bodies > ?1

-- name: purge_keys
DELETE FROM onefold_key
WHERE (scope, key, kind) IN (SELECT scope, key, kind FROM onefold_key WHERE expires_at <= ? LIMIT ?)

-- name: purge_acts
-- The oldest come first, so that only so many are ever looked at.
DELETE FROM onefold_act
WHERE seq IN (SELECT seq FROM (SELECT seq, at FROM onefold_act ORDER BY seq LIMIT ?2) WHERE at <= ?1)

-- name: purge_register
DELETE FROM onefold_register
WHERE (kind, name) IN (SELECT kind, name FROM onefold_register WHERE expires_at <= ? LIMIT ?)

-- name: find_ids
-- A result whose window is over is not shown, though a purge may not have come by yet.
-- A message that was parked because of a failure shows it: it is the attempt with the fence it was parked under.
SELECT {record}, CASE WHEN o.kept_until > ?2 THEN o.result END,
    {failure_shown}
FROM json_each(?1) given
CROSS JOIN onefold_message m ON m.seq = given.value
{where_it_is}
ORDER BY m.id

-- part: asked
-- What any query may ask for besides the ids behind ?1 and a page of ?5.
-- Headers are searched as bytes: within a text of theirs the quotes would be escaped, and damaged ones are no error.
(?2 IS NULL OR m.queue = ?2) AND (?3 IS NULL OR m.message_type = ?3) AND (?4 IS NULL OR m.correlation_id = ?4)
    AND coalesce(d.state, o.state) IN (SELECT value FROM json_each(?6))
    AND (NOT ?8 OR instr(m.headers, CAST('"pinned":true' AS BLOB)) > 0)

-- part: found
SELECT {record}, CASE WHEN o.kept_until > ?7 THEN o.result END, {failure_shown}

-- part: open
-- From what is open to its message: what is kept is not looked at.
CROSS JOIN onefold_message m ON m.seq = d.seq
LEFT JOIN onefold_outcome o ON o.seq = d.seq

-- name: find_dead
{found}
FROM onefold_outcome o
JOIN onefold_message m ON m.seq = o.seq
LEFT JOIN onefold_delivery d ON d.seq = o.seq
WHERE o.letter > ?1 AND {asked}
ORDER BY o.letter LIMIT ?5

-- name: find_leased
{found}
FROM onefold_delivery d INDEXED BY onefold_delivery_lease
{open}
WHERE d.state = {leased} AND (?9 IS NULL OR d.worker = ?9) AND (?10 IS NULL OR d.crashes >= ?10) AND m.id > ?1 AND {asked}
ORDER BY m.id LIMIT ?5

-- name: find_crashed
{found}
FROM onefold_delivery d INDEXED BY onefold_delivery_crashed
{open}
WHERE d.crashes > 0 AND d.crashes >= ?9 AND m.id > ?1 AND {asked}
ORDER BY m.id LIMIT ?5

-- name: find_parked
-- By number here and below, which is the order of ids of version 7.
{found}
FROM onefold_delivery d INDEXED BY onefold_delivery_parked
{open}
WHERE d.state = {parked} AND d.seq > ?1 AND {asked}
ORDER BY d.seq LIMIT ?5

-- name: find_runs
{found}
FROM onefold_delivery d INDEXED BY onefold_delivery_run
{open}
WHERE instr(d.message_type, '@') > 0 AND d.seq > ?1 AND {asked}
ORDER BY d.seq LIMIT ?5

-- name: find_open
{found}
FROM onefold_delivery d
{open}
WHERE d.seq > ?1 AND {asked}
ORDER BY d.seq LIMIT ?5

-- name: find_correlated
-- The first message of a chain has its own id as its correlation id, all others stand in the index.
{found},
    coalesce((SELECT k.suppressed FROM onefold_key k
        WHERE k.scope = m.message_type AND k.key = m.idempotency_key AND k.kind = {key_idempotency} AND k.seq = m.seq), 0)
FROM (
    SELECT seq FROM onefold_message INDEXED BY onefold_message_correlation
    WHERE correlation_id = ?4 AND correlation_id <> id
    UNION ALL
    SELECT seq FROM onefold_message WHERE seq = ?9
) found
CROSS JOIN onefold_message m ON m.seq = found.seq
{where_it_is}
WHERE m.id > ?1 AND {asked}
ORDER BY m.id LIMIT ?5

-- name: find_any
{found}
FROM onefold_message m
{where_it_is}
WHERE m.seq > ?1 AND {asked}
ORDER BY m.seq LIMIT ?5

-- name: attempts
SELECT attempt, fence, at, worker, failure, delay FROM onefold_attempt WHERE seq = ? ORDER BY fence

-- name: count_alive
SELECT queue, state, count(*) FROM onefold_delivery GROUP BY queue, state

-- name: count_dead
SELECT m.queue, count(*), min(o.ended_at)
FROM onefold_outcome o INDEXED BY onefold_outcome_letter
CROSS JOIN onefold_message m ON m.seq = o.seq
WHERE o.letter IS NOT NULL
GROUP BY m.queue

-- name: expire_all
-- The machine was started again, so no owner of a lease is alive.
UPDATE onefold_delivery SET lease_until = 0, graced = 1 WHERE state = {leased}

-- name: restored_leases
SELECT count(*) FROM onefold_delivery WHERE state = {leased}

-- name: restored_deliveries
-- Leases from before the restore are shut out by the fence; no worker is known to have crashed.
UPDATE onefold_delivery
SET state = CASE state WHEN {leased} THEN {scheduled} ELSE state END, fence = fence + ?, lease_until = NULL, worker = NULL

-- name: restored_outcomes
UPDATE onefold_outcome SET fence = fence + ?
