-- The statements of the PostgreSQL store, in the order of a message's life.
-- They also run on callers' connections, under their search path: functions are called as pg_catalog's, because one that
-- another role has made would be preferred if its types fit better, and operators have operands of the types that the
-- server's own are made for.  Only unnest of several arrays stands alone: it is grammar, and always the server's.
-- The names are those of the SQLite store; where one statement here does what several do there, its comment says so.
-- Changes that belong together are one statement, because a round trip costs more than another part of a statement.
-- `now` is null except in tests, which bring their own clock; a statement reads the time once.
-- A prepared statement keeps a plan made when the tables were empty, so nothing here leaves the planner a choice that
-- would be wrong for full ones: rows are named by "= ANY (array)" or looked up one by one in a subquery fenced off with
-- OFFSET 0, never joined to; and "IN (…) IS TRUE" is answered from a hash, where without "IS TRUE" it would be a join.

-- name: put
-- Stands for put_key, put_message and put_delivery, for many messages at once.
-- Keys are written in their order, so that two senders of the same keys wait for each other in one direction.
-- Messages whose key is taken are returned, and nothing of them is stored.
-- A message without a key, or whose keys are taken for it already, may be there from a first time whose answer was lost:
-- it gets no second delivery.  No id may be given twice in one call.
WITH {clock},
given AS MATERIALIZED (
    SELECT * FROM unnest({put_arrays}) AS g ({put_columns})
),
won AS (
    INSERT INTO onefold.key (scope, key, kind, message_id, fingerprint, schema_version)
    SELECT message_type, idempotency_key, {key_idempotency}, id, fingerprint, schema_version FROM given WHERE takes_key
    ORDER BY message_type COLLATE "C", idempotency_key COLLATE "C"
    ON CONFLICT DO NOTHING
    RETURNING message_id
),
stored AS (
    INSERT INTO onefold.message ({message_columns})
    SELECT {message_given} FROM given WHERE NOT takes_key OR (id IN (SELECT message_id FROM won)) IS TRUE
    ON CONFLICT (id) DO NOTHING
    RETURNING id
),
delivery AS (
    INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
        replay_count, priority, gate, place)
    SELECT id, queue, claimed_as, {scheduled}, due, CASE retention WHEN 0 THEN 0 ELSE due + retention END, 1, 0, 0, 0,
        priority, gate, CASE WHEN ordered THEN coalesce(sequence, pg_catalog.nextval('onefold.place')) END
    FROM (
        SELECT given.*, CASE due_at WHEN 0 THEN (SELECT now FROM clock) + delay ELSE due_at END AS due FROM given
    ) dated
    WHERE (id IN (SELECT id FROM stored)) IS TRUE
)
SELECT id::text FROM given WHERE takes_key AND (id IN (SELECT message_id FROM won)) IS NOT TRUE

-- name: put_one
-- The same for a single message, which is returned if it was stored: without arrays to unpack and hashes to build.
WITH won AS (
    INSERT INTO onefold.key (scope, key, kind, message_id, fingerprint, schema_version)
    SELECT %(message_type)s::text, %(idempotency_key)s::text, {key_idempotency}, %(id)s::uuid, %(fingerprint)s::bytea,
        %(schema_version)s::bigint
    WHERE %(takes_key)s::boolean
    ON CONFLICT DO NOTHING
    RETURNING 1
),
stored AS (
    INSERT INTO onefold.message ({message_columns})
    SELECT {message_values} WHERE NOT %(takes_key)s::boolean OR EXISTS (SELECT FROM won)
    ON CONFLICT (id) DO NOTHING
    RETURNING id, queue, retention,
        CASE %(due_at)s::bigint WHEN 0 THEN created_at + %(delay)s::bigint ELSE %(due_at)s::bigint END AS due
)
INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes, replay_count,
    priority, gate, place)
SELECT id, queue, %(claimed_as)s::text, {scheduled}, due, CASE retention WHEN 0 THEN 0 ELSE due + retention END, 1, 0, 0, 0,
    %(priority)s::bigint, %(gate)s::text,
    CASE WHEN %(ordered)s::boolean THEN coalesce(%(sequence)s::bigint, pg_catalog.nextval('onefold.place')) END
FROM stored
RETURNING 1

-- name: put_key
INSERT INTO onefold.key (scope, key, kind, message_id, fingerprint, schema_version, expires_at)
SELECT scope, key, kind, message_id, fingerprint, schema_version, expires_at
FROM unnest(%(scopes)s::text[], %(keys)s::text[], %(kinds)s::smallint[], %(ids)s::uuid[], %(fingerprints)s::bytea[],
    %(versions)s::int[], %(expiries)s::bigint[])
    AS g (scope, key, kind, message_id, fingerprint, schema_version, expires_at)
ON CONFLICT DO NOTHING
RETURNING message_id::text, kind

