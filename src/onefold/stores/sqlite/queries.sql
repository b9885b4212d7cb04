-- The statements of the SQLite store, in the order of a message's life.
-- SQLite has one writer, so within BEGIN IMMEDIATE a read followed by a write is one atomic act.

-- name: put_last
-- Numbers are given out here and not by SQLite, because the key is written before the message it points to.
SELECT max((SELECT coalesce(max(seq), 0) FROM onefold_message), (SELECT last FROM onefold_sequence))

-- name: put_key
INSERT INTO onefold_key (scope, key, kind, seq, fingerprint, schema_version, expires_at)
VALUES (?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING

-- name: key_owner
SELECT seq FROM onefold_key WHERE scope = ? AND key = ? AND kind = ?

-- name: put_message
-- Naming the id twice is a lost answer being asked for again: the same message, so nothing is to be done,
-- least of all a second delivery of a message that may have ended meanwhile.
INSERT INTO onefold_message (seq, id, message_type, schema_version, queue, idempotency_key, correlation_id,
    causation_id, subject, created_at, retention, payload, headers)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO NOTHING

-- name: put_lone
-- Two of one id or of one key are an error here, after which the message is put with more care.
INSERT INTO onefold_arrival (id, message_type, schema_version, queue, idempotency_key, correlation_id, causation_id,
    subject, created_at, retention, payload, headers, fingerprint)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: put_known
-- A message that has neither a delivery nor an outcome has just come, here and below: it waits.
SELECT m.id, m.seq, coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state, 0)
FROM json_each(?) given
CROSS JOIN onefold_message m ON m.id = given.value
LEFT JOIN onefold_delivery d ON d.seq = m.seq
LEFT JOIN onefold_outcome o ON o.seq = m.seq

-- name: put_delivery
INSERT INTO onefold_delivery (seq, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
    replay_count)
VALUES (?, ?, ?, 0, ?, ?, 1, 0, 0, 0)

-- name: put_gated
INSERT INTO onefold_delivery (seq, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
    replay_count, priority, gate, place)
VALUES (?, ?, ?, 0, ?, ?, 1, 0, 0, 0, ?, ?, ?)

-- name: deliver_missing
SELECT (SELECT coalesce(max(seq), 0) FROM onefold_message) > delivered FROM onefold_sequence

-- name: deliver
-- Those that could not wait have theirs, and stay as they are.
INSERT INTO onefold_delivery (seq, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
    replay_count)
SELECT seq, queue, message_type, 0, created_at, iif(retention > 0, created_at + retention, 0), 1, 0, 0, 0
FROM onefold_message WHERE seq > (SELECT delivered FROM onefold_sequence)
ON CONFLICT DO NOTHING

-- name: deliver_mark
UPDATE onefold_sequence SET delivered = (SELECT max(seq) FROM onefold_message)

-- name: key_holder
SELECT k.seq, m.id, k.fingerprint, k.schema_version, k.expires_at,
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state, 0), o.kept_until
FROM onefold_key k
LEFT JOIN onefold_message m ON m.seq = k.seq
LEFT JOIN onefold_delivery d ON d.seq = k.seq
LEFT JOIN onefold_outcome o ON o.seq = k.seq
WHERE k.scope = ? AND k.key = ? AND k.kind = ?

-- name: take_key
UPDATE onefold_key
SET seq = ?4, fingerprint = ?5, schema_version = ?6, expires_at = ?7, suppressed = 0
WHERE scope = ?1 AND key = ?2 AND kind = ?3

-- name: point_key
UPDATE onefold_key SET seq = ?5 WHERE scope = ?1 AND key = ?2 AND kind = ?3 AND seq = ?4

-- name: count_suppressed
UPDATE onefold_key SET suppressed = suppressed + 1 WHERE scope = ? AND key = ? AND kind = ?

-- name: claim_grace
-- A lease that ran out is extended once, in case its owner lives and only waited for the write lock to renew it.
UPDATE onefold_delivery SET graced = 1, lease_until = ?2 WHERE state = 1 AND lease_until <= ?1 AND graced = 0

-- name: claim_expired
-- A lease that ran out: its worker died or is too slow.  The fence rises when the message is claimed again.
UPDATE onefold_delivery
SET state = 0, crashes = crashes + started, lease_until = NULL, worker = NULL
WHERE state = 1 AND lease_until <= ?

