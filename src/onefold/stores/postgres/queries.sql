-- The statements of the PostgreSQL store, in the order of a message's life.
-- They also run on callers' connections, under their search path: functions are called as pg_catalog's, because one that
-- another role has made would be preferred if its types fit better, and operators have operands of the types that the
-- server's own are made for.  Only unnest of several arrays stands alone: it is grammar, and always the server's.
-- The names are those of the SQLite store; where one statement here does what several do there, its comment says so.
-- What belongs together is one statement of several parts, because a round trip costs more than a part.
-- `now` is null except in tests, which bring their own clock; a statement reads the time once.
-- A prepared statement keeps a plan made when the tables were empty, so nothing here leaves the planner a choice that
-- would be wrong for full ones: rows are named by "= ANY (array)" or looked up one by one in a subquery fenced off with
-- OFFSET 0, never joined to; and "IN (…) IS TRUE" is answered from a hash, where without "IS TRUE" it would be a join.

-- name: put
-- Stands for put_key, put_message and put_delivery, for messages with a key that is probably free.
-- Keys are written in their order, so that two senders of the same keys wait for each other in one direction.
-- Whoever won its key is new, so nothing can be in the way of its message; those who did not are returned.
-- When all of them won, which is the rule, nobody is looked up.
-- Where nobody waits at a gate, what is said about gates is left empty, and is null for everybody.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(types)s::text[], %(versions)s::bigint[], %(queues)s::text[],
        %(keys)s::text[], %(correlations)s::text[], %(causations)s::text[], %(subjects)s::text[],
        %(retentions)s::bigint[], %(payloads)s::bytea[], %(headers)s::bytea[], %(fingerprints)s::bytea[],
        %(delays)s::bigint[], %(dues)s::bigint[], %(claimed_as)s::text[], %(gates)s::text[],
        %(priorities)s::smallint[], %(ordered)s::boolean[], %(sequences)s::bigint[])
    AS g (id, message_type, schema_version, queue, idempotency_key, correlation_id, causation_id, subject, retention,
        payload, headers, fingerprint, delay, due_at, claimed_as, gate, priority, ordered, sequence)
),
won AS (
    INSERT INTO onefold.key (scope, key, kind, message_id, fingerprint, schema_version)
    SELECT message_type, idempotency_key, 0, id, fingerprint, schema_version FROM given
    ORDER BY message_type COLLATE "C", idempotency_key COLLATE "C"
    ON CONFLICT DO NOTHING
    RETURNING message_id
),
all_won AS MATERIALIZED (SELECT pg_catalog.count(*) = pg_catalog.cardinality(%(ids)s::uuid[]) AS yes FROM won),
message AS (
    INSERT INTO onefold.message (id, message_type, schema_version, queue, idempotency_key, correlation_id,
        causation_id, subject, created_at, retention, payload, headers)
    SELECT id, message_type, schema_version, queue, idempotency_key, correlation_id,
        causation_id, subject, (SELECT now FROM clock), retention, payload, headers
    FROM given WHERE (SELECT yes FROM all_won) OR (id IN (SELECT message_id FROM won)) IS TRUE
),
delivery AS (
    INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
        replay_count, priority, gate, place)
    SELECT id, queue, claimed_as, 0, due, CASE retention WHEN 0 THEN 0 ELSE due + retention END, 1, 0, 0, 0,
        coalesce(priority, 0), gate, CASE WHEN ordered THEN coalesce(sequence, pg_catalog.nextval('onefold.place')) END
    FROM (
        SELECT given.*, CASE due_at WHEN 0 THEN (SELECT now FROM clock) + delay ELSE due_at END AS due FROM given
    ) dated
    WHERE (SELECT yes FROM all_won) OR (id IN (SELECT message_id FROM won)) IS TRUE
)
SELECT id::text FROM given WHERE NOT (SELECT yes FROM all_won) AND (id IN (SELECT message_id FROM won)) IS NOT TRUE

-- name: put_alike
-- The same for messages with keys that differ in little else, as those of one task that are sent together: what they
-- have in common is said once, because every column costs the server a list that it fills, keeps and reads.
-- What is null is the message's own: correlation and causation its id, the subject its key.
WITH clock AS MATERIALIZED (
    SELECT now, CASE %(due)s::bigint WHEN 0 THEN now + %(delay)s::bigint ELSE %(due)s::bigint END AS due
    FROM (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now OFFSET 0) given
),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(keys)s::text[], %(subjects)s::text[], %(payloads)s::bytea[],
        %(fingerprints)s::bytea[])
    AS g (id, idempotency_key, subject, payload, fingerprint)
),
won AS (
    INSERT INTO onefold.key (scope, key, kind, message_id, fingerprint, schema_version)
    SELECT %(type)s::text, idempotency_key, 0, id, fingerprint, %(version)s::int FROM given
    ORDER BY idempotency_key COLLATE "C"
    ON CONFLICT DO NOTHING
    RETURNING message_id
),
all_won AS MATERIALIZED (SELECT pg_catalog.count(*) = pg_catalog.cardinality(%(ids)s::uuid[]) AS yes FROM won),
message AS (
    INSERT INTO onefold.message (id, message_type, schema_version, queue, idempotency_key, correlation_id,
        causation_id, subject, created_at, retention, payload, headers)
    SELECT id, %(type)s::text, %(version)s::int, %(queue)s::text, idempotency_key,
        coalesce(%(correlation)s::text, id::text), coalesce(%(causation)s::text, id::text),
        coalesce(subject, %(subject)s::text, idempotency_key), (SELECT now FROM clock), %(retention)s::bigint, payload,
        %(headers)s::bytea
    FROM given WHERE (SELECT yes FROM all_won) OR (id IN (SELECT message_id FROM won)) IS TRUE
),
delivery AS (
    INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
        replay_count)
    SELECT id, %(queue)s::text, %(claimed_as)s::text, 0, (SELECT due FROM clock),
        CASE %(retention)s::bigint WHEN 0 THEN 0 ELSE (SELECT due FROM clock) + %(retention)s::bigint END, 1, 0, 0, 0
    FROM given WHERE (SELECT yes FROM all_won) OR (id IN (SELECT message_id FROM won)) IS TRUE
)
SELECT id::text FROM given WHERE NOT (SELECT yes FROM all_won) AND (id IN (SELECT message_id FROM won)) IS NOT TRUE