-- name: key_lock
-- Waits for open transactions that have locked one of these keys.  The holders must be read by the next statement: this
-- one still sees the messages as they were before it waited.
SELECT pg_catalog.count(*)
FROM unnest(%(scopes)s::text[], %(keys)s::text[], %(kinds)s::smallint[]) AS g (scope, key, kind)
CROSS JOIN LATERAL (
    SELECT k.kind FROM onefold.key k WHERE k.scope = g.scope AND k.key = g.key AND k.kind = g.kind FOR UPDATE
) held

-- name: key_holder
SELECT {now}, k.message_id::text, k.fingerprint, k.schema_version, k.expires_at,
    coalesce(d.state, o.state), o.kept_until
FROM unnest(%(scopes)s::text[], %(keys)s::text[], %(kinds)s::smallint[])
    WITH ORDINALITY AS g (scope, key, kind, place)
LEFT JOIN LATERAL (
    SELECT * FROM onefold.key WHERE key.scope = g.scope AND key.key = g.key AND key.kind = g.kind OFFSET 0
) k ON true
LEFT JOIN LATERAL (SELECT state FROM onefold.delivery WHERE id = k.message_id OFFSET 0) d ON true
LEFT JOIN LATERAL (SELECT state, kept_until FROM onefold.outcome WHERE id = k.message_id OFFSET 0) o ON true
ORDER BY g.place

-- name: take_key
-- From the holder that was judged and no other: of two messages that take the same key, one finds it changed.
UPDATE onefold.key
SET message_id = %(id)s::uuid, fingerprint = %(fingerprint)s::bytea, schema_version = %(version)s::int,
    expires_at = %(expires_at)s::bigint, suppressed = 0
WHERE scope = %(scope)s::text AND key = %(key)s::text AND kind = %(kind)s::smallint
    AND message_id = %(holder)s::uuid
RETURNING message_id::text, kind

-- name: drop_key
-- A message needs all of its keys; those it won are given back when it lost another.
DELETE FROM onefold.key
WHERE scope = %(scope)s::text AND key = %(key)s::text AND kind = %(kind)s::smallint AND message_id = %(id)s::uuid

-- name: count_suppressed
UPDATE onefold.key SET suppressed = suppressed + %(times)s::int
WHERE ctid = ANY (ARRAY(
    SELECT k.ctid
    FROM unnest(%(scopes)s::text[], %(keys)s::text[], %(kinds)s::smallint[]) AS g (scope, key, kind)
    CROSS JOIN LATERAL (
        SELECT ctid FROM onefold.key WHERE key.scope = g.scope AND key.key = g.key AND key.kind = g.kind OFFSET 0
    ) k))

-- name: put_probe
-- Rolled back in any case: it waits for the transaction in doubt, then says whether that one stored the message.
INSERT INTO onefold.message (id, message_type, schema_version, queue, idempotency_key, correlation_id, causation_id,
    subject, created_at, retention)
VALUES (%(id)s::uuid, '', 1, '', '', '', '', '', 0, 0)
ON CONFLICT (id) DO NOTHING
RETURNING 1

-- name: replicated
-- After a lost answer: its commit writes to the log, so that it waits until the synchronous standby, if there is one,
-- has everything before it, which a statement that only reads does not.  Any role may call it, at any wal_level.
SELECT pg_catalog.pg_logical_emit_message(true, 'onefold'::text, ''::text)

-- name: extend
-- Returns the leases that were not extended, and whether each is still held: then another transaction, such as an
-- operator's, has locked the row.  Waiting for it would let every other lease of the statement run out.
-- A row is leased exactly while it has a lease_until; asking for the state would draw in the index on leases.
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[]) AS g (id, fence)
),
free AS MATERIALIZED (
    SELECT id FROM onefold.delivery
    WHERE {has_given_fence} AND lease_until IS NOT NULL
    FOR NO KEY UPDATE SKIP LOCKED
),
kept AS (
    UPDATE onefold.delivery
    SET lease_until = {now} + %(lease)s::bigint, started = greatest(started, %(starting)s::smallint)
    WHERE id = ANY (ARRAY(SELECT id FROM free))
    RETURNING id, fence
)
SELECT g.id::text, g.fence, d.id IS NOT NULL
FROM given g LEFT JOIN LATERAL (
    SELECT id FROM onefold.delivery
    WHERE delivery.id = g.id AND delivery.fence = g.fence AND lease_until IS NOT NULL OFFSET 0
) d ON true
WHERE ((g.id, g.fence) IN (SELECT id, fence FROM kept)) IS NOT TRUE