-- name: claim_possible
-- The index is named here and below because the owner of the file may have made statistics that suggest another way.
SELECT EXISTS (SELECT 1 FROM onefold_delivery WHERE state = 1 AND lease_until <= ?1)
    OR EXISTS (
        SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_due
        WHERE queue IN (SELECT value FROM json_each(?2)) AND state = 0 AND gate IS NULL AND priority = 0
            AND due_at <= ?3 AND message_type IN (SELECT value FROM json_each(?4)) AND crashes <= ?5)
    OR EXISTS (
        SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_priority
        WHERE queue IN (SELECT value FROM json_each(?2)) AND state = 0 AND gate IS NULL AND priority > 0
            AND priority IN (1, 2, 3, 4, 5, 6, 7, 8, 9)
            AND due_at <= ?3 AND message_type IN (SELECT value FROM json_each(?4)) AND crashes <= ?5)
    OR EXISTS (
        SELECT 1 FROM onefold_arrival
        WHERE queue IN (SELECT value FROM json_each(?2)) AND message_type IN (SELECT value FROM json_each(?4)))

-- name: claim_possible_crashed
SELECT EXISTS (SELECT 1 FROM onefold_delivery WHERE state = 1 AND lease_until <= ?1)
    OR EXISTS (
        SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_crashed
        WHERE crashes > 0 AND queue IN (SELECT value FROM json_each(?2)) AND state = 0 AND gate IS NULL
            AND due_at <= ?3 AND message_type IN (SELECT value FROM json_each(?4)))

-- name: claim_select
SELECT m.id, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id, m.subject,
    m.created_at, m.retention, m.payload, m.headers,
    d.due_at, d.expires_at, d.fence, d.attempt, d.crashes, d.replay_count, d.wake, d.seq
FROM (
    SELECT seq, due_at, expires_at, fence, attempt, crashes, replay_count, wake
    FROM onefold_delivery INDEXED BY onefold_delivery_due
    WHERE queue = ?1 AND state = 0 AND gate IS NULL AND priority = 0 AND due_at <= ?2
        AND message_type IN (SELECT value FROM json_each(?3)) AND crashes <= ?5
    ORDER BY due_at LIMIT ?4
) d
CROSS JOIN onefold_message m ON m.seq = d.seq

-- name: claim_select_crashed
SELECT m.id, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id, m.subject,
    m.created_at, m.retention, m.payload, m.headers,
    d.due_at, d.expires_at, d.fence, d.attempt, d.crashes, d.replay_count, d.wake, d.seq
FROM (
    SELECT seq, due_at, expires_at, fence, attempt, crashes, replay_count, wake
    FROM onefold_delivery INDEXED BY onefold_delivery_crashed
    WHERE crashes > 0 AND queue = ?1 AND state = 0 AND gate IS NULL AND due_at <= ?2
        AND message_type IN (SELECT value FROM json_each(?3))
    ORDER BY due_at LIMIT ?4
) d
CROSS JOIN onefold_message m ON m.seq = d.seq

-- name: claim_take
-- Who is not yet suspected counts as started, because nobody will say when it is; a suspect is marked when it begins.
-- Under a supervisor everybody counts as started: it says itself who was not.
UPDATE onefold_delivery
SET state = 1, fence = fence + 1, lease_until = ?1, graced = 0, worker = ?2, started = (crashes < ?3),
    wake_target = NULL
WHERE seq IN (SELECT value FROM json_each(?4))

-- name: claim_set_aside
-- A message that cannot be claimed becomes a dead letter, so that it is not in the way of the others.
INSERT INTO onefold_outcome (seq, state, fence, attempt, crashes, replay_count, ended_at, kept_until, body_until, failure,
    letter)
SELECT d.seq, 4, CAST(min(d.fence, 9223372036854775807) AS INTEGER), d.attempt, d.crashes, d.replay_count, ?3, ?4, ?5,
    ?2, m.id
FROM onefold_delivery d JOIN onefold_message m ON m.seq = d.seq
WHERE d.seq = ?1

-- name: lease_rows
-- For leases that came without the number of their row.
SELECT m.id, m.seq FROM json_each(?) given CROSS JOIN onefold_message m ON m.id = given.value

-- name: lease_fences
SELECT seq, fence, state FROM onefold_delivery WHERE seq IN (SELECT value FROM json_each(?))

