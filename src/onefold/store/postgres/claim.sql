-- The claim: the statements that take messages for a worker, and those that clear the way for them.
-- Each shows how it finds its messages; the parts before them say the rest, which is the same for all.
-- `now` is null except in tests, which bring their own clock; a statement reads the time once.

-- part: run_out
run_out AS MATERIALIZED (
    SELECT %(lease_floor)s::bigint IS NOT NULL AND EXISTS (
        SELECT FROM onefold.delivery
        WHERE state = {leased} AND lease_until >= %(lease_floor)s::bigint AND lease_until <= (SELECT now FROM clock)) AS found
)

-- part: ranked
ranked AS MATERIALIZED (
    SELECT EXISTS (
        SELECT FROM onefold.delivery
        WHERE queue = ANY (%(queues)s::text[]) AND state <> {leased} AND gate IS NULL AND priority > 0) AS found
)

-- part: is_due
due_at <= (SELECT now FROM clock) AND message_type = ANY (%(types)s::text[])

-- part: taken
-- A message that is not suspected of killing its worker counts as started at once, because nothing will report its start;
-- a suspect is marked when it begins.
taken AS (
    UPDATE onefold.delivery
    SET state = {leased}, fence = fence + 1, lease_until = (SELECT now FROM clock) + %(lease)s::bigint,
        worker = %(worker)s::text, started = CASE WHEN crashes < %(suspect_after)s THEN 1 ELSE 0 END, wake_target = NULL,
        call = %(call)s::bigint
    WHERE id = ANY (ARRAY(SELECT id FROM picked))
    RETURNING id, queue, due_at, expires_at, fence, attempt, crashes, replay_count, wake, gate
)

-- part: lease
{columns_of_m},
    t.due_at, t.expires_at, t.fence - 1, t.attempt, t.crashes, t.replay_count, t.wake, (SELECT now FROM clock)

-- part: taken_messages
-- The message is looked up row by row on purpose: a join could be planned as a walk through all messages ever sent.
-- The rows come in no order, because sorting them here would copy them once more.
taken t
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = t.id OFFSET 0) m

-- part: leases_and_more
-- The last row, without an id, says what an idle worker would need a statement each for: whether leases have run out
-- since a floor, whether there may be messages in lines and at other gates, whether any has a priority, and the time.
SELECT {lease} FROM {taken_messages}
UNION ALL
SELECT {nulls_of_m},
    CASE WHEN (SELECT found FROM run_out) THEN 1 ELSE 0 END,
    CASE WHEN EXISTS (SELECT FROM onefold.delivery WHERE place IS NOT NULL) THEN 1 ELSE 0 END,
    CASE WHEN EXISTS (
        SELECT FROM onefold.delivery
        WHERE queue = ANY (%(queues)s::text[]) AND state <> {leased} AND gate IS NOT NULL AND place IS NULL)
    THEN 1 ELSE 0 END,
    CASE WHEN found THEN 1 ELSE 0 END, NULL, NULL, NULL, now
FROM clock CROSS JOIN ranked

-- name: claim
-- Stands for claim_possible, claim_select and claim_take.
-- Nothing is taken while leases have run out, which are released first, so that the messages due for longest come first;
-- nor while any message has a priority: then claim_ranked claims.
-- The few messages that workers died with are passed over when `crashes_most` is 0.
WITH {clock},
{run_out},
{ranked},
picked AS MATERIALIZED (
    SELECT due.id
    FROM unnest(%(queues)s::text[], %(floors)s::bigint[]) AS q (queue, floor)
    CROSS JOIN LATERAL (
        SELECT id FROM onefold.delivery
        WHERE NOT (SELECT found FROM ranked) AND queue = q.queue AND state <> {leased} AND gate IS NULL AND priority = 0
            AND due_at >= q.floor AND {is_due} AND crashes <= %(crashes_most)s
        ORDER BY due_at LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) due
    WHERE NOT (SELECT found FROM run_out)
    LIMIT %(limit)s
),
{taken}
{leases_and_more}

-- name: claim_ranked
-- claim, when a message has a priority: the first of each level, and of those the ones that have waited longest when a
-- step of priority counts as much as waiting for it.
WITH {clock},
{run_out},
{ranked},
picked AS MATERIALIZED (
    SELECT due.id
    FROM unnest(%(queues)s::text[], %(floors)s::bigint[]) AS q (queue, floor)
    CROSS JOIN LATERAL (
        SELECT id FROM (
            SELECT id, due_at AS rank FROM (
                SELECT id, due_at FROM onefold.delivery
                WHERE queue = q.queue AND state <> {leased} AND gate IS NULL AND priority = 0
                    AND due_at >= q.floor AND {is_due} AND crashes <= %(crashes_most)s
                ORDER BY due_at LIMIT %(limit)s
                FOR UPDATE SKIP LOCKED
            ) without
            UNION ALL
            SELECT id, due_at - level * %(step)s::bigint FROM pg_catalog.generate_series(1, %(top)s::int) AS level
            CROSS JOIN LATERAL (
                SELECT id, due_at FROM onefold.delivery
                WHERE queue = q.queue AND state <> {leased} AND gate IS NULL AND priority = level AND priority > 0
                    AND {is_due} AND crashes <= %(crashes_most)s
                ORDER BY due_at LIMIT %(limit)s
                FOR UPDATE SKIP LOCKED
            ) on_level
        ) waiting
        ORDER BY rank LIMIT %(limit)s
    ) due
    WHERE NOT (SELECT found FROM run_out)
    LIMIT %(limit)s
),
{taken}
{leases_and_more}

-- name: claim_crashed
-- claim for messages that workers died with, which are few and have an index of their own.
-- A message is free while it has no lease_until; asking for the state would draw in the index on due messages.
WITH {clock},
{run_out},
{ranked},
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
{leases_and_more}

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
    FROM unnest(%(queues)s::text[], %(gates)s::text[], %(tops)s::bigint[], %(counts)s::bigint[])
        AS asked (queue, gate, top, number)
    CROSS JOIN LATERAL (
        SELECT id FROM pg_catalog.generate_series(0, asked.top) AS level
        CROSS JOIN LATERAL (
            SELECT id, due_at FROM onefold.delivery
            WHERE queue = asked.queue AND delivery.gate = asked.gate AND delivery.gate IS NOT NULL AND place IS NULL
                AND state <> {leased} AND priority = level AND {is_due}
                AND crashes BETWEEN %(crashes_least)s::int AND %(crashes_most)s::int
            ORDER BY due_at LIMIT asked.number
            FOR UPDATE SKIP LOCKED
        ) on_level
        ORDER BY due_at - level * %(step)s::bigint LIMIT asked.number
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