-- name: report
-- Stands for report_owners and report; returns the leases that are still the owners of their messages.
-- A report counts if its lease holds the message, or has ended and the message was not claimed since.
-- A beat alone leaves what the same owner said before, and forgets what an earlier one did.
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(percents)s::float8[], %(messages)s::text[],
        %(spoken)s::bigint[])
    AS g (id, fence, percent, message, spoken)
),
alive AS MATERIALIZED (
    SELECT g.id, g.fence, d.fence AS owner, d.lease_until IS NOT NULL AS leased
    FROM given g CROSS JOIN LATERAL (SELECT * FROM onefold.delivery WHERE delivery.id = g.id OFFSET 0) d
),
ended AS MATERIALIZED (
    SELECT g.id, g.fence FROM given g
    CROSS JOIN LATERAL (SELECT * FROM onefold.outcome WHERE outcome.id = g.id OFFSET 0) o
    WHERE o.fence = g.fence
),
said AS (
    INSERT INTO onefold.progress AS p (message_id, fence, percent, message, at, beat_at)
    SELECT g.id, g.fence, coalesce(g.percent, 0), g.message, CASE WHEN g.percent IS NULL THEN NULL ELSE now END, now
    FROM given g CROSS JOIN (SELECT {now} AS now) clock
    WHERE g.spoken = 1 AND (
        EXISTS (
            SELECT FROM alive a
            WHERE a.id = g.id AND (a.owner = g.fence OR (a.owner = g.fence + 1 AND NOT a.leased)))
        OR EXISTS (SELECT FROM ended e WHERE e.id = g.id))
    ORDER BY g.id
    ON CONFLICT (message_id) DO UPDATE SET
        percent = CASE WHEN excluded.at IS NULL AND p.fence = excluded.fence THEN p.percent ELSE excluded.percent END,
        message = CASE WHEN excluded.at IS NULL AND p.fence = excluded.fence THEN p.message ELSE excluded.message END,
        at = CASE WHEN excluded.at IS NULL AND p.fence = excluded.fence THEN p.at ELSE excluded.at END,
        fence = excluded.fence, beat_at = excluded.beat_at
    WHERE p.fence <= excluded.fence
)
SELECT id::text, fence FROM alive WHERE owner = fence
UNION ALL
SELECT id::text, fence FROM ended

-- name: progress
SELECT m.id::text, m.message_type, p.fence, d.state IS NOT DISTINCT FROM {leased}, p.percent, p.message, p.at, p.beat_at
FROM onefold.progress p
JOIN onefold.message m ON m.id = p.message_id
LEFT JOIN onefold.delivery d ON d.id = p.message_id
WHERE p.message_id = ANY (%(ids)s::uuid[]) AND (d.state IS DISTINCT FROM {leased} OR d.fence = p.fence)

-- name: settle_done
-- Stands for settle_end and settle_outcome, for messages that succeeded; those whose lease was stale are returned.
-- When all leases were good, which is the rule, no row is looked up.
-- No lease may be given twice in one call.
WITH {clock},
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(queues)s::text[], %(attempts)s::bigint[],
        %(crashes)s::bigint[], %(replay_counts)s::bigint[], %(key_windows)s::bigint[], %(body_windows)s::bigint[],
        %(results)s::bytea[])
    AS g (id, fence, queue, attempt, crashes, replay_count, key_window, body_window, result)
),
ended AS (
    DELETE FROM onefold.delivery
    WHERE {has_given_fence}
    RETURNING id, fence
),
all_held AS MATERIALIZED (SELECT pg_catalog.count(*) = pg_catalog.cardinality(%(ids)s::uuid[]) AS yes FROM ended),
outcome AS (
    INSERT INTO onefold.outcome (id, queue, state, fence, attempt, crashes, replay_count, ended_at, kept_until,
        body_until, result)
    SELECT id, queue, {done}, fence, attempt - 1, crashes, replay_count, now, now + key_window,
        now + least(key_window, body_window), result
    FROM given CROSS JOIN clock
    WHERE (SELECT yes FROM all_held) OR ((id, fence) IN (SELECT id, fence FROM ended)) IS TRUE
)
SELECT id::text, fence FROM given
WHERE NOT (SELECT yes FROM all_held) AND ((id, fence) IN (SELECT id, fence FROM ended)) IS NOT TRUE

-- name: settle_dead
-- The same for messages that failed for good, with settle_attempt.
WITH {clock},
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(queues)s::text[], %(attempts)s::bigint[],
        %(crashes)s::bigint[], %(replay_counts)s::bigint[], %(key_windows)s::bigint[], %(body_windows)s::bigint[],
        %(failures)s::bytea[], %(failed_runs)s::bigint[], %(workers)s::text[])
    AS g (id, fence, queue, attempt, crashes, replay_count, key_window, body_window, failure, failed_runs, worker)
),
ended AS (
    DELETE FROM onefold.delivery
    WHERE {has_given_fence}
    RETURNING id, fence
),
outcome AS (
    INSERT INTO onefold.outcome (id, queue, state, fence, attempt, crashes, replay_count, ended_at, kept_until,
        body_until, failure)
    SELECT id, queue, {dead}, fence, attempt - 1 + failed_runs, crashes, replay_count, now, now + key_window,
        now + least(key_window, body_window), failure
    FROM given CROSS JOIN clock WHERE ((id, fence) IN (SELECT id, fence FROM ended)) IS TRUE
),
attempt AS (
    INSERT INTO onefold.attempt (message_id, fence, attempt, at, worker, failure)
    SELECT id, fence, attempt, now, worker, failure
    FROM given CROSS JOIN clock WHERE ((id, fence) IN (SELECT id, fence FROM ended)) IS TRUE
)
SELECT id::text, fence FROM given WHERE ((id, fence) IN (SELECT id, fence FROM ended)) IS NOT TRUE