-- name: put_hopeful
-- The same for keys that are all free, inside a savepoint: it fails if one is not, and what it wrote is undone.
-- To be ready for a key that is taken costs a sixth of the whole: every row is looked for before it is written, locked
-- while it is, and confirmed afterwards.
-- The main part is carried out first, so that little was written when it fails.
WITH clock AS MATERIALIZED (
    SELECT now, CASE %(due)s::bigint WHEN 0 THEN now + %(delay)s::bigint ELSE %(due)s::bigint END AS due
    FROM (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now OFFSET 0) given
),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(keys)s::text[], %(subjects)s::text[], %(payloads)s::bytea[],
        %(fingerprints)s::bytea[])
    AS g (id, idempotency_key, subject, payload, fingerprint)
),
message AS (
    INSERT INTO onefold.message (id, message_type, schema_version, queue, idempotency_key, correlation_id,
        causation_id, subject, created_at, retention, payload, headers)
    SELECT id, %(type)s::text, %(version)s::int, %(queue)s::text, idempotency_key,
        coalesce(%(correlation)s::text, id::text), coalesce(%(causation)s::text, id::text),
        coalesce(subject, %(subject)s::text, idempotency_key), (SELECT now FROM clock), %(retention)s::bigint, payload,
        %(headers)s::bytea
    FROM given
),
delivery AS (
    INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
        replay_count)
    SELECT id, %(queue)s::text, %(claimed_as)s::text, 0, (SELECT due FROM clock),
        CASE %(retention)s::bigint WHEN 0 THEN 0 ELSE (SELECT due FROM clock) + %(retention)s::bigint END, 1, 0, 0, 0
    FROM given
)
INSERT INTO onefold.key (scope, key, kind, message_id, fingerprint, schema_version)
SELECT %(type)s::text, idempotency_key, 0, id, fingerprint, %(version)s::int FROM given
ORDER BY idempotency_key COLLATE "C"

-- name: put_savepoint
SAVEPOINT onefold_put

-- name: put_release
RELEASE SAVEPOINT onefold_put

-- name: put_undo
ROLLBACK TO SAVEPOINT onefold_put

-- name: put_unkeyed
-- The same as put for messages without a key, or whose keys are taken already.
-- An id that is already there is a lost answer being asked for again: no delivery is made again.
-- No id may be given twice in one call; ON CONFLICT for deliveries too would cost a fifth of the whole.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(types)s::text[], %(versions)s::bigint[], %(queues)s::text[],
        %(keys)s::text[], %(correlations)s::text[], %(causations)s::text[], %(subjects)s::text[],
        %(retentions)s::bigint[], %(payloads)s::bytea[], %(headers)s::bytea[], %(delays)s::bigint[],
        %(dues)s::bigint[], %(claimed_as)s::text[], %(gates)s::text[], %(priorities)s::smallint[],
        %(ordered)s::boolean[], %(sequences)s::bigint[])
    AS g (id, message_type, schema_version, queue, idempotency_key, correlation_id, causation_id, subject, retention,
        payload, headers, delay, due_at, claimed_as, gate, priority, ordered, sequence)
),
stored AS (
    INSERT INTO onefold.message (id, message_type, schema_version, queue, idempotency_key, correlation_id,
        causation_id, subject, created_at, retention, payload, headers)
    SELECT id, message_type, schema_version, queue, idempotency_key, correlation_id,
        causation_id, subject, (SELECT now FROM clock), retention, payload, headers
    FROM given
    ON CONFLICT (id) DO NOTHING
    RETURNING id
)
INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
    replay_count, priority, gate, place)
SELECT id, queue, claimed_as, 0, due, CASE retention WHEN 0 THEN 0 ELSE due + retention END, 1, 0, 0, 0,
    coalesce(priority, 0), gate, CASE WHEN ordered THEN coalesce(sequence, pg_catalog.nextval('onefold.place')) END
FROM (
    SELECT given.*, CASE due_at WHEN 0 THEN (SELECT now FROM clock) + delay ELSE due_at END AS due FROM given
) dated
WHERE (id IN (SELECT id FROM stored)) IS TRUE

-- name: put_plain
-- The same for a single message as most are, with a key and due at once: there is little for the server to set up.
WITH won AS (
    INSERT INTO onefold.key (scope, key, kind, message_id, fingerprint, schema_version)
    VALUES (%(type)s::text, %(key)s::text, 0, %(id)s::uuid, %(fingerprint)s::bytea, %(version)s::int)
    ON CONFLICT DO NOTHING
    RETURNING message_id
),
stored AS (
    INSERT INTO onefold.message (id, message_type, schema_version, queue, idempotency_key, correlation_id,
        causation_id, subject, created_at, retention, payload, headers)
    SELECT message_id, %(type)s::text, %(version)s::int, %(queue)s::text, %(key)s::text, %(correlation)s::text,
        %(causation)s::text, %(subject)s::text, coalesce(%(now)s::bigint, onefold.clock()), %(retention)s::bigint,
        %(payload)s::bytea, %(headers)s::bytea
    FROM won
    ON CONFLICT (id) DO NOTHING
    RETURNING id, created_at
)
INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes, replay_count)
SELECT id, %(queue)s::text, %(type)s::text, 0, created_at,
    CASE %(retention)s::bigint WHEN 0 THEN 0 ELSE created_at + %(retention)s::bigint END, 1, 0, 0, 0
FROM stored
RETURNING 1

-- name: put_one
-- The same for any single message: without arrays to unpack and hashes to build.
WITH won AS (
    INSERT INTO onefold.key (scope, key, kind, message_id, fingerprint, schema_version)
    SELECT %(type)s::text, %(key)s::text, 0, %(id)s::uuid, %(fingerprint)s::bytea, %(version)s::int
    WHERE %(keyed)s::boolean
    ON CONFLICT DO NOTHING
    RETURNING 1
),
stored AS (
    INSERT INTO onefold.message (id, message_type, schema_version, queue, idempotency_key, correlation_id,
        causation_id, subject, created_at, retention, payload, headers)
    SELECT %(id)s::uuid, %(type)s::text, %(version)s::int, %(queue)s::text, %(key)s::text, %(correlation)s::text,
        %(causation)s::text, %(subject)s::text, coalesce(%(now)s::bigint, onefold.clock()), %(retention)s::bigint,
        %(payload)s::bytea, %(headers)s::bytea
    WHERE NOT %(keyed)s::boolean OR EXISTS (SELECT FROM won)
    ON CONFLICT (id) DO NOTHING
    RETURNING id, queue, retention,
        CASE %(due)s::bigint WHEN 0 THEN created_at + %(delay)s::bigint ELSE %(due)s::bigint END AS due_at
)
INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes, replay_count,
    priority, gate, place)
