-- Journals: the steps of a message's owner, and the lines that others have recorded for it.
-- The names are those of the SQLite store; where one statement here does what several do there, its comment says so.

-- part: too_little
wake < (%(targets)s::bigint[]){of_this_id}

-- name: settle_park
-- Stands for settle_park and settle_attempt; returns the leases that were stale, and with the fence -1 the messages that
-- were not parked.  One statement compares `wake` and parks, so that no line is overlooked: a transaction that records
-- locks the row until it commits, and this statement reads the row again after waiting for it.  If enough has been
-- recorded meanwhile, the message is scheduled instead.  A run that parks has not crashed, so earlier crashes are
-- forgiven, and unless it waits because of a failure its attempts are too.
WITH {clock},
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(attempts)s::bigint[], %(delays)s::bigint[],
        %(failures)s::bytea[], %(workers)s::text[])
    AS g (id, fence, attempt, delay, failure, worker)
),
parked AS (
    UPDATE onefold.delivery
    SET state = CASE WHEN {too_little} THEN {parked} ELSE {scheduled} END,
        wake_target = CASE WHEN {too_little} THEN (%(targets)s::bigint[]){of_this_id} END,
        due_at = CASE WHEN {too_little}
            THEN least((SELECT now FROM clock) + (%(delays)s::bigint[]){of_this_id}, %(never)s::bigint)
            ELSE (SELECT now FROM clock) END,
        attempt = CASE WHEN (%(failures)s::bytea[]){of_this_id} IS NULL THEN 0 ELSE attempt END,
        fence = fence + 1, crashes = 0, expires_at = 0, lease_until = NULL, worker = NULL
    WHERE {has_given_fence}
    RETURNING id, fence - 1 AS fence, state
),
attempt AS (
    INSERT INTO onefold.attempt (message_id, fence, attempt, at, worker, failure, delay)
    SELECT id, fence, attempt, now, worker, failure, nullif(delay, %(never)s::bigint)::double precision / 1e6::double precision
    FROM given CROSS JOIN clock
    WHERE failure IS NOT NULL AND ((id, fence) IN (SELECT id, fence FROM parked)) IS TRUE
)
SELECT id::text, fence FROM given WHERE ((id, fence) IN (SELECT id, fence FROM parked)) IS NOT TRUE
UNION ALL
SELECT id::text, -1 FROM parked WHERE state = {scheduled}

-- name: record_by_owner
-- Stands for lease_fences and record_step: returns the new lines, and under the kind -1 the leases that were held.
-- The row is locked until the commit, so that the message is not taken over in between.
WITH {clock},
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(names)s::text[], %(kinds)s::bigint[],
        %(fingerprints)s::bytea[], %(values)s::bytea[])
    WITH ORDINALITY AS g (id, fence, name, kind, fingerprint, value, place)
),
held AS MATERIALIZED (
    SELECT id, fence FROM onefold.delivery
    WHERE {has_given_fence}
    ORDER BY id FOR NO KEY UPDATE
),
new AS (
    INSERT INTO onefold.step (message_id, name, kind, at, fingerprint, value)
    SELECT id, name, kind, (SELECT now FROM clock), fingerprint, value
    FROM given WHERE ((id, fence) IN (SELECT id, fence FROM held)) IS TRUE ORDER BY place
    ON CONFLICT DO NOTHING
    RETURNING message_id, name, kind, at, seq
)
SELECT message_id::text, name, kind::bigint, at, seq FROM new
UNION ALL
SELECT id::text, '', -1, fence, 0 FROM held

-- name: record_by_others
-- Stands for record_listens and record_step: returns the new lines, and under the kind -1 the messages that listen.
-- A message that is alive, or dead and so perhaps redriven, is locked until the commit: a transaction that parks or
-- redrives it waits, and then sees these lines.
WITH {clock},
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(names)s::text[], %(kinds)s::bigint[], %(fingerprints)s::bytea[],
        %(values)s::bytea[])
    WITH ORDINALITY AS g (id, name, kind, fingerprint, value, place)
),
alive AS MATERIALIZED (
    SELECT id FROM onefold.delivery WHERE id = ANY (%(ids)s::uuid[]) ORDER BY id FOR NO KEY UPDATE
),
dead AS MATERIALIZED (
    SELECT id FROM onefold.outcome WHERE id = ANY (%(ids)s::uuid[]) AND state = {dead} ORDER BY id FOR SHARE
),
listens AS MATERIALIZED (SELECT id FROM alive UNION ALL SELECT id FROM dead),
new AS (
    INSERT INTO onefold.step (message_id, name, kind, at, fingerprint, value)
    SELECT id, name, kind, (SELECT now FROM clock), fingerprint, value
    FROM given WHERE (id IN (SELECT id FROM listens)) IS TRUE ORDER BY place
    ON CONFLICT DO NOTHING
    RETURNING message_id, name, kind, at, seq
)
SELECT message_id::text, name, kind::bigint, at, seq FROM new
UNION ALL
SELECT id::text, '', -1, 0, 0 FROM listens

-- name: record_known
SELECT id::text FROM onefold.message WHERE id = ANY (%(ids)s::uuid[])

-- part: enough
wake + (%(counts)s::bigint[]){of_this_id} >= wake_target

-- name: record_wake
-- In a statement of its own, because it must see the row as it is once it is locked.
UPDATE onefold.delivery
SET wake = wake + (%(counts)s::bigint[]){of_this_id},
    state = CASE WHEN {enough} THEN {scheduled} ELSE state END,
    due_at = CASE WHEN {enough} THEN least(due_at, {now}) ELSE due_at END,
    wake_target = CASE WHEN {enough} THEN NULL ELSE wake_target END