-- name: settle_one
-- settle_done for a single success, which is how a handler with SQL of its own ends.
-- With `strictly` a stale lease is an error, so that the COMMIT which was sent right behind is not carried out.
WITH ended AS (
    DELETE FROM onefold.delivery WHERE id = %(id)s::uuid AND fence = %(fence)s::bigint
    RETURNING id, queue, fence, attempt, crashes, replay_count, {now} AS now
),
outcome AS (
    INSERT INTO onefold.outcome (id, queue, state, fence, attempt, crashes, replay_count, ended_at, kept_until,
        body_until, result)
    SELECT id, queue, {done}, fence, attempt, crashes, replay_count, now, now + %(key_window)s::bigint,
        now + least(%(key_window)s::bigint, %(body_window)s::bigint), %(result)s::bytea
    FROM ended
)
SELECT CASE WHEN pg_catalog.count(*) = 1 THEN true WHEN %(strictly)s::boolean THEN onefold.refuse_stale() ELSE false END FROM ended

-- name: settle_again
-- Stands for settle_again and settle_attempt.
-- The fence rises here too, so that an answer lost on the way cannot be settled a second time.
WITH {clock},
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(attempts)s::bigint[], %(delays)s::bigint[],
        %(failures)s::bytea[], %(workers)s::text[])
    AS g (id, fence, attempt, delay, failure, worker)
),
again AS (
    UPDATE onefold.delivery
    SET state = {scheduled}, fence = fence + 1, lease_until = NULL, worker = NULL,
        attempt = (%(counted)s::bigint[]){of_this_id},
        crashes = crashes + (%(crashed)s::bigint[]){of_this_id},
        due_at = (SELECT now FROM clock) + (%(delays)s::bigint[]){of_this_id}
    WHERE {has_given_fence}
    RETURNING id, fence - 1 AS fence
),
attempt AS (
    INSERT INTO onefold.attempt (message_id, fence, attempt, at, worker, failure, delay)
    SELECT id, fence, attempt, now, worker, failure, delay::double precision / 1e6::double precision
    FROM given CROSS JOIN clock
    WHERE failure IS NOT NULL AND ((id, fence) IN (SELECT id, fence FROM again)) IS TRUE
)
SELECT id::text, fence FROM given WHERE ((id, fence) IN (SELECT id, fence FROM again)) IS NOT TRUE

-- name: settle_hand_back
-- Some are given a gate, and if they are ordered a place at the end of its line.
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[]) AS g (id, fence)
),
back AS (
    UPDATE onefold.delivery
    SET state = {scheduled}, fence = fence + 1, lease_until = NULL, worker = NULL,
        gate = coalesce((%(gates)s::text[]){of_this_id}, gate),
        place = CASE WHEN (%(gates)s::text[]){of_this_id} IS NULL THEN place
            WHEN (%(ordered)s::boolean[]){of_this_id} THEN pg_catalog.nextval('onefold.place') END
    WHERE {has_given_fence}
    RETURNING id, fence - 1 AS fence
)
SELECT id::text, fence FROM given WHERE ((id, fence) IN (SELECT id, fence FROM back)) IS NOT TRUE

-- name: settle_locked
-- Locks the rows that no other transaction has locked, and returns the others.
WITH free AS MATERIALIZED (
    SELECT id FROM onefold.delivery WHERE id = ANY (%(ids)s::uuid[]) FOR UPDATE SKIP LOCKED
)
SELECT id::text FROM onefold.delivery WHERE id = ANY (%(ids)s::uuid[]) AND (id IN (SELECT id FROM free)) IS NOT TRUE

-- name: settle_planned
-- Comes before settle_one at the end of a handler's transaction: a plan prepared while the table was small would read
-- all of the table for as long as the session lasts.
SET LOCAL enable_seqscan = off

-- name: settle_lock
-- After a lost answer: waits until the session that was asked has committed or has ended.
SELECT id::text, fence, state FROM onefold.delivery WHERE id = ANY (%(ids)s::uuid[])
ORDER BY id FOR UPDATE

-- name: settle_found
-- After settle_lock: the rows that each fence has left behind.
SELECT id::text, fence FROM onefold.outcome WHERE id = ANY (%(ids)s::uuid[])
UNION ALL
SELECT message_id::text, fence FROM onefold.attempt WHERE message_id = ANY (%(ids)s::uuid[])

-- name: lock
-- In the order of ids, so that two transactions that lock the same messages do not wait for each other.
WITH alive AS MATERIALIZED (
    SELECT id, state FROM onefold.delivery WHERE id = ANY (%(ids)s::uuid[]) ORDER BY id FOR UPDATE
),
ended AS MATERIALIZED (
    SELECT id, state FROM onefold.outcome WHERE id = ANY (%(ids)s::uuid[]) ORDER BY id FOR UPDATE
)
SELECT id::text, state::bigint FROM alive
UNION ALL
SELECT id::text, state::bigint FROM ended