SELECT id, queue, %(claimed_as)s::text, 0, due_at, CASE retention WHEN 0 THEN 0 ELSE due_at + retention END, 1, 0, 0, 0,
    %(priority)s::smallint, %(gate)s::text,
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
-- Waits for whoever holds a key in an open transaction.  What the holder is must be read by the next statement:
-- this one still sees the messages as they were before it waited.
SELECT pg_catalog.count(*)
FROM unnest(%(scopes)s::text[], %(keys)s::text[], %(kinds)s::smallint[]) AS g (scope, key, kind)
CROSS JOIN LATERAL (
    SELECT k.kind FROM onefold.key k WHERE k.scope = g.scope AND k.key = g.key AND k.kind = g.kind FOR UPDATE
) held

-- name: key_holder
SELECT coalesce(%(now)s::bigint, onefold.clock()), k.message_id::text, k.fingerprint, k.schema_version, k.expires_at,
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state), o.kept_until
FROM unnest(%(scopes)s::text[], %(keys)s::text[], %(kinds)s::smallint[])
    WITH ORDINALITY AS g (scope, key, kind, place)
LEFT JOIN LATERAL (
    SELECT * FROM onefold.key WHERE key.scope = g.scope AND key.key = g.key AND key.kind = g.kind OFFSET 0
) k ON true
LEFT JOIN LATERAL (SELECT state, wake_target FROM onefold.delivery WHERE id = k.message_id OFFSET 0) d ON true
LEFT JOIN LATERAL (SELECT state, kept_until FROM onefold.outcome WHERE id = k.message_id OFFSET 0) o ON true
ORDER BY g.place

-- name: take_key
-- Only from the holder that was judged: of two messages that take the same key, one finds it changed.
UPDATE onefold.key
SET message_id = %(id)s::uuid, fingerprint = %(fingerprint)s::bytea, schema_version = %(version)s::int,
    expires_at = %(expires_at)s::bigint, suppressed = 0
WHERE scope = %(scope)s::text AND key = %(key)s::text AND kind = %(kind)s::smallint
    AND message_id = %(holder)s::uuid
RETURNING message_id::text, kind

-- name: drop_key
-- A message needs all of its keys; what it won is given back when another was lost.
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