-- name: extend
UPDATE onefold_delivery SET lease_until = ?1, graced = 0, started = max(started, ?2)
WHERE seq IN (SELECT value FROM json_each(?3))

-- name: report_owners
-- Whose word counts: who holds the message, or ended its claim when nobody has claimed it since.
SELECT seq, state, fence FROM onefold_delivery WHERE seq IN (SELECT value FROM json_each(?1))
UNION ALL
SELECT seq, state, fence FROM onefold_outcome WHERE seq IN (SELECT value FROM json_each(?1))

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
SELECT m.id, m.message_type, p.fence, d.state IS 1, p.percent, p.message, p.at, p.beat_at
FROM json_each(?) given
CROSS JOIN onefold_message m ON m.id = given.value
CROSS JOIN onefold_progress p ON p.seq = m.seq
LEFT JOIN onefold_delivery d ON d.seq = m.seq
WHERE d.state IS NOT 1 OR d.fence = p.fence

-- name: settle_end
DELETE FROM onefold_delivery WHERE seq IN (SELECT value FROM json_each(?))

-- name: settle_outcome
INSERT INTO onefold_outcome (seq, state, fence, attempt, crashes, replay_count, ended_at, kept_until, body_until,
    result, failure, letter)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: settle_again
-- The fence rises here too, so that an answer lost on the way cannot be settled a second time.
UPDATE onefold_delivery
SET state = 0, fence = fence + 1, attempt = ?, crashes = crashes + ?, due_at = ?, lease_until = NULL, worker = NULL
WHERE seq = ?

-- name: settle_hand_back
UPDATE onefold_delivery SET state = 0, fence = fence + 1, lease_until = NULL, worker = NULL
WHERE seq IN (SELECT value FROM json_each(?))

-- name: settle_attempt
INSERT INTO onefold_attempt (seq, fence, attempt, at, worker, failure, delay) VALUES (?, ?, ?, ?, ?, ?, ?)

-- name: move_redrive
-- Only a letter whose body is still to be kept can run again; its fence starts above the one that ended it.
-- When its time is over it is too late, though a purge may not have come by yet; with its key's window over, its key may
-- already be another message's.
INSERT INTO onefold_delivery (seq, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
    replay_count, priority, gate, place)
SELECT o.seq, m.queue,
    m.message_type || CASE WHEN CAST(m.headers AS TEXT) ->> '$.pinned' THEN '@' || m.schema_version ELSE '' END, 0,
    ?1, CASE m.retention WHEN 0 THEN 0 ELSE ?1 + m.retention END, o.fence + 1, 0, 0, o.replay_count + 1,
    coalesce(CAST(m.headers AS TEXT) ->> '$.priority', 0),
    coalesce(CAST(m.headers AS TEXT) ->> '$.gate',
        m.message_type || ':' || (CAST(m.headers AS TEXT) ->> '$.ordering_key')),
    CASE WHEN CAST(m.headers AS TEXT) ->> '$.ordering_key' IS NOT NULL
        THEN coalesce(CAST(m.headers AS TEXT) ->> '$.sequence', ?3) END
FROM onefold_message m JOIN onefold_outcome o ON o.seq = m.seq
WHERE m.id = ?2 AND o.state = 4 AND o.body_until > ?1 AND m.payload IS NOT NULL
RETURNING seq

-- name: move_reopened
DELETE FROM onefold_outcome WHERE seq = ?

-- name: move_discard
UPDATE onefold_outcome SET state = 6, fence = fence + 1, kept_until = ?1, body_until = ?1, letter = NULL
WHERE letter = ?2
RETURNING seq

-- name: move_cancel
-- A message that nobody ever claimed leaves its key free at once; one that may have run keeps it.
INSERT INTO onefold_outcome (seq, state, fence, attempt, crashes, replay_count, ended_at, kept_until, body_until)
SELECT d.seq, 5, d.fence + 1, d.attempt, d.crashes, d.replay_count, ?1,
    CASE WHEN d.fence = 1 THEN ?1 ELSE ?2 END, CASE WHEN d.fence = 1 THEN ?1 ELSE ?2 END
FROM onefold_message m JOIN onefold_delivery d ON d.seq = m.seq
WHERE m.id = ?3
RETURNING seq

-- name: move_cancelled
DELETE FROM onefold_delivery WHERE seq = ?