-- name: move_redrive
-- Stands for move_redrive, move_reopened and move_act.
-- Only a letter whose body is still to be kept can run again; its fence starts above the one that ended it.
-- When its time is over it is too late, even if no purge has removed it yet: with its key's window over, its key may
-- already be another message's.
-- In its line it stands where its number says, or else behind all others.
WITH {clock},
-- No purge removes a body until this is committed.  A purge that was under way has committed by then, and only because
-- the rows below are locked are they read again after waiting, so that a body it has removed is seen to be gone.
unpurged AS MATERIALIZED (SELECT FROM onefold.purge FOR KEY SHARE),
body AS MATERIALIZED (
    SELECT * FROM onefold.message
    WHERE id = ANY (%(ids)s::uuid[]) AND payload IS NOT NULL AND EXISTS (SELECT FROM unpurged)
    FOR UPDATE
),
reopened AS (
    DELETE FROM onefold.outcome o USING body m
    WHERE o.id = ANY (%(ids)s::uuid[]) AND o.state = {dead} AND o.body_until > (SELECT now FROM clock) AND m.id = o.id
    RETURNING o.id, o.queue, m.retention, o.fence, o.replay_count, m.message_type, m.schema_version,
        pg_catalog.convert_from(m.headers, 'UTF8')::json AS headers
),
delivered AS (
    INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
        replay_count, priority, gate, place)
    SELECT id, queue, message_type || CASE WHEN (headers ->> 'pinned')::boolean THEN '@' || schema_version::text ELSE '' END,
        {scheduled}, now, CASE retention WHEN 0 THEN 0 ELSE now + retention END, fence + 1, 0, 0, replay_count + 1,
        coalesce((headers ->> 'priority')::smallint, 0),
        coalesce(headers ->> 'gate', message_type || ':' || (headers ->> 'ordering_key')),
        CASE WHEN headers ->> 'ordering_key' IS NOT NULL
            THEN coalesce((headers ->> 'sequence')::bigint, pg_catalog.nextval('onefold.place')) END
    FROM reopened CROSS JOIN clock
),
act AS (
    INSERT INTO onefold.act (at, message_id, kind, actor, reason)
    SELECT now, id, 'redrive', %(actor)s::text, %(reason)s::text FROM reopened CROSS JOIN clock
)
SELECT id::text, queue FROM reopened

-- name: move_discard
-- Stands for move_discard and move_act.
WITH {clock},
discarded AS (
    UPDATE onefold.outcome
    SET state = {discarded}, fence = fence + 1, kept_until = (SELECT now FROM clock), body_until = (SELECT now FROM clock)
    WHERE id = ANY (%(ids)s::uuid[]) AND state = {dead}
    RETURNING id, queue
),
act AS (
    INSERT INTO onefold.act (at, message_id, kind, actor, reason)
    SELECT now, id, 'discard', %(actor)s::text, %(reason)s::text FROM discarded CROSS JOIN clock
)
SELECT id::text, queue FROM discarded

-- name: move_cancel
-- Stands for move_cancel, move_cancelled and move_act.
-- A message that was never claimed leaves its key free at once; one that may have run keeps it.
WITH {clock},
cancelled AS (
    DELETE FROM onefold.delivery WHERE id = ANY (%(ids)s::uuid[])
    RETURNING id, queue, fence, attempt, crashes, replay_count, gate, place
),
passed AS (
    INSERT INTO onefold.gate AS g (gate, last, expires_at)
    SELECT gate, pg_catalog.max(place), pg_catalog.max(now) + %(line_retention)s::bigint FROM cancelled CROSS JOIN clock
    WHERE place >= 0 GROUP BY gate ORDER BY gate
    ON CONFLICT (gate) DO UPDATE
    SET last = greatest(g.last, excluded.last), expires_at = greatest(g.expires_at, excluded.expires_at)
),
outcome AS (
    INSERT INTO onefold.outcome (id, queue, state, fence, attempt, crashes, replay_count, ended_at, kept_until,
        body_until)
    SELECT id, queue, {cancelled}, fence + 1, attempt, crashes, replay_count, now,
        CASE fence WHEN 1 THEN now ELSE now + %(key_window)s::bigint END,
        CASE fence WHEN 1 THEN now ELSE now + %(key_window)s::bigint END
    FROM cancelled CROSS JOIN clock
),
act AS (
    INSERT INTO onefold.act (at, message_id, kind, actor, reason)
    SELECT now, id, 'cancel', %(actor)s::text, %(reason)s::text FROM cancelled CROSS JOIN clock
)
SELECT id::text, queue FROM cancelled

-- name: register_insert
INSERT INTO onefold.register AS r (kind, name, value, version, expires_at)
VALUES (%(kind)s::text, %(name)s::text, %(value)s::bytea, 1, %(expires_at)s::bigint)
ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value, version = r.version + 1,
    expires_at = excluded.expires_at