-- name: claim_expired
-- When claim says that leases have run out: their worker died or is too slow.
-- The fence rises when somebody claims the message again.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
released AS (
    UPDATE onefold.delivery SET state = 0, crashes = crashes + started, lease_until = NULL, worker = NULL
    WHERE id = ANY (ARRAY(
        SELECT id FROM onefold.delivery
        WHERE state = 1 AND lease_until >= %(floor)s::bigint AND lease_until <= (SELECT now FROM clock)
        ORDER BY lease_until LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT pg_catalog.count(*) FROM released

-- name: claim
-- Stands for claim_possible, claim_select and claim_take.
-- Who is not yet suspected counts as started, because nobody will say when it is; a suspect is marked when it begins.
-- The few that workers died with are passed over when `crashes_most` is 0.
-- The message is looked up row by row on purpose: a join could be planned as a walk through all messages ever sent.
-- The rows come in no order, because sorting them here would copy them once more.
-- One more, without an id, says what time it is, whether leases have run out from a floor on, whether there may be
-- somebody in lines and at other gates, and whether anybody has a priority: then claim_ranked claims, and not this.
-- Otherwise an idle worker would need a statement for each.
-- Where leases have run out nothing is taken: they are released first, so that who has been due for longest comes first.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
run_out AS MATERIALIZED (
    SELECT %(lease_floor)s::bigint IS NOT NULL AND EXISTS (
        SELECT FROM onefold.delivery
        WHERE state = 1 AND lease_until >= %(lease_floor)s::bigint AND lease_until <= (SELECT now FROM clock)) AS found
),
ranked AS MATERIALIZED (
    SELECT EXISTS (
        SELECT FROM onefold.delivery
        WHERE queue = ANY (%(queues)s::text[]) AND state = 0 AND gate IS NULL AND priority > 0) AS found
),
picked AS MATERIALIZED (
    SELECT due.id
    FROM unnest(%(queues)s::text[], %(floors)s::bigint[]) AS q (queue, floor)
    CROSS JOIN LATERAL (
        SELECT id FROM onefold.delivery
        WHERE NOT (SELECT found FROM ranked) AND queue = q.queue AND state = 0 AND gate IS NULL AND priority = 0
            AND due_at >= q.floor AND due_at <= (SELECT now FROM clock)
            AND message_type = ANY (%(types)s::text[]) AND crashes <= %(crashes_most)s
        ORDER BY due_at LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) due
    WHERE NOT (SELECT found FROM run_out)
    LIMIT %(limit)s
),
taken AS (
    UPDATE onefold.delivery
    SET state = 1, fence = fence + 1, lease_until = (SELECT now FROM clock) + %(lease)s::bigint,
        worker = %(worker)s::text, started = CASE WHEN crashes < %(suspect_after)s THEN 1 ELSE 0 END, wake_target = NULL,
        call = %(call)s::bigint
    WHERE id = ANY (ARRAY(SELECT id FROM picked))
    RETURNING id, queue, due_at, expires_at, fence, attempt, crashes, replay_count, wake
)
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    t.due_at, t.expires_at, t.fence - 1, t.attempt, t.crashes, t.replay_count, t.wake, (SELECT now FROM clock)
FROM taken t
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = t.id OFFSET 0) m
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    CASE WHEN (SELECT found FROM run_out) THEN 1 ELSE 0 END,
    CASE WHEN EXISTS (SELECT FROM onefold.delivery WHERE place IS NOT NULL) THEN 1 ELSE 0 END,
    CASE WHEN EXISTS (
        SELECT FROM onefold.delivery
        WHERE queue = ANY (%(queues)s::text[]) AND state = 0 AND gate IS NOT NULL AND place IS NULL)
    THEN 1 ELSE 0 END,
    CASE WHEN found THEN 1 ELSE 0 END, NULL, NULL, NULL, now
FROM clock CROSS JOIN ranked

-- name: claim_ranked
-- claim, when somebody has a priority: the first of each level, and of those whoever has waited longest when a step of
-- priority counts as much as waiting for it.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
run_out AS MATERIALIZED (
    SELECT %(lease_floor)s::bigint IS NOT NULL AND EXISTS (
        SELECT FROM onefold.delivery
        WHERE state = 1 AND lease_until >= %(lease_floor)s::bigint AND lease_until <= (SELECT now FROM clock)) AS found
),
ranked AS MATERIALIZED (
    SELECT EXISTS (
        SELECT FROM onefold.delivery
        WHERE queue = ANY (%(queues)s::text[]) AND state = 0 AND gate IS NULL AND priority > 0) AS found
),
picked AS MATERIALIZED (
    SELECT due.id
    FROM unnest(%(queues)s::text[], %(floors)s::bigint[]) AS q (queue, floor)
    CROSS JOIN LATERAL (
        SELECT id FROM (
            SELECT id, due_at AS rank FROM (
                SELECT id, due_at FROM onefold.delivery
                WHERE queue = q.queue AND state = 0 AND gate IS NULL AND priority = 0
                    AND due_at >= q.floor AND due_at <= (SELECT now FROM clock)
                    AND message_type = ANY (%(types)s::text[]) AND crashes <= %(crashes_most)s
                ORDER BY due_at LIMIT %(limit)s
                FOR UPDATE SKIP LOCKED
            ) without
            UNION ALL
            SELECT id, due_at - level * %(step)s::bigint FROM pg_catalog.generate_series(1, %(top)s::int) AS level
            CROSS JOIN LATERAL (
                SELECT id, due_at FROM onefold.delivery
                WHERE queue = q.queue AND state = 0 AND gate IS NULL AND priority = level AND priority > 0
                    AND due_at <= (SELECT now FROM clock)
                    AND message_type = ANY (%(types)s::text[]) AND crashes <= %(crashes_most)s
                ORDER BY due_at LIMIT %(limit)s
                FOR UPDATE SKIP LOCKED
            ) on_level
        ) waiting
        ORDER BY rank LIMIT %(limit)s
    ) due
    WHERE NOT (SELECT found FROM run_out)
    LIMIT %(limit)s
),
taken AS (
    UPDATE onefold.delivery
    SET state = 1, fence = fence + 1, lease_until = (SELECT now FROM clock) + %(lease)s::bigint,
        worker = %(worker)s::text, started = CASE WHEN crashes < %(suspect_after)s THEN 1 ELSE 0 END, wake_target = NULL,
        call = %(call)s::bigint
    WHERE id = ANY (ARRAY(SELECT id FROM picked))
    RETURNING id, queue, due_at, expires_at, fence, attempt, crashes, replay_count, wake
)
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    t.due_at, t.expires_at, t.fence - 1, t.attempt, t.crashes, t.replay_count, t.wake, (SELECT now FROM clock)
FROM taken t
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = t.id OFFSET 0) m
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    CASE WHEN (SELECT found FROM run_out) THEN 1 ELSE 0 END,
    CASE WHEN EXISTS (SELECT FROM onefold.delivery WHERE place IS NOT NULL) THEN 1 ELSE 0 END,
    CASE WHEN EXISTS (
        SELECT FROM onefold.delivery
        WHERE queue = ANY (%(queues)s::text[]) AND state = 0 AND gate IS NOT NULL AND place IS NULL)
    THEN 1 ELSE 0 END,
    CASE WHEN found THEN 1 ELSE 0 END, NULL, NULL, NULL, now
FROM clock CROSS JOIN ranked

-- name: claim_crashed
-- claim for those that workers died with, which are few and have an index of their own.
-- Free is what has no lease_until; asking for the state would draw in the index on everything that is due.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
run_out AS MATERIALIZED (
    SELECT %(lease_floor)s::bigint IS NOT NULL AND EXISTS (
        SELECT FROM onefold.delivery
        WHERE state = 1 AND lease_until >= %(lease_floor)s::bigint AND lease_until <= (SELECT now FROM clock)) AS found
),
picked AS MATERIALIZED (
    SELECT due.id
    FROM pg_catalog.unnest(%(queues)s::text[]) AS q (queue)
    CROSS JOIN LATERAL (
        SELECT id FROM onefold.delivery
        WHERE queue = q.queue AND crashes > 0 AND lease_until IS NULL AND gate IS NULL AND due_at <= (SELECT now FROM clock)
            AND message_type = ANY (%(types)s::text[])
        ORDER BY due_at LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) due
    WHERE NOT (SELECT found FROM run_out)
    LIMIT %(limit)s
),
taken AS (
    UPDATE onefold.delivery
    SET state = 1, fence = fence + 1, lease_until = (SELECT now FROM clock) + %(lease)s::bigint,
        worker = %(worker)s::text, started = 1, wake_target = NULL, call = %(call)s::bigint
    WHERE id = ANY (ARRAY(SELECT id FROM picked))
    RETURNING id, queue, due_at, expires_at, fence, attempt, crashes, replay_count, wake
)
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    t.due_at, t.expires_at, t.fence - 1, t.attempt, t.crashes, t.replay_count, t.wake, (SELECT now FROM clock)
FROM taken t
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = t.id OFFSET 0) m
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    CASE WHEN (SELECT found FROM run_out) THEN 1 ELSE 0 END,
    CASE WHEN EXISTS (SELECT FROM onefold.delivery WHERE place IS NOT NULL) THEN 1 ELSE 0 END,
    CASE WHEN EXISTS (
        SELECT FROM onefold.delivery
        WHERE queue = ANY (%(queues)s::text[]) AND state = 0 AND gate IS NOT NULL AND place IS NULL)
    THEN 1 ELSE 0 END,
    CASE WHEN EXISTS (
        SELECT FROM onefold.delivery
        WHERE queue = ANY (%(queues)s::text[]) AND state = 0 AND gate IS NULL AND priority > 0)
    THEN 1 ELSE 0 END, NULL, NULL, NULL, now
FROM clock