-- name: lock
SELECT m.id, coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state)
FROM json_each(?1) given
JOIN onefold_message m ON m.id = given.value
LEFT JOIN onefold_delivery d ON d.seq = m.seq
LEFT JOIN onefold_outcome o ON o.seq = m.seq

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

-- name: purge_sequence
UPDATE onefold_sequence SET last = max(last, ?)

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
DELETE FROM onefold_key WHERE scope = ? AND key = ? AND kind = 0 AND seq = ?

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
SELECT m.id, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id, m.subject,
    m.created_at, m.retention, m.payload, m.headers,
    coalesce(d.due_at, iif(o.seq, 0, m.created_at)),
    coalesce(d.expires_at, iif(o.seq OR m.retention = 0, 0, m.created_at + m.retention)),
    coalesce(d.fence, o.fence, 1), coalesce(d.attempt, o.attempt, 0),
    coalesce(d.crashes, o.crashes, 0), coalesce(d.replay_count, o.replay_count, 0),
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state, 0),
    d.worker, o.ended_at, o.kept_until, o.body_until, CASE WHEN o.kept_until > ?2 THEN o.result END,
    CASE WHEN d.wake_target IS NULL THEN o.failure ELSE
        (SELECT a.failure FROM onefold_attempt a WHERE a.seq = d.seq AND a.fence = d.fence - 1) END
FROM json_each(?1) given
JOIN onefold_message m ON m.id = given.value
LEFT JOIN onefold_delivery d ON d.seq = m.seq
LEFT JOIN onefold_outcome o ON o.seq = m.seq
ORDER BY m.id

-- name: find_dead
SELECT m.id, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id, m.subject,
    m.created_at, m.retention, m.payload, m.headers,
    0, 0, o.fence, o.attempt, o.crashes, o.replay_count, o.state, NULL, o.ended_at, o.kept_until, o.body_until, o.result,
    o.failure
FROM onefold_outcome o
JOIN onefold_message m ON m.seq = o.seq
WHERE o.letter > ?1 AND (?2 IS NULL OR m.queue = ?2) AND (?3 IS NULL OR m.message_type = ?3)
    AND (?4 IS NULL OR m.correlation_id = ?4)
ORDER BY o.letter LIMIT ?5

-- name: find_leased
-- From the leases to their messages: what is kept is not looked at.
SELECT m.id, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id, m.subject,
    m.created_at, m.retention, m.payload, m.headers,
    d.due_at, d.expires_at, d.fence, d.attempt, d.crashes, d.replay_count, d.state, d.worker, NULL, NULL, NULL, NULL, NULL
FROM onefold_delivery d INDEXED BY onefold_delivery_lease
CROSS JOIN onefold_message m ON m.seq = d.seq
WHERE d.state = 1 AND d.worker = ?1 AND (?8 IS NULL OR d.crashes >= ?8)
    AND m.id > ?2 AND (?3 IS NULL OR m.queue = ?3) AND (?4 IS NULL OR m.message_type = ?4)
    AND (?5 IS NULL OR m.correlation_id = ?5) AND d.state IN (SELECT value FROM json_each(?7))
ORDER BY m.id LIMIT ?6

-- name: find_crashed
SELECT m.id, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id, m.subject,
    m.created_at, m.retention, m.payload, m.headers,
    d.due_at, d.expires_at, d.fence, d.attempt, d.crashes, d.replay_count,
    CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, d.worker, NULL, NULL, NULL, NULL, NULL
FROM onefold_delivery d INDEXED BY onefold_delivery_crashed
CROSS JOIN onefold_message m ON m.seq = d.seq
WHERE d.crashes > 0 AND d.crashes >= ?1
    AND m.id > ?2 AND (?3 IS NULL OR m.queue = ?3) AND (?4 IS NULL OR m.message_type = ?4)
    AND (?5 IS NULL OR m.correlation_id = ?5)
    AND CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END IN (SELECT value FROM json_each(?7))
ORDER BY m.id LIMIT ?6