WHERE id = ANY (%(ids)s::uuid[])
RETURNING id::text, queue, wake

-- name: record_by_hand
-- Stands for record_by_hand and record_dead: returns a row if the message may be written to, with its queue if it is
-- scheduled now.
WITH released AS (
    UPDATE onefold.delivery
    SET state = {scheduled}, fence = fence + 1, wake_target = NULL,
        due_at = CASE state WHEN {parked} THEN least(due_at, {now}) ELSE due_at END
    WHERE id = %(id)s::uuid AND lease_until IS NULL
    RETURNING queue
),
dead AS MATERIALIZED (
    SELECT id FROM onefold.outcome WHERE id = %(id)s::uuid AND state = {dead} FOR SHARE
)
SELECT queue FROM released
UNION ALL
SELECT NULL FROM dead

-- name: record_lines
-- record_step for a writer whose right to it has been checked.
WITH {clock}
INSERT INTO onefold.step (message_id, name, kind, at, fingerprint, value)
SELECT id, name, kind, (SELECT now FROM clock), fingerprint, value
FROM unnest(%(ids)s::uuid[], %(names)s::text[], %(kinds)s::bigint[], %(fingerprints)s::bytea[], %(values)s::bytea[])
    WITH ORDINALITY AS g (id, name, kind, fingerprint, value, place)
ORDER BY place
ON CONFLICT DO NOTHING
RETURNING message_id::text, name, kind::bigint, at, seq

-- name: record_part
INSERT INTO onefold.blob (message_id, name, part, data)
VALUES (%(id)s::uuid, %(name)s::text, %(part)s::int, %(data)s::bytea)

-- name: record_stands
SELECT message_id::text, name, kind::bigint, value, fingerprint, at, seq
FROM unnest(%(ids)s::uuid[], %(names)s::text[], %(kinds)s::bigint[]) AS g (id, of, kind_of)
CROSS JOIN LATERAL (
    SELECT * FROM onefold.step
    WHERE step.message_id = g.id AND step.name = g.of AND step.kind = g.kind_of OFFSET 0
) s

-- name: record_act
INSERT INTO onefold.act (at, message_id, kind, actor, reason)
VALUES ({now}, %(id)s::uuid, %(kind)s::text, %(actor)s::text, %(reason)s::text)

-- name: record_lock
-- After a lost answer: waits until the session that was asked has committed or has ended.
SELECT fence FROM onefold.delivery WHERE id = %(id)s::uuid FOR UPDATE

-- name: rewind
UPDATE onefold.delivery
SET state = {scheduled}, fence = fence + 1, due_at = {now}, lease_until = NULL,
    worker = NULL, wake_target = NULL
WHERE id = %(id)s::uuid
RETURNING queue

-- name: rewind_dead
SELECT 1 FROM onefold.outcome WHERE id = %(id)s::uuid AND state = {dead} FOR UPDATE

-- name: rewind_steps
DELETE FROM onefold.step WHERE message_id = %(id)s::uuid AND seq = ANY (%(seqs)s::bigint[])

-- name: rewind_parts
DELETE FROM onefold.blob WHERE message_id = %(id)s::uuid AND name = ANY (%(names)s::text[])

-- name: move_resume
-- Stands for move_resume and move_act.
WITH {clock},
resumed AS (
    UPDATE onefold.delivery
    SET state = {scheduled}, due_at = least(due_at, (SELECT now FROM clock)), wake_target = NULL, fence = fence + 1
    WHERE id = ANY (%(ids)s::uuid[]) AND state = {parked}
    RETURNING id, queue
),
act AS (
    INSERT INTO onefold.act (at, message_id, kind, actor, reason)
    SELECT now, id, 'resume', %(actor)s::text, %(reason)s::text FROM resumed CROSS JOIN clock
)
SELECT id::text, queue FROM resumed

-- name: move_reply
-- The headers of messages that an operator ended, which say where they would have replied.
SELECT m.id::text, m.headers, o.replay_count, o.failure
FROM onefold.outcome o
CROSS JOIN LATERAL (SELECT id, headers FROM onefold.message WHERE message.id = o.id OFFSET 0) m
WHERE o.id = ANY (%(ids)s::uuid[]) AND m.headers IS NOT NULL

-- name: steps
-- Several journals at once; one without lines has no rows.  Each is looked up by the index, however many there are.
SELECT s.message_id::text, s.name, s.kind::bigint, s.value, s.fingerprint, s.at, s.seq
FROM pg_catalog.unnest(%(ids)s::uuid[]) AS given (id)
CROSS JOIN LATERAL (SELECT * FROM onefold.step WHERE step.message_id = given.id ORDER BY step.seq OFFSET 0) s

-- name: claim_journals
-- Those of several messages, each by its place among them.
SELECT given.number - 1, s.name, s.kind::bigint, CASE WHEN pg_catalog.length(s.value) <= %(bytes)s::bigint THEN s.value END,
    s.fingerprint, s.at, s.seq
FROM pg_catalog.unnest(%(ids)s::uuid[]) WITH ORDINALITY AS given (id, number)
CROSS JOIN LATERAL (SELECT * FROM onefold.step WHERE step.message_id = given.id OFFSET 0) s
ORDER BY given.number, s.seq LIMIT %(lines)s::bigint

-- name: parts
SELECT name, data FROM onefold.blob WHERE message_id = %(id)s::uuid ORDER BY name, part