-- name: claim_again
-- After a lost answer: what that call of claim has taken, if it did.
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    d.due_at, d.expires_at, d.fence - 1, d.attempt, d.crashes, d.replay_count, d.wake,
    d.lease_until - %(lease)s::bigint, d.gate
FROM onefold.delivery d
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = d.id OFFSET 0) m
WHERE d.state = 1 AND d.lease_until > 0 AND d.call = %(call)s::bigint

-- name: claim_candidates
-- Everything that may be due, of each line only the head: among these is the row on which a claim has failed.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now)
SELECT id::text, fence, due_at FROM onefold.delivery d
WHERE queue = ANY (%(queues)s::text[]) AND state = 0 AND due_at <= (SELECT now FROM clock)
    AND message_type = ANY (%(types)s::text[])
    AND (due_at, id) > (%(after_due)s::bigint, %(after)s::uuid)
    AND (place IS NULL OR NOT EXISTS (
        SELECT FROM onefold.delivery before
        WHERE before.gate = d.gate AND before.place IS NOT NULL AND (before.place < d.place OR before.state = 1)))
ORDER BY due_at, id LIMIT %(portion)s::bigint

-- name: claim_set_aside
-- A message that cannot be claimed becomes a dead letter, so that it is not in the way of the others.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
aside AS (
    DELETE FROM onefold.delivery WHERE id = %(id)s::uuid AND fence = %(fence)s::bigint AND state = 0
    RETURNING id, queue, fence, attempt, crashes, replay_count, gate, place
),
passed AS (
    INSERT INTO onefold.gate AS g (gate, last, expires_at)
    SELECT gate, place, now + %(line_retention)s::bigint FROM aside CROSS JOIN clock WHERE place >= 0
    ON CONFLICT (gate) DO UPDATE
    SET last = greatest(g.last, excluded.last), expires_at = greatest(g.expires_at, excluded.expires_at)
)
INSERT INTO onefold.outcome (id, queue, state, fence, attempt, crashes, replay_count, ended_at, kept_until, body_until,
    failure)
SELECT id, queue, 4, fence, attempt, crashes, replay_count, now, now + %(key_window)s::bigint,
    now + least(%(key_window)s::bigint, %(body_window)s::bigint), %(failure)s::bytea
FROM aside CROSS JOIN clock
RETURNING 1

-- name: extend
-- A row is leased exactly while it has a lease_until; asking for the state would draw in the index on leases.
WITH given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[]) AS g (id, fence)
),
kept AS (
    UPDATE onefold.delivery
    SET lease_until = coalesce(%(now)s::bigint, onefold.clock()) + %(lease)s::bigint,
        started = greatest(started, %(starting)s::smallint)
    WHERE id = ANY (%(ids)s::uuid[]) AND lease_until IS NOT NULL
        AND ((id, fence) IN (SELECT id, fence FROM given)) IS TRUE
    RETURNING id, fence
)
SELECT id::text, fence FROM given WHERE ((id, fence) IN (SELECT id, fence FROM kept)) IS NOT TRUE

-- name: report
-- Stands for report_owners and report; returns who is still the owner.
-- Whose word counts: who holds the message, or ended its claim when nobody has claimed it since.
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
    FROM given g CROSS JOIN (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now) clock
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
SELECT m.id::text, m.message_type, p.fence, d.state IS NOT DISTINCT FROM 1, p.percent, p.message, p.at, p.beat_at
FROM onefold.progress p
JOIN onefold.message m ON m.id = p.message_id
LEFT JOIN onefold.delivery d ON d.id = p.message_id
WHERE p.message_id = ANY (%(ids)s::uuid[]) AND (d.state IS DISTINCT FROM 1 OR d.fence = p.fence)

-- name: settle_done
-- Stands for settle_end and settle_outcome, for messages that succeeded; those whose lease was stale are returned.
-- When all of them held theirs, which is the rule, nobody is looked up.
-- No lease may be given twice in one call.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(queues)s::text[], %(attempts)s::bigint[],
        %(crashes)s::bigint[], %(replay_counts)s::bigint[], %(key_windows)s::bigint[], %(body_windows)s::bigint[],
        %(results)s::bytea[])
    AS g (id, fence, queue, attempt, crashes, replay_count, key_window, body_window, result)
),
ended AS (
    DELETE FROM onefold.delivery
    WHERE id = ANY (%(ids)s::uuid[]) AND ((id, fence) IN (SELECT id, fence FROM given)) IS TRUE
    RETURNING id, fence
),
all_held AS MATERIALIZED (SELECT pg_catalog.count(*) = pg_catalog.cardinality(%(ids)s::uuid[]) AS yes FROM ended),
outcome AS (
    INSERT INTO onefold.outcome (id, queue, state, fence, attempt, crashes, replay_count, ended_at, kept_until,
        body_until, result)
    SELECT id, queue, 3, fence, attempt - 1, crashes, replay_count, now, now + key_window,
        now + least(key_window, body_window), result
    FROM given CROSS JOIN clock
    WHERE (SELECT yes FROM all_held) OR ((id, fence) IN (SELECT id, fence FROM ended)) IS TRUE
)
SELECT id::text, fence FROM given
WHERE NOT (SELECT yes FROM all_held) AND ((id, fence) IN (SELECT id, fence FROM ended)) IS NOT TRUE

-- name: settle_dead
-- The same for messages that failed for good, with settle_attempt.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(queues)s::text[], %(attempts)s::bigint[],
        %(crashes)s::bigint[], %(replay_counts)s::bigint[], %(key_windows)s::bigint[], %(body_windows)s::bigint[],
        %(failures)s::bytea[], %(failed_runs)s::bigint[], %(workers)s::text[])
    AS g (id, fence, queue, attempt, crashes, replay_count, key_window, body_window, failure, failed_runs, worker)
),
ended AS (
    DELETE FROM onefold.delivery
    WHERE id = ANY (%(ids)s::uuid[]) AND ((id, fence) IN (SELECT id, fence FROM given)) IS TRUE
    RETURNING id, fence
),
outcome AS (
    INSERT INTO onefold.outcome (id, queue, state, fence, attempt, crashes, replay_count, ended_at, kept_until,
        body_until, failure)
    SELECT id, queue, 4, fence, attempt - 1 + failed_runs, crashes, replay_count, now, now + key_window,
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
    RETURNING id, queue, fence, attempt, crashes, replay_count, coalesce(%(now)s::bigint, onefold.clock()) AS now
),
outcome AS (
    INSERT INTO onefold.outcome (id, queue, state, fence, attempt, crashes, replay_count, ended_at, kept_until,
        body_until, result)
    SELECT id, queue, 3, fence, attempt, crashes, replay_count, now, now + %(key_window)s::bigint,
        now + least(%(key_window)s::bigint, %(body_window)s::bigint), %(result)s::bytea
    FROM ended
)
SELECT CASE WHEN pg_catalog.count(*) = 1 THEN true WHEN %(strictly)s::boolean THEN onefold.refuse_stale() ELSE false END FROM ended