WHERE r.expires_at <= {now}
RETURNING version

-- name: register_update
UPDATE onefold.register SET value = %(value)s::bytea, version = version + 1, expires_at = %(expires_at)s::bigint
WHERE kind = %(kind)s::text AND name = %(name)s::text AND version = %(version)s::bigint
    AND (expires_at IS NULL OR expires_at > {now})
RETURNING version

-- name: register_delete
DELETE FROM onefold.register
WHERE kind = %(kind)s::text AND name = %(name)s::text AND version = %(version)s::bigint
RETURNING version

-- name: registered
SELECT value, version FROM onefold.register
WHERE kind = %(kind)s::text AND name = %(name)s::text
    AND (expires_at IS NULL OR expires_at > {now})

-- name: entries
SELECT name, value, version FROM onefold.register
WHERE kind = %(kind)s::text AND (expires_at IS NULL OR expires_at > {now})
ORDER BY name

-- name: purge_messages
-- Stands for purge_gone, purge_message_key, purge_attempts, purge_progress, purge_steps, purge_parts, purge_messages and
-- purge_outcomes.  Of several purgers one locks the row of `purge`, which is cheaper than to lock every message; the
-- second column says whether this one did, and the others find nothing to do.
WITH mark AS MATERIALIZED (SELECT FROM onefold.purge FOR UPDATE SKIP LOCKED),
old AS MATERIALIZED (
    SELECT id FROM onefold.outcome
    WHERE kept_until <= (SELECT {now}) AND EXISTS (SELECT FROM mark)
    ORDER BY kept_until LIMIT %(limit)s
),
outcome AS (
    DELETE FROM onefold.outcome WHERE id = ANY (ARRAY(SELECT id FROM old))
),
attempt AS (
    DELETE FROM onefold.attempt WHERE message_id = ANY (ARRAY(SELECT id FROM old))
),
progress AS (
    DELETE FROM onefold.progress WHERE message_id = ANY (ARRAY(SELECT id FROM old))
),
step AS (
    DELETE FROM onefold.step WHERE message_id = ANY (ARRAY(SELECT id FROM old))
),
blob AS (
    DELETE FROM onefold.blob WHERE message_id = ANY (ARRAY(SELECT id FROM old))
),
message AS (
    DELETE FROM onefold.message WHERE id = ANY (ARRAY(SELECT id FROM old)) RETURNING id, message_type, idempotency_key
),
key AS (
    DELETE FROM onefold.key k USING message m
    WHERE k.scope = m.message_type AND k.key = m.idempotency_key AND k.kind = {key_idempotency} AND k.message_id = m.id
)
SELECT pg_catalog.count(*), EXISTS (SELECT FROM mark) FROM old

-- name: purge_bodies
-- Stands for purge_range, purge_bodies and purge_bodies_done, for the purger that holds the row of `purge`.
-- Bodies of one moment go together.  After the clock was set back it begins anew from there: what ends then has an
-- earlier time than what was purged before.
WITH mark AS MATERIALIZED (
    SELECT least(bodies, now) AS since, now
    FROM onefold.purge CROSS JOIN (SELECT {now} AS now) clock
),
border AS MATERIALIZED (
    SELECT coalesce((
        SELECT body_until FROM onefold.outcome
        WHERE body_until > (SELECT since FROM mark) AND body_until <= (SELECT now FROM mark)
        ORDER BY body_until LIMIT 1 OFFSET %(limit)s::bigint - 1), now) AS upto
    FROM mark
),
old AS MATERIALIZED (
    SELECT id FROM onefold.outcome
    WHERE body_until > (SELECT since FROM mark) AND body_until <= (SELECT upto FROM border)
),
moved AS (
    UPDATE onefold.purge SET bodies = (SELECT upto FROM border)
    WHERE EXISTS (SELECT FROM old) OR bodies > (SELECT now FROM mark)
),
emptied AS (
    UPDATE onefold.message SET payload = NULL WHERE id = ANY (ARRAY(SELECT id FROM old))
)
SELECT pg_catalog.count(*) FROM old

-- name: purge_keys
-- In the order of their index: most keys do not expire, and without an order the planner may expect to find so many
-- sooner by reading the table from its beginning.  Then by their places, as count_suppressed.
DELETE FROM onefold.key WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM onefold.key
    WHERE expires_at <= (SELECT {now}) ORDER BY expires_at LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED))
RETURNING 1

-- name: purge_acts
-- The oldest come first, so that only so many are ever looked at.
DELETE FROM onefold.act WHERE seq = ANY (ARRAY(
    SELECT seq FROM (SELECT seq, at FROM onefold.act ORDER BY seq LIMIT %(limit)s FOR UPDATE SKIP LOCKED) AS oldest
    WHERE at <= (SELECT {now}) - %(kept)s::bigint))
RETURNING 1

-- name: purge_register
DELETE FROM onefold.register WHERE (kind, name) IN (
    SELECT kind, name FROM onefold.register
    WHERE expires_at <= (SELECT {now}) LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED)
