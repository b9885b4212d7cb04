-- The claim: the statements that take messages for a worker, and those that clear the way for them.
-- Each shows how it finds its messages; the parts before them say the rest, which is the same for all.
-- `now` is null except in tests, which bring their own clock; a statement reads the time once.

-- part: run_out
run_out AS MATERIALIZED (
    SELECT %(lease_floor)s::bigint IS NOT NULL AND EXISTS (
        SELECT FROM onefold.delivery
        WHERE state = {leased} AND lease_until >= %(lease_floor)s::bigint AND lease_until <= (SELECT now FROM clock)) AS found
)

-- part: is_due
due_at <= (SELECT now FROM clock) AND message_type = ANY (%(types)s::text[])

-- part: waits
-- Messages of one type and priority in one queue that wait at no gate; the few that workers died with are passed over
-- when `crashes_most` is 0.
state <> {leased} AND gate IS NULL AND crashes <= %(crashes_most)s AND due_at <= (SELECT now FROM clock)

-- part: taken
-- A message that is not suspected of killing its worker counts as started at once, because nothing will report its start;
-- a suspect is marked when it begins.
taken AS (
    UPDATE onefold.delivery
    SET state = {leased}, fence = fence + 1, lease_until = (SELECT now FROM clock) + %(lease)s::bigint,
        worker = %(worker)s::text, started = CASE WHEN crashes < %(suspect_after)s THEN 1 ELSE 0 END, wake_target = NULL,
        call = %(call)s::bigint
    WHERE id = ANY (ARRAY(SELECT id FROM picked))
    RETURNING id, due_at, expires_at, fence, attempt, crashes, replay_count, wake, gate, priority
)

-- part: lease
{columns_of_m},
    t.due_at, t.expires_at, t.fence - 1, t.attempt, t.crashes, t.replay_count, t.wake, (SELECT now FROM clock)

-- part: taken_messages
-- The message is looked up row by row on purpose: a join could be planned as a walk through all messages ever sent.
-- The rows come in no order, because sorting them here would copy them once more.
taken t
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = t.id OFFSET 0) m

-- part: more
-- The last row, without an id, says what an idle worker would need a statement each for: whether leases have run out
-- since a floor, whether there may be messages in lines and at other gates, whether as many were due as are wanted, and
-- the time.
{nulls_of_m},
    CASE WHEN (SELECT found FROM run_out) THEN 1 ELSE 0 END,
    coalesce((SELECT 1 FROM onefold.delivery WHERE place IS NOT NULL ORDER BY gate, place LIMIT 1), 0),
    CASE WHEN EXISTS (
        SELECT FROM onefold.delivery
        WHERE queue = ANY (%(queues)s::text[]) AND state <> {leased} AND gate IS NOT NULL AND place IS NULL)
    THEN 1 ELSE 0 END

-- name: claim
-- Stands for claim_run_out, claim_heads, claim_of_type and claim_take.
-- Nothing is taken while leases have run out, which are released first, so that the messages due for longest come first.
-- `head` has the types of which a message is due, on each level of priority that has messages; types that are not asked
-- for are never visited.  `number` says how many of each are among those that have waited longest, when a step of
-- priority counts as much as waiting for it.  So many of each are locked: where other claims hold them, the next ones.
WITH {clock},
{run_out},
head AS MATERIALIZED (
    SELECT q.queue, q.place, level.priority, type.name, CASE level.priority WHEN 0 THEN q.floor ELSE 0 END AS floor
    FROM unnest(%(queues)s::text[], %(floors)s::bigint[]) WITH ORDINALITY AS q (queue, floor, place)
    CROSS JOIN LATERAL (
        WITH RECURSIVE walk AS (
            SELECT 0::smallint AS priority
            UNION ALL
            SELECT next.priority FROM walk CROSS JOIN LATERAL (
                SELECT delivery.priority FROM onefold.delivery
                WHERE queue = q.queue AND state <> {leased} AND gate IS NULL AND delivery.priority > walk.priority
                ORDER BY delivery.priority LIMIT 1
            ) next
        )
        SELECT walk.priority FROM walk
    ) level
    CROSS JOIN pg_catalog.unnest(%(types)s::text[]) AS type (name)
    CROSS JOIN LATERAL (
        SELECT FROM onefold.delivery
        WHERE queue = q.queue AND delivery.priority = level.priority AND message_type = type.name AND {waits}
            AND due_at >= CASE level.priority WHEN 0 THEN q.floor ELSE 0 END
        LIMIT 1
    ) due
    WHERE NOT (SELECT found FROM run_out)
),
number AS MATERIALIZED (
    SELECT queue, priority, name, floor, pg_catalog.count(*) AS number FROM (
        SELECT head.* FROM head CROSS JOIN LATERAL (
            SELECT due_at FROM onefold.delivery
            WHERE queue = head.queue AND delivery.priority = head.priority AND message_type = head.name AND {waits}
                AND due_at >= head.floor
            ORDER BY due_at LIMIT %(limit)s
        ) due
        WHERE (SELECT pg_catalog.count(*) FROM head) > 1
        ORDER BY place, due_at - priority * %(step)s::bigint LIMIT %(limit)s
    ) longest
    GROUP BY queue, priority, name, floor
    UNION ALL
    SELECT queue, priority, name, floor, %(limit)s::bigint FROM head WHERE (SELECT pg_catalog.count(*) FROM head) = 1
),
picked AS MATERIALIZED (
    SELECT due.id FROM number CROSS JOIN LATERAL (
        SELECT id FROM onefold.delivery
        WHERE queue = number.queue AND delivery.priority = number.priority AND message_type = number.name AND {waits}
            AND due_at >= number.floor
        ORDER BY due_at LIMIT number.number
        FOR UPDATE SKIP LOCKED
    ) due
    LIMIT %(limit)s
),
{taken}
SELECT {lease}, t.due_at - t.priority * %(step)s::bigint FROM {taken_messages}
UNION ALL
SELECT {more}, CASE WHEN (SELECT pg_catalog.sum(number)::bigint FROM number) >= %(limit)s::bigint THEN 1 ELSE 0 END,
    NULL, NULL, NULL, now, NULL