-- name: settle_again
-- Stands for settle_again and settle_attempt.
-- The fence rises here too, so that an answer lost on the way cannot be settled a second time.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[], %(attempts)s::bigint[], %(delays)s::bigint[],
        %(failures)s::bytea[], %(workers)s::text[])
    AS g (id, fence, attempt, delay, failure, worker)
),
again AS (
    UPDATE onefold.delivery
    SET state = 0, fence = fence + 1, lease_until = NULL, worker = NULL,
        attempt = (%(counted)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)],
        crashes = crashes + (%(crashed)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)],
        due_at = (SELECT now FROM clock) + (%(delays)s::bigint[])[pg_catalog.array_position(%(ids)s::uuid[], id)]
    WHERE id = ANY (%(ids)s::uuid[]) AND ((id, fence) IN (SELECT id, fence FROM given)) IS TRUE
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
    SET state = 0, fence = fence + 1, lease_until = NULL, worker = NULL,
        gate = coalesce((%(gates)s::text[])[pg_catalog.array_position(%(ids)s::uuid[], id)], gate),
        place = CASE WHEN (%(gates)s::text[])[pg_catalog.array_position(%(ids)s::uuid[], id)] IS NULL THEN place
            WHEN (%(ordered)s::boolean[])[pg_catalog.array_position(%(ids)s::uuid[], id)] THEN pg_catalog.nextval('onefold.place') END
    WHERE id = ANY (%(ids)s::uuid[]) AND ((id, fence) IN (SELECT id, fence FROM given)) IS TRUE
    RETURNING id, fence - 1 AS fence
)
SELECT id::text, fence FROM given WHERE ((id, fence) IN (SELECT id, fence FROM back)) IS NOT TRUE

-- name: settle_planned
-- Comes before settle_one in a handler's transaction, of which it is the last: prepared while the table was small, it
-- would read all of it for ever after.
SET LOCAL enable_seqscan = off

-- name: settle_lock
-- After a lost answer: waits until the session that was asked has committed or is gone.
SELECT id::text, fence, state FROM onefold.delivery WHERE id = ANY (%(ids)s::uuid[])
ORDER BY id FOR UPDATE

-- name: settle_found
-- After settle_lock: what each fence has left behind.
SELECT id::text, fence FROM onefold.outcome WHERE id = ANY (%(ids)s::uuid[])
UNION ALL
SELECT message_id::text, fence FROM onefold.attempt WHERE message_id = ANY (%(ids)s::uuid[])