RETURNING 1

-- part: found
-- The columns of a message's record, wherever it was found: `m` is the message, `d` its delivery, `o` its outcome.
{columns_of_m},
    coalesce(d.due_at, 0), coalesce(d.expires_at, 0), coalesce(d.fence, o.fence), coalesce(d.attempt, o.attempt),
    coalesce(d.crashes, o.crashes), coalesce(d.replay_count, o.replay_count), coalesce(d.state, o.state),
    d.worker, o.ended_at, o.kept_until, o.body_until

-- part: shown
-- A result whose window is over is not shown, though no purge may have removed it yet.
CASE WHEN o.kept_until > {now} THEN o.result END

-- part: run_if_asked
-- Headers are searched as bytes: within a text of theirs the quotes would be escaped, and damaged ones are no error.
(NOT %(runs)s::boolean OR pg_catalog.position(m.headers, '"pinned":true'::bytea) > 0)

-- part: asked
(%(queue)s::text IS NULL OR m.queue = %(queue)s)
    AND (%(message_type)s::text IS NULL OR m.message_type = %(message_type)s)
    AND {run_if_asked}

-- part: asked_of_all
{asked}
    AND (%(correlation_id)s::text IS NULL OR m.correlation_id = %(correlation_id)s)
    AND (%(worker)s::text IS NULL OR d.worker = %(worker)s)
    AND (%(crashes)s::int IS NULL OR d.crashes >= %(crashes)s)

-- part: is_alive_so
-- Of deliveries the planner knows how many have which state, and so that a page of them is best read in their order.
d.state = ANY (%(states)s::smallint[])

-- part: is_so
coalesce(d.state, o.state) = ANY (%(states)s::smallint[])

-- part: failure_shown
-- A message that was parked because of a failure shows it: it is the attempt with the fence it was parked under.
CASE d.state WHEN {parked} THEN
        (SELECT a.failure FROM onefold.attempt a WHERE a.message_id = d.id AND a.fence = d.fence - 1)
    ELSE o.failure END

-- part: anywhere
-- Looked up row by row: a merge join would begin with the first of all outcomes for every page.
SELECT {found}, {shown}, {failure_shown}
FROM onefold.message m
LEFT JOIN LATERAL (SELECT * FROM onefold.delivery WHERE delivery.id = m.id OFFSET 0) d ON true
LEFT JOIN LATERAL (SELECT * FROM onefold.outcome WHERE outcome.id = m.id OFFSET 0) o ON true

-- name: find_ids
-- Every `find` asks for everything that a query can; they differ in where they begin to look.
{anywhere}
WHERE m.id = ANY (%(ids)s::uuid[]) AND m.id > %(after)s::uuid AND {is_so} AND {asked_of_all}
ORDER BY m.id LIMIT %(limit)s

-- part: among_deliveries
SELECT {found}, o.result, o.failure
FROM d
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = d.id OFFSET 0) m
LEFT JOIN onefold.outcome o ON false
WHERE m.id > %(after)s::uuid AND {is_alive_so} AND {asked_of_all}
ORDER BY m.id LIMIT %(limit)s

-- name: find_leased
-- Begins with the leases, which are few.
WITH d AS MATERIALIZED (
    SELECT * FROM onefold.delivery WHERE state = {leased} AND lease_until > 0 AND (%(worker)s::text IS NULL OR worker = %(worker)s)
)
{among_deliveries}

-- name: find_crashed
-- Begins with the messages that workers died with, which are few.
WITH d AS MATERIALIZED (SELECT * FROM onefold.delivery WHERE crashes > 0 AND queue > '' AND crashes >= %(crashes)s::int)
{among_deliveries}

-- part: open
-- From what is open to its message: what is kept is not looked at.
SELECT {found}, o.result, {failure_shown}
FROM onefold.delivery d
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = d.id OFFSET 0) m
LEFT JOIN onefold.outcome o ON false
WHERE d.id > %(after)s::uuid AND {is_alive_so} AND {asked_of_all}

-- name: find_parked
{open} AND d.state = {parked}
ORDER BY d.id LIMIT %(limit)s

-- name: find_runs
{open} AND pg_catalog.strpos(d.message_type, '@') > 0
ORDER BY d.id LIMIT %(limit)s

-- name: find_open
{open}
ORDER BY d.id LIMIT %(limit)s

-- name: find_dead
SELECT {columns_of_m},
    0::bigint, 0::bigint, o.fence, o.attempt, o.crashes, o.replay_count,
    o.state, NULL::text, o.ended_at, o.kept_until, o.body_until, o.result, o.failure
FROM onefold.outcome o
JOIN onefold.message m ON m.id = o.id
WHERE o.state = {dead} AND o.id > %(after)s::uuid AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
    AND (%(message_type)s::text IS NULL OR m.message_type = %(message_type)s)
    AND (%(correlation_id)s::text IS NULL OR m.correlation_id = %(correlation_id)s) AND {run_if_asked}
ORDER BY o.id LIMIT %(limit)s