FROM clock

-- name: claim_crashed
-- claim for messages that workers died with, which are few and have an index of their own; they ignore priority.
-- A message is free while it has no lease_until; asking for the state would draw in the index on due messages.
WITH {clock},
{run_out},
picked AS MATERIALIZED (
    SELECT due.id
    FROM pg_catalog.unnest(%(queues)s::text[]) AS q (queue)
    CROSS JOIN LATERAL (
        SELECT id FROM onefold.delivery
        WHERE queue = q.queue AND crashes > 0 AND lease_until IS NULL AND gate IS NULL AND {is_due}
        ORDER BY due_at LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) due
    WHERE NOT (SELECT found FROM run_out)
    LIMIT %(limit)s
),
{taken}
SELECT {lease}, t.due_at FROM {taken_messages}
UNION ALL
SELECT {more}, 0, NULL, NULL, NULL, now, NULL FROM clock

-- name: claim_lines
-- Take heads of lines as they were seen: one that has changed since then has another fence.
-- A message that backs off may be passed over and come back at the same moment: then the unique index on the running
-- message of a line lets one of the two through, and the other claim is made again.
WITH {clock},
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[]) AS g (id, fence)
),
picked AS MATERIALIZED (
    SELECT id FROM onefold.delivery
    WHERE {has_given_fence} AND lease_until IS NULL
    FOR UPDATE SKIP LOCKED
),
{taken}
SELECT {lease}, t.gate, 0 FROM {taken_messages}

-- name: claim_crowds
-- Take so many at each of these gates: by due time, in which a step of priority counts as much as waiting for it.
-- The last column says in which order they were found.
WITH {clock},
picked AS MATERIALIZED (
    SELECT due.id
    FROM clock CROSS JOIN unnest(%(queues)s::text[], %(gates)s::text[], %(counts)s::bigint[]) AS here (queue, gate, number)
    CROSS JOIN LATERAL (
        SELECT id FROM {kind}
        CROSS JOIN LATERAL (
            SELECT id, due_at FROM onefold.delivery WHERE {of_kind}
            ORDER BY due_at LIMIT here.number
            FOR UPDATE SKIP LOCKED
        ) of_kind
        ORDER BY due_at - kind.priority * %(step)s::bigint LIMIT here.number
    ) due
    LIMIT %(limit)s
),
{taken}
SELECT {lease}, t.gate, pg_catalog.array_position(ARRAY(SELECT id FROM picked), t.id) FROM {taken_messages}

-- name: claim_again
-- After a lost answer: the messages that this call of claim has taken, if it did.
SELECT {columns_of_m},
    d.due_at, d.expires_at, d.fence - 1, d.attempt, d.crashes, d.replay_count, d.wake,
    d.lease_until - %(lease)s::bigint, d.gate
FROM onefold.delivery d
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = d.id OFFSET 0) m
WHERE d.state = {leased} AND d.lease_until > 0 AND d.call = %(call)s::bigint

-- name: claim_expired
-- When claim says that leases have run out: their worker died or is too slow.
-- The fence rises when the message is claimed again.
WITH {clock},
released AS (
    UPDATE onefold.delivery SET state = {scheduled}, crashes = crashes + started, lease_until = NULL, worker = NULL
    WHERE id = ANY (ARRAY(
        SELECT id FROM onefold.delivery
        WHERE state = {leased} AND lease_until >= %(floor)s::bigint AND lease_until <= (SELECT now FROM clock)
        ORDER BY lease_until LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT pg_catalog.count(*) FROM released

-- name: claim_candidates
-- Every message that may be due, of each line only the head: among these is the row on which a claim has failed.
WITH {clock}
SELECT id::text, fence, due_at FROM onefold.delivery d
WHERE queue = ANY (%(queues)s::text[]) AND state <> {leased} AND {is_due}
    AND (due_at, id) > (%(after_due)s::bigint, %(after)s::uuid)
    AND (place IS NULL OR NOT EXISTS (
        SELECT FROM onefold.delivery before
        WHERE before.gate = d.gate AND before.place IS NOT NULL AND (before.place < d.place OR before.state = {leased})))
ORDER BY due_at, id LIMIT %(portion)s::bigint

-- name: claim_set_aside
-- A message that cannot be claimed becomes a dead letter, so that it is not in the way of the others.
WITH {clock},
aside AS (
    DELETE FROM onefold.delivery WHERE id = %(id)s::uuid AND fence = %(fence)s::bigint AND state <> {leased}
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
SELECT id, queue, {dead}, fence, attempt, crashes, replay_count, now, now + %(key_window)s::bigint,
    now + least(%(key_window)s::bigint, %(body_window)s::bigint), %(failure)s::bytea
FROM aside CROSS JOIN clock
RETURNING 1