-- name: lock
-- In the order of ids, so that two who lock the same messages do not wait for each other.
WITH alive AS MATERIALIZED (
    SELECT id, CASE WHEN wake_target IS NULL THEN state ELSE 2 END AS state
    FROM onefold.delivery WHERE id = ANY (%(ids)s::uuid[]) ORDER BY id FOR UPDATE
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
-- When its time is over it is too late, though a purge may not have come by yet; with its key's window over, its key may
-- already be another message's.
-- In its line it stands where its number says, or else behind all others.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
-- No purge removes a body until this is committed; and one that was under way has, so that a body it removed meanwhile
-- is seen to be gone, which only a lock looks at again.
unpurged AS MATERIALIZED (SELECT FROM onefold.purge FOR KEY SHARE),
body AS MATERIALIZED (
    SELECT * FROM onefold.message
    WHERE id = ANY (%(ids)s::uuid[]) AND payload IS NOT NULL AND EXISTS (SELECT FROM unpurged)
    FOR UPDATE
),
reopened AS (
    DELETE FROM onefold.outcome o USING body m
    WHERE o.id = ANY (%(ids)s::uuid[]) AND o.state = 4 AND o.body_until > (SELECT now FROM clock) AND m.id = o.id
    RETURNING o.id, o.queue, m.retention, o.fence, o.replay_count, m.message_type, m.schema_version,
        pg_catalog.convert_from(m.headers, 'UTF8')::json AS headers
),
delivered AS (
    INSERT INTO onefold.delivery (id, queue, message_type, state, due_at, expires_at, fence, attempt, crashes,
        replay_count, priority, gate, place)
    SELECT id, queue, message_type || CASE WHEN (headers ->> 'pinned')::boolean THEN '@' || schema_version::text ELSE '' END,
        0, now, CASE retention WHEN 0 THEN 0 ELSE now + retention END, fence + 1, 0, 0, replay_count + 1,
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
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
discarded AS (
    UPDATE onefold.outcome
    SET state = 6, fence = fence + 1, kept_until = (SELECT now FROM clock), body_until = (SELECT now FROM clock)
    WHERE id = ANY (%(ids)s::uuid[]) AND state = 4
    RETURNING id, queue
),
act AS (
    INSERT INTO onefold.act (at, message_id, kind, actor, reason)
    SELECT now, id, 'discard', %(actor)s::text, %(reason)s::text FROM discarded CROSS JOIN clock
)
SELECT id::text, queue FROM discarded

-- name: move_cancel
-- Stands for move_cancel, move_cancelled and move_act.
-- A message that nobody ever claimed leaves its key free at once; one that may have run keeps it.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
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
    SELECT id, queue, 5, fence + 1, attempt, crashes, replay_count, now,
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
WHERE r.expires_at <= coalesce(%(now)s::bigint, onefold.clock())
RETURNING version

-- name: register_update
UPDATE onefold.register SET value = %(value)s::bytea, version = version + 1, expires_at = %(expires_at)s::bigint
WHERE kind = %(kind)s::text AND name = %(name)s::text AND version = %(version)s::bigint
    AND (expires_at IS NULL OR expires_at > coalesce(%(now)s::bigint, onefold.clock()))
RETURNING version

-- name: register_delete
DELETE FROM onefold.register
WHERE kind = %(kind)s::text AND name = %(name)s::text AND version = %(version)s::bigint
RETURNING version

-- name: registered
SELECT value, version FROM onefold.register
WHERE kind = %(kind)s::text AND name = %(name)s::text
    AND (expires_at IS NULL OR expires_at > coalesce(%(now)s::bigint, onefold.clock()))

-- name: entries
SELECT name, value, version FROM onefold.register
WHERE kind = %(kind)s::text AND (expires_at IS NULL OR expires_at > coalesce(%(now)s::bigint, onefold.clock()))
ORDER BY name

-- name: purge_messages
-- Stands for purge_gone, purge_message_key, purge_attempts, purge_progress, purge_steps, purge_parts, purge_messages and
-- purge_outcomes.  Of several purgers one holds the row of `purge`, which is cheaper than to lock every message, and
-- says so; the others find nothing to do.
WITH mark AS MATERIALIZED (SELECT FROM onefold.purge FOR UPDATE SKIP LOCKED),
old AS MATERIALIZED (
    SELECT id FROM onefold.outcome
    WHERE kept_until <= (SELECT coalesce(%(now)s::bigint, onefold.clock())) AND EXISTS (SELECT FROM mark)
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
    WHERE k.scope = m.message_type AND k.key = m.idempotency_key AND k.kind = 0 AND k.message_id = m.id
)
SELECT pg_catalog.count(*), EXISTS (SELECT FROM mark) FROM old

-- name: purge_bodies
-- Stands for purge_range, purge_bodies and purge_bodies_done, for the purger that holds the row of `purge`.
-- Bodies of one moment go together.  After the clock was set back it begins anew from there: what ends then has an
-- earlier time than what was purged before.
WITH mark AS MATERIALIZED (
    SELECT least(bodies, now) AS since, now
    FROM onefold.purge CROSS JOIN (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now) clock
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
DELETE FROM onefold.key WHERE (scope, key, kind) IN (
    SELECT scope, key, kind FROM onefold.key
    WHERE expires_at <= (SELECT coalesce(%(now)s::bigint, onefold.clock())) LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED)
RETURNING 1

-- name: purge_acts
-- The oldest come first, so that only so many are ever looked at.
DELETE FROM onefold.act WHERE seq IN (
    SELECT seq FROM (SELECT seq, at FROM onefold.act ORDER BY seq LIMIT %(limit)s FOR UPDATE SKIP LOCKED) AS oldest
    WHERE at <= (SELECT coalesce(%(now)s::bigint, onefold.clock())) - %(kept)s::bigint)
RETURNING 1

-- name: purge_register
DELETE FROM onefold.register WHERE (kind, name) IN (
    SELECT kind, name FROM onefold.register
    WHERE expires_at <= (SELECT coalesce(%(now)s::bigint, onefold.clock())) LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED)
RETURNING 1

-- name: find_ids
-- Every `find` asks for everything that a query can; they differ in where they begin to look.
-- A result whose window is over is not shown, though a purge may not have come by yet.
-- A message that was parked because of a failure shows it: it is the attempt with the fence it was parked under.
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    coalesce(d.due_at, 0), coalesce(d.expires_at, 0), coalesce(d.fence, o.fence), coalesce(d.attempt, o.attempt),
    coalesce(d.crashes, o.crashes), coalesce(d.replay_count, o.replay_count),
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state),
    d.worker, o.ended_at, o.kept_until, o.body_until,
    CASE WHEN o.kept_until > coalesce(%(now)s::bigint, onefold.clock()) THEN o.result END,
    CASE WHEN d.wake_target IS NULL THEN o.failure ELSE
        (SELECT a.failure FROM onefold.attempt a WHERE a.message_id = d.id AND a.fence = d.fence - 1) END
FROM onefold.message m
LEFT JOIN onefold.delivery d ON d.id = m.id
LEFT JOIN onefold.outcome o ON o.id = m.id
WHERE m.id = ANY (%(ids)s::uuid[]) AND m.id > %(after)s::uuid
    AND coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state) = ANY (%(states)s::smallint[])
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
    AND (%(message_type)s::text IS NULL OR m.message_type = %(message_type)s)
    AND (%(correlation_id)s::text IS NULL OR m.correlation_id = %(correlation_id)s)
    AND (%(worker)s::text IS NULL OR d.worker = %(worker)s)
    AND (%(crashes)s::int IS NULL OR d.crashes >= %(crashes)s)
ORDER BY m.id LIMIT %(limit)s

-- name: find_worker
-- Begins with the leases, which are few.
WITH d AS MATERIALIZED (SELECT * FROM onefold.delivery WHERE state = 1 AND lease_until > 0 AND worker = %(worker)s::text)
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    coalesce(d.due_at, 0), coalesce(d.expires_at, 0), coalesce(d.fence, o.fence), coalesce(d.attempt, o.attempt),
    coalesce(d.crashes, o.crashes), coalesce(d.replay_count, o.replay_count),
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state),
    d.worker, o.ended_at, o.kept_until, o.body_until, o.result, o.failure
FROM d
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = d.id OFFSET 0) m
LEFT JOIN onefold.outcome o ON false
WHERE m.id > %(after)s::uuid
    AND coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state) = ANY (%(states)s::smallint[])
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
    AND (%(message_type)s::text IS NULL OR m.message_type = %(message_type)s)
    AND (%(correlation_id)s::text IS NULL OR m.correlation_id = %(correlation_id)s)
    AND (%(worker)s::text IS NULL OR d.worker = %(worker)s)
    AND (%(crashes)s::int IS NULL OR d.crashes >= %(crashes)s)
ORDER BY m.id LIMIT %(limit)s

-- name: find_crashed
-- Begins with those that workers died with, which are few.
WITH d AS MATERIALIZED (SELECT * FROM onefold.delivery WHERE crashes > 0 AND queue > '' AND crashes >= %(crashes)s::int)
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    coalesce(d.due_at, 0), coalesce(d.expires_at, 0), coalesce(d.fence, o.fence), coalesce(d.attempt, o.attempt),
    coalesce(d.crashes, o.crashes), coalesce(d.replay_count, o.replay_count),
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state),
    d.worker, o.ended_at, o.kept_until, o.body_until, o.result, o.failure