-- name: find_correlated
-- The first message of a chain has its own id as its correlation id, all others stand in the index.
SELECT m.id, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id, m.subject,
    m.created_at, m.retention, m.payload, m.headers,
    coalesce(d.due_at, iif(o.seq, 0, m.created_at)),
    coalesce(d.expires_at, iif(o.seq OR m.retention = 0, 0, m.created_at + m.retention)),
    coalesce(d.fence, o.fence, 1), coalesce(d.attempt, o.attempt, 0),
    coalesce(d.crashes, o.crashes, 0), coalesce(d.replay_count, o.replay_count, 0),
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state, 0),
    d.worker, o.ended_at, o.kept_until, o.body_until, CASE WHEN o.kept_until > ?7 THEN o.result END, o.failure,
    coalesce((SELECT k.suppressed FROM onefold_key k
        WHERE k.scope = m.message_type AND k.key = m.idempotency_key AND k.kind = 0 AND k.seq = m.seq), 0)
FROM (
    SELECT seq FROM onefold_message INDEXED BY onefold_message_correlation
    WHERE correlation_id = ?4 AND correlation_id <> id
    UNION ALL
    SELECT seq FROM onefold_message WHERE id = ?4
) found
CROSS JOIN onefold_message m ON m.seq = found.seq
LEFT JOIN onefold_delivery d ON d.seq = m.seq
LEFT JOIN onefold_outcome o ON o.seq = m.seq
WHERE m.id > ?1 AND m.correlation_id = ?4 AND (?2 IS NULL OR m.queue = ?2) AND (?3 IS NULL OR m.message_type = ?3)
    AND coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state, 0)
        IN (SELECT value FROM json_each(?6))
ORDER BY m.id LIMIT ?5

-- name: find_any
SELECT m.id, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id, m.subject,
    m.created_at, m.retention, m.payload, m.headers,
    coalesce(d.due_at, iif(o.seq, 0, m.created_at)),
    coalesce(d.expires_at, iif(o.seq OR m.retention = 0, 0, m.created_at + m.retention)),
    coalesce(d.fence, o.fence, 1), coalesce(d.attempt, o.attempt, 0),
    coalesce(d.crashes, o.crashes, 0), coalesce(d.replay_count, o.replay_count, 0),
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state, 0),
    d.worker, o.ended_at, o.kept_until, o.body_until, CASE WHEN o.kept_until > ?7 THEN o.result END,
    CASE WHEN d.wake_target IS NULL THEN o.failure ELSE
        (SELECT a.failure FROM onefold_attempt a WHERE a.seq = d.seq AND a.fence = d.fence - 1) END
FROM onefold_message m
LEFT JOIN onefold_delivery d ON d.seq = m.seq
LEFT JOIN onefold_outcome o ON o.seq = m.seq
WHERE m.id > ?1 AND (?2 IS NULL OR m.queue = ?2) AND (?3 IS NULL OR m.message_type = ?3)
    AND (?4 IS NULL OR m.correlation_id = ?4)
    AND coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state, 0)
        IN (SELECT value FROM json_each(?6))
ORDER BY m.id LIMIT ?5

-- name: attempts
SELECT a.attempt, a.fence, a.at, a.worker, a.failure, a.delay
FROM onefold_message m JOIN onefold_attempt a ON a.seq = m.seq
WHERE m.id = ? ORDER BY a.fence

-- name: count_alive
SELECT queue, shown, sum(number) FROM (
    SELECT queue, CASE WHEN wake_target IS NULL THEN state ELSE 2 END AS shown, count(*) AS number
    FROM onefold_delivery GROUP BY queue, shown
    UNION ALL
    SELECT queue, 0, 1 FROM onefold_arrival
) GROUP BY queue, shown

-- name: count_dead
SELECT m.queue, count(*), min(o.ended_at)
FROM onefold_outcome o INDEXED BY onefold_outcome_letter
CROSS JOIN onefold_message m ON m.seq = o.seq
WHERE o.letter IS NOT NULL
GROUP BY m.queue

-- name: expire_all
-- The machine was started again, so no owner of a lease is alive.
UPDATE onefold_delivery SET lease_until = 0, graced = 1 WHERE state = 1

-- name: restored_leases
SELECT count(*) FROM onefold_delivery WHERE state = 1

-- name: restored_deliveries
-- Whoever still holds a lease from before the restore is shut out by the fence; nobody is known to have crashed.
UPDATE onefold_delivery SET state = 0, fence = fence + ?, lease_until = NULL, worker = NULL

-- name: restored_outcomes
UPDATE onefold_outcome SET fence = fence + ?

-- name: restored_sequence
-- Numbers given to messages that the backup does not hold must not be given again either.
UPDATE onefold_sequence SET last = max(last, (SELECT coalesce(max(seq), 0) FROM onefold_message)) + ?
