-- Journals: what the owner of a message did step by step, and what others told it.
-- The names are those of the SQLite store; where one statement here does what several do there, its comment says so.

-- name: settle_park
-- Stands for settle_park and settle_attempt; those whose lease was stale are returned, and with the fence -1 those that
-- were not parked.  One statement looks how much others have recorded and parks, so that none of it is overlooked: who
-- records holds the row until it commits, and what this statement waited for it sees.  If enough has come meanwhile,
-- the message is scheduled instead.  It got this far without harm, so earlier crashes are forgiven, and unless it waits
-- because of a failure its attempts are too.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(attempts)s::bigint[], %(delays)s::bigint[],
        %(failures)s::bytea[], %(workers)s::text[])
    AS g (id, fence, attempt, delay, failure, worker)
),
parked AS (
    UPDATE onefold.delivery
    SET state = 0, fence = fence + 1, crashes = 0, expires_at = 0, lease_until = NULL, worker = NULL,
        attempt = CASE WHEN (%(failures)s::bytea[])[pg_catalog.array_position(%(ids)s::uuid[], id)] IS NULL THEN 0
            ELSE attempt END,
        due_at = CASE WHEN wake < (%(targets)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)]
            THEN least((SELECT now FROM clock) + (%(delays)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)],
                %(never)s::bigint)
            ELSE (SELECT now FROM clock) END,
        wake_target = CASE WHEN wake < (%(targets)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)]
            THEN (%(targets)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)] END
    WHERE id = ANY (%(ids)s::uuid[]) AND ((id, fence) IN (SELECT id, fence FROM given)) IS TRUE
    RETURNING id, fence - 1 AS fence, wake_target
),
attempt AS (
    INSERT INTO onefold.attempt (message_id, fence, attempt, at, worker, failure, delay)
    SELECT id, fence, attempt, now, worker, failure, nullif(delay, %(never)s::bigint)::double precision / 1e6::double precision
    FROM given CROSS JOIN clock
    WHERE failure IS NOT NULL AND ((id, fence) IN (SELECT id, fence FROM parked)) IS TRUE
)
SELECT id::text, fence FROM given WHERE ((id, fence) IN (SELECT id, fence FROM parked)) IS NOT TRUE
UNION ALL
SELECT id::text, -1 FROM parked WHERE wake_target IS NULL

-- name: record_by_owner
-- Stands for lease_fences and record_step: returns what is new, and under the kind -1 whose lease was held.
-- The row is held until the commit, so that nobody takes the message over in between.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(names)s::text[], %(kinds)s::bigint[],
        %(fingerprints)s::bytea[], %(values)s::bytea[])
    WITH ORDINALITY AS g (id, fence, name, kind, fingerprint, value, place)
),
held AS MATERIALIZED (
    SELECT id, fence FROM onefold.delivery
    WHERE id = ANY (%(ids)s::uuid[]) AND ((id, fence) IN (SELECT id, fence FROM given)) IS TRUE
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
-- Stands for record_listens and record_step: returns what is new, and under the kind -1 who listens.
-- A message that is alive, or dead and so perhaps redriven, is held until the commit: who wants to park or redrive it
-- waits, and then sees this.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(names)s::text[], %(kinds)s::bigint[], %(fingerprints)s::bytea[],
        %(values)s::bytea[])
    WITH ORDINALITY AS g (id, name, kind, fingerprint, value, place)
),
alive AS MATERIALIZED (
    SELECT id FROM onefold.delivery WHERE id = ANY (%(ids)s::uuid[]) ORDER BY id FOR NO KEY UPDATE
),
dead AS MATERIALIZED (
    SELECT id FROM onefold.outcome WHERE id = ANY (%(ids)s::uuid[]) AND state = 4 ORDER BY id FOR SHARE
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

-- name: record_wake
-- In a statement of its own, because it must see the row as it is now that it is held.
UPDATE onefold.delivery
SET wake = wake + (%(counts)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)],
    due_at = CASE WHEN wake + (%(counts)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)] >= wake_target
        THEN least(due_at, coalesce(%(now)s::bigint, onefold.clock())) ELSE due_at END,
    wake_target = CASE WHEN wake + (%(counts)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)] >= wake_target
        THEN NULL ELSE wake_target END
WHERE id = ANY (%(ids)s::uuid[])
RETURNING id::text, queue, wake

-- name: record_by_hand
-- Stands for record_by_hand and record_dead: who may be written to, and the queue of one that is scheduled now.
WITH released AS (
    UPDATE onefold.delivery
    SET fence = fence + 1, wake_target = NULL,
        due_at = CASE WHEN wake_target IS NULL THEN due_at
            ELSE least(due_at, coalesce(%(now)s::bigint, onefold.clock())) END
    WHERE id = %(id)s::uuid AND lease_until IS NULL
    RETURNING queue
),
dead AS MATERIALIZED (
    SELECT id FROM onefold.outcome WHERE id = %(id)s::uuid AND state = 4 FOR SHARE
)
SELECT queue FROM released
UNION ALL
SELECT NULL FROM dead

-- name: record_lines
-- record_step for whoever was found to have the right to it.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now)
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
VALUES (coalesce(%(now)s::bigint, onefold.clock()), %(id)s::uuid, %(kind)s::text, %(actor)s::text, %(reason)s::text)

-- name: record_lock
-- After a lost answer: waits until the session that was asked has committed or is gone.
SELECT fence FROM onefold.delivery WHERE id = %(id)s::uuid FOR UPDATE

-- name: rewind
UPDATE onefold.delivery
SET state = 0, fence = fence + 1, due_at = coalesce(%(now)s::bigint, onefold.clock()), lease_until = NULL,
    worker = NULL, wake_target = NULL
WHERE id = %(id)s::uuid
RETURNING queue

-- name: rewind_dead
SELECT 1 FROM onefold.outcome WHERE id = %(id)s::uuid AND state = 4 FOR UPDATE

-- name: rewind_steps
DELETE FROM onefold.step WHERE message_id = %(id)s::uuid AND seq = ANY (%(seqs)s::bigint[])

-- name: rewind_parts
DELETE FROM onefold.blob WHERE message_id = %(id)s::uuid AND name = ANY (%(names)s::text[])

-- name: move_resume
-- Stands for move_resume and move_act.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
resumed AS (
    UPDATE onefold.delivery
    SET due_at = least(due_at, (SELECT now FROM clock)), wake_target = NULL, fence = fence + 1
    WHERE id = ANY (%(ids)s::uuid[]) AND wake_target IS NOT NULL
    RETURNING id, queue
),
act AS (
    INSERT INTO onefold.act (at, message_id, kind, actor, reason)
    SELECT now, id, 'resume', %(actor)s::text, %(reason)s::text FROM resumed CROSS JOIN clock
)
SELECT id::text, queue FROM resumed

-- name: move_reply
-- To whom messages that a person ended would have replied.
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