FROM d
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = d.id OFFSET 0) m
LEFT JOIN onefold.outcome o ON false
WHERE m.id > %(after)s::uuid
    AND coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state) = ANY (%(states)s::smallint[])
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
    AND (%(message_type)s::text IS NULL OR m.message_type = %(message_type)s)
    AND (%(correlation_id)s::text IS NULL OR m.correlation_id = %(correlation_id)s)
    AND (%(worker)s::text IS NULL OR d.worker = %(worker)s)
    AND (%(crashes)s::int IS NULL OR d.crashes >= %(crashes)s)
ORDER BY m.id LIMIT %(limit)s

-- name: find_dead
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    0::bigint, 0::bigint, o.fence, o.attempt, o.crashes, o.replay_count,
    o.state, NULL::text, o.ended_at, o.kept_until, o.body_until, o.result, o.failure
FROM onefold.outcome o
JOIN onefold.message m ON m.id = o.id
WHERE o.state = 4 AND o.id > %(after)s::uuid AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
    AND (%(message_type)s::text IS NULL OR m.message_type = %(message_type)s)
    AND (%(correlation_id)s::text IS NULL OR m.correlation_id = %(correlation_id)s)
ORDER BY o.id LIMIT %(limit)s

-- name: find_correlated
-- The first message of a chain has its own id as its correlation id, all others stand in the index.
WITH found AS MATERIALIZED (
    SELECT id FROM onefold.message
    WHERE correlation_id = %(correlation_id)s::text AND correlation_id <> id::text AND id > %(after)s::uuid
    UNION ALL
    SELECT id FROM onefold.message
    WHERE id = %(root)s::uuid AND id > %(after)s::uuid AND correlation_id = %(correlation_id)s::text
)
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    coalesce(d.due_at, 0), coalesce(d.expires_at, 0), coalesce(d.fence, o.fence), coalesce(d.attempt, o.attempt),
    coalesce(d.crashes, o.crashes), coalesce(d.replay_count, o.replay_count),
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state),
    d.worker, o.ended_at, o.kept_until, o.body_until,
    CASE WHEN o.kept_until > coalesce(%(now)s::bigint, onefold.clock()) THEN o.result END, o.failure,
    coalesce((SELECT k.suppressed FROM onefold.key k
        WHERE k.scope = m.message_type AND k.key = m.idempotency_key AND k.kind = 0 AND k.message_id = m.id), 0)
FROM found
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = found.id OFFSET 0) m
LEFT JOIN LATERAL (SELECT * FROM onefold.delivery WHERE delivery.id = found.id OFFSET 0) d ON true
LEFT JOIN LATERAL (SELECT * FROM onefold.outcome WHERE outcome.id = found.id OFFSET 0) o ON true
WHERE coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state) = ANY (%(states)s::smallint[])
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
    AND (%(message_type)s::text IS NULL OR m.message_type = %(message_type)s)
ORDER BY m.id LIMIT %(limit)s

-- name: find_any
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    coalesce(d.due_at, 0), coalesce(d.expires_at, 0), coalesce(d.fence, o.fence), coalesce(d.attempt, o.attempt),
    coalesce(d.crashes, o.crashes), coalesce(d.replay_count, o.replay_count),
    coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state),
    d.worker, o.ended_at, o.kept_until, o.body_until,
    CASE WHEN o.kept_until > coalesce(%(now)s::bigint, onefold.clock()) THEN o.result END,
    CASE WHEN d.wake_target IS NULL THEN o.failure ELSE
        (SELECT a.failure FROM onefold.attempt a WHERE a.message_id = d.id AND a.fence = d.fence - 1) END
FROM onefold.message m
LEFT JOIN onefold.delivery d ON d.id = m.id
LEFT JOIN onefold.outcome o ON o.id = m.id
WHERE m.id > %(after)s::uuid
    AND coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state) = ANY (%(states)s::smallint[])
    AND (%(queue)s::text IS NULL OR m.queue = %(queue)s)
    AND (%(message_type)s::text IS NULL OR m.message_type = %(message_type)s)
    AND (%(correlation_id)s::text IS NULL OR m.correlation_id = %(correlation_id)s)
    AND (%(worker)s::text IS NULL OR d.worker = %(worker)s)
    AND (%(crashes)s::int IS NULL OR d.crashes >= %(crashes)s)
ORDER BY m.id LIMIT %(limit)s

-- name: attempts
SELECT attempt, fence, at, worker, failure, delay FROM onefold.attempt WHERE message_id = %(id)s::uuid ORDER BY fence

-- name: count_alive
SELECT queue, CASE WHEN wake_target IS NULL THEN state ELSE 2 END AS shown, pg_catalog.count(*)
FROM onefold.delivery GROUP BY queue, shown

-- name: count_dead
SELECT queue, pg_catalog.count(*), pg_catalog.min(ended_at) FROM onefold.outcome WHERE state = 4 GROUP BY queue

-- name: restored_lock
-- Nothing changes its table while a page is changed, so every message is met once, wherever it is.
LOCK TABLE onefold.delivery, onefold.outcome IN SHARE ROW EXCLUSIVE MODE

-- name: restored
WITH page AS MATERIALIZED (
    SELECT id FROM onefold.message WHERE id > %(after)s::uuid ORDER BY id LIMIT %(limit)s
),
leased AS MATERIALIZED (
    SELECT id FROM onefold.delivery WHERE id = ANY (ARRAY(SELECT id FROM page)) AND lease_until IS NOT NULL
),
alive AS (
    UPDATE onefold.delivery SET fence = fence + %(leap)s::bigint, state = 0, lease_until = NULL, worker = NULL
    WHERE id = ANY (ARRAY(SELECT id FROM page))
),
ended AS (
    UPDATE onefold.outcome SET fence = fence + %(leap)s::bigint WHERE id = ANY (ARRAY(SELECT id FROM page))
)
SELECT (SELECT pg_catalog.count(*) FROM leased), (SELECT id::text FROM page ORDER BY id DESC LIMIT 1)

-- name: now
SELECT coalesce(%(now)s::bigint, onefold.clock())

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
    AND pg_catalog.current_setting('synchronous_commit') <> 'off'

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
VALUES (%(number)s, %(name)s, %(checksum)s, coalesce(%(now)s::bigint, onefold.clock()))