-- name: find_correlated
-- The first message of a chain has its own id as its correlation id, all others stand in the index.
WITH chain AS MATERIALIZED (
    SELECT id FROM onefold.message
    WHERE correlation_id = %(correlation_id)s::text AND correlation_id <> id::text AND id > %(after)s::uuid
    UNION ALL
    SELECT id FROM onefold.message
    WHERE id = %(root)s::uuid AND id > %(after)s::uuid AND correlation_id = %(correlation_id)s::text
)
SELECT {found}, {shown}, o.failure,
    coalesce((SELECT k.suppressed FROM onefold.key k
        WHERE k.scope = m.message_type AND k.key = m.idempotency_key AND k.kind = {key_idempotency}
            AND k.message_id = m.id), 0)
FROM chain
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = chain.id OFFSET 0) m
LEFT JOIN LATERAL (SELECT * FROM onefold.delivery WHERE delivery.id = chain.id OFFSET 0) d ON true
LEFT JOIN LATERAL (SELECT * FROM onefold.outcome WHERE outcome.id = chain.id OFFSET 0) o ON true
WHERE {is_so} AND {asked}
ORDER BY m.id LIMIT %(limit)s

-- name: find_any
{anywhere}
WHERE m.id > %(after)s::uuid AND {is_so} AND {asked_of_all}
ORDER BY m.id LIMIT %(limit)s

-- name: attempts
SELECT attempt, fence, at, worker, failure, delay FROM onefold.attempt WHERE message_id = %(id)s::uuid ORDER BY fence

-- name: count_alive
SELECT queue, state, pg_catalog.count(*) FROM onefold.delivery GROUP BY queue, state

-- name: count_dead
SELECT queue, pg_catalog.count(*), pg_catalog.min(ended_at) FROM onefold.outcome WHERE state = {dead} GROUP BY queue

-- name: restored_lock
-- No message moves from one table to the other while a page is changed, so each is met once.
LOCK TABLE onefold.delivery, onefold.outcome IN SHARE ROW EXCLUSIVE MODE

-- name: restored
WITH page AS MATERIALIZED (
    SELECT id FROM onefold.message WHERE id > %(after)s::uuid ORDER BY id LIMIT %(limit)s
),
leased AS MATERIALIZED (
    SELECT id FROM onefold.delivery WHERE id = ANY (ARRAY(SELECT id FROM page)) AND lease_until IS NOT NULL
),
alive AS (
    UPDATE onefold.delivery
    SET fence = fence + %(leap)s::bigint, state = CASE state WHEN {leased} THEN {scheduled} ELSE state END,
        lease_until = NULL, worker = NULL
    WHERE id = ANY (ARRAY(SELECT id FROM page))
),
ended AS (
    UPDATE onefold.outcome SET fence = fence + %(leap)s::bigint WHERE id = ANY (ARRAY(SELECT id FROM page))
)
SELECT (SELECT pg_catalog.count(*) FROM leased), (SELECT id::text FROM page ORDER BY id DESC LIMIT 1)

-- name: now
SELECT {now}

-- name: notify
SELECT pg_catalog.pg_notify('onefold', queue) FROM pg_catalog.unnest(%(queues)s::text[]) AS q (queue)

-- name: listen
LISTEN onefold

-- name: session_settings
SELECT pg_catalog.set_config(name, value, false) FROM unnest(%(names)s::text[], %(values)s::text[]) AS s (name, value)

-- name: local_settings
-- The same until the transaction ends.
SELECT pg_catalog.set_config(name, value, true) FROM unnest(%(names)s::text[], %(values)s::text[]) AS s (name, value)

-- name: server_encoding
SELECT pg_catalog.current_setting('server_encoding')

-- name: durability
SELECT pg_catalog.current_setting('fsync') = 'on' AND pg_catalog.current_setting('full_page_writes') = 'on'
    AND pg_catalog.current_setting('synchronous_commit') <> 'off',
    pg_catalog.current_setting('transaction_read_only') = 'on'

-- name: server_history
-- Which server this is, and on which timeline it writes: each promotion of a standby begins a new one.
SELECT (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),
    CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN
        pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 1, 8)
    END

-- name: schema_state
SELECT pg_catalog.to_regclass('onefold.migration') IS NOT NULL,
    EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'onefold')

-- name: schema_applied
SELECT number, checksum FROM onefold.migration

-- name: schema_lock
-- One machine migrates at a time; the others wait here and then find nothing left to do.
-- A lock on a table, and not an advisory one, which any role that may connect could hold.
LOCK TABLE onefold.migration IN SHARE ROW EXCLUSIVE MODE

-- name: schema_create
CREATE SCHEMA IF NOT EXISTS onefold

-- name: schema_table
CREATE TABLE IF NOT EXISTS onefold.migration (
    number integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL, applied_at bigint NOT NULL
)

-- name: schema_record
INSERT INTO onefold.migration (number, name, checksum, applied_at)
VALUES (%(number)s, %(name)s, %(checksum)s, {now})
