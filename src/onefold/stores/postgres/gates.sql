-- Gates: who waits at them, who of those may run, and what is remembered of a gate.
-- A claim looks from where the last one ended, a portion of gates at a time; one long line or one rich tenant is one gate.

-- name: lines_after
-- The heads of the lines behind `after`.  The index has every line's head first, so this leaps from head to head.
-- Somebody is ready who is due and asked for while nobody behind it runs, who had passed it; backs off who failed and waits for another attempt, and has a gap before
-- it who has a number and came before its predecessor ended.
-- One is taken from the place, which is not negative there: added to the last number it could overflow, and a claim that
-- fails for one line fails for all.
WITH RECURSIVE clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
walk AS (
    (SELECT gate, id, fence, state, due_at, queue, message_type, crashes, attempt, wake_target, place
    FROM onefold.delivery WHERE place IS NOT NULL AND gate > %(after)s::text ORDER BY gate, place LIMIT 1)
    UNION ALL
    SELECT next.* FROM walk CROSS JOIN LATERAL (
        SELECT gate, id, fence, state, due_at, queue, message_type, crashes, attempt, wake_target, place
        FROM onefold.delivery WHERE place IS NOT NULL AND delivery.gate > walk.gate ORDER BY gate, place LIMIT 1
    ) next
)
SELECT gate, id::text, fence,
    state = 0 AND due_at <= now AND queue = ANY (%(queues)s::text[]) AND message_type = ANY (%(types)s::text[])
        AND crashes BETWEEN %(crashes_least)s::int AND %(crashes_most)s::int
        AND CASE WHEN attempt = 0 AND place < 0 THEN true ELSE NOT EXISTS (
            SELECT FROM onefold.delivery d WHERE d.gate = head.gate AND d.place IS NOT NULL AND d.state = 1) END,
    state = 0 AND due_at > now AND attempt > 0 AND wake_target IS NULL,
    CASE WHEN place < 0 THEN false
        ELSE place - 1 > coalesce((SELECT g.last FROM onefold.gate g WHERE g.gate = head.gate), 0) END,
    now - due_at
FROM (SELECT * FROM walk LIMIT %(portion)s::bigint) head CROSS JOIN clock

-- name: lines_crashed
-- The same for lines in which somebody stands that a worker died with, which are few.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now)
SELECT gate, id::text, fence,
    state = 0 AND due_at <= now AND queue = ANY (%(queues)s::text[]) AND message_type = ANY (%(types)s::text[])
        AND crashes BETWEEN %(crashes_least)s::int AND %(crashes_most)s::int
        AND CASE WHEN attempt = 0 AND place < 0 THEN true ELSE NOT EXISTS (
            SELECT FROM onefold.delivery d WHERE d.gate = head.gate AND d.place IS NOT NULL AND d.state = 1) END,
    state = 0 AND due_at > now AND attempt > 0 AND wake_target IS NULL,
    CASE WHEN place < 0 THEN false
        ELSE place - 1 > coalesce((SELECT g.last FROM onefold.gate g WHERE g.gate = head.gate), 0) END,
    now - due_at
FROM (
    SELECT DISTINCT gate AS crashed FROM onefold.delivery
    WHERE crashes > 0 AND queue = ANY (%(queues)s::text[]) AND place IS NOT NULL LIMIT %(portion)s::bigint
) line
CROSS JOIN LATERAL (
    SELECT * FROM onefold.delivery WHERE delivery.gate = line.crashed AND place IS NOT NULL ORDER BY place LIMIT 1
) head
CROSS JOIN clock

-- name: line_front
-- The first of each line who does not back off, among as many as may be passed over; those are not missing.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now)
SELECT head.gate, id::text, fence,
    state = 0 AND due_at <= now AND queue = ANY (%(queues)s::text[]) AND message_type = ANY (%(types)s::text[])
        AND crashes BETWEEN %(crashes_least)s::int AND %(crashes_most)s::int
        AND CASE WHEN attempt = 0 AND place < 0 THEN true ELSE NOT EXISTS (
            SELECT FROM onefold.delivery d WHERE d.gate = head.gate AND d.place IS NOT NULL AND d.state = 1) END,
    false,
    CASE WHEN place < 0 THEN false
        ELSE place - 1 > greatest((SELECT g.last FROM onefold.gate g WHERE g.gate = head.gate), passed, 0) END,
    now - due_at
FROM clock CROSS JOIN pg_catalog.unnest(%(gates)s::text[]) AS asked (gate)
CROSS JOIN LATERAL (
    SELECT * FROM (
        SELECT *, pg_catalog.lag(place) OVER (ORDER BY place) AS passed FROM (
            SELECT * FROM onefold.delivery WHERE delivery.gate = asked.gate AND place IS NOT NULL
            ORDER BY place LIMIT %(portion)s::bigint
        ) front
    ) line
    WHERE NOT (state = 0 AND due_at > now AND attempt > 0 AND wake_target IS NULL)
    ORDER BY place LIMIT 1
) head

-- name: crowds_after
-- The gates without an order behind `after` in each queue, the highest priority at each, and whether anybody is ready.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now)
SELECT asked.queue, gate.gate, top.priority, EXISTS (
    SELECT FROM pg_catalog.generate_series(0, top.priority) AS level
    CROSS JOIN LATERAL (
        SELECT FROM onefold.delivery
        WHERE queue = asked.queue AND delivery.gate = gate.gate AND delivery.gate IS NOT NULL AND place IS NULL
            AND state = 0 AND priority = level AND due_at <= now AND message_type = ANY (%(types)s::text[])
            AND crashes BETWEEN %(crashes_least)s::int AND %(crashes_most)s::int
        LIMIT 1
    ) ready)
FROM clock CROSS JOIN unnest(%(queues)s::text[], %(afters)s::text[]) AS asked (queue, after)
CROSS JOIN LATERAL (
    WITH RECURSIVE walk AS (
        (SELECT delivery.gate FROM onefold.delivery
        WHERE queue = asked.queue AND delivery.gate > asked.after AND delivery.gate IS NOT NULL AND place IS NULL
            AND state = 0
        ORDER BY delivery.gate LIMIT 1)
        UNION ALL
        SELECT next.gate FROM walk CROSS JOIN LATERAL (
            SELECT delivery.gate FROM onefold.delivery
            WHERE queue = asked.queue AND delivery.gate > walk.gate AND delivery.gate IS NOT NULL AND place IS NULL
                AND state = 0
            ORDER BY delivery.gate LIMIT 1
        ) next
    )
    SELECT walk.gate FROM walk LIMIT %(portion)s::bigint
) gate
CROSS JOIN LATERAL (
    SELECT priority FROM onefold.delivery
    WHERE queue = asked.queue AND delivery.gate = gate.gate AND delivery.gate IS NOT NULL AND place IS NULL
        AND state = 0
    ORDER BY priority DESC LIMIT 1
) top

-- name: crowds_due
-- The gates of the first `portion` messages that are due in each queue, and how many of those wait at each.  When they
-- are fewer than `portion`, no other gate of the queue has a message that is due.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now)
SELECT asked.queue, due.gate, pg_catalog.max(due.priority), pg_catalog.count(*)
FROM clock CROSS JOIN pg_catalog.unnest(%(queues)s::text[]) AS asked (queue)
CROSS JOIN LATERAL (
    SELECT delivery.gate, delivery.priority FROM onefold.delivery
    WHERE delivery.queue = asked.queue AND state = 0 AND gate IS NOT NULL AND place IS NULL AND due_at <= now
    ORDER BY due_at LIMIT %(portion)s::bigint
) due
GROUP BY asked.queue, due.gate

-- name: crowds_crashed
-- The same for gates at which somebody waits that a worker died with.
SELECT queue, gate, pg_catalog.max(priority), true FROM onefold.delivery
WHERE crashes > 0 AND queue = ANY (%(queues)s::text[]) AND lease_until IS NULL AND gate IS NOT NULL AND place IS NULL
    AND due_at <= coalesce(%(now)s::bigint, onefold.clock()) AND message_type = ANY (%(types)s::text[])
GROUP BY queue, gate LIMIT %(portion)s::bigint

-- name: claim_lines
-- Take heads of lines as they were seen: whoever has changed since then has another fence.
-- Somebody who backs off may be passed over and come back at the same moment: then the index on the first of a line
-- lets one of the two through, and the other claim is made again.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
given AS MATERIALIZED (
    SELECT * FROM unnest(%(ids)s::uuid[], %(fences)s::bigint[]) AS g (id, fence)
),
picked AS MATERIALIZED (
    SELECT id FROM onefold.delivery
    WHERE id = ANY (%(ids)s::uuid[]) AND lease_until IS NULL AND ((id, fence) IN (SELECT id, fence FROM given)) IS TRUE
    FOR UPDATE SKIP LOCKED
),
taken AS (
    UPDATE onefold.delivery
    SET state = 1, fence = fence + 1, lease_until = (SELECT now FROM clock) + %(lease)s::bigint,
        worker = %(worker)s::text, started = CASE WHEN crashes < %(suspect_after)s THEN 1 ELSE 0 END, wake_target = NULL,
        call = %(call)s::bigint
    WHERE id = ANY (ARRAY(SELECT id FROM picked))
    RETURNING id, queue, due_at, expires_at, fence, attempt, crashes, replay_count, wake, gate
)
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    t.due_at, t.expires_at, t.fence - 1, t.attempt, t.crashes, t.replay_count, t.wake, (SELECT now FROM clock),
    t.gate, 0
FROM taken t
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = t.id OFFSET 0) m

-- name: claim_crowds
-- Take so many at each of these gates: by due time, in which a step of priority counts as much as waiting for it.
-- The last column says in which order they were found.
WITH clock AS MATERIALIZED (SELECT coalesce(%(now)s::bigint, onefold.clock()) AS now),
picked AS MATERIALIZED (
    SELECT due.id
    FROM unnest(%(queues)s::text[], %(gates)s::text[], %(tops)s::bigint[], %(counts)s::bigint[])
        AS asked (queue, gate, top, number)
    CROSS JOIN LATERAL (
        SELECT id FROM pg_catalog.generate_series(0, asked.top) AS level
        CROSS JOIN LATERAL (
            SELECT id, due_at FROM onefold.delivery
            WHERE queue = asked.queue AND delivery.gate = asked.gate AND delivery.gate IS NOT NULL AND place IS NULL
                AND state = 0 AND priority = level AND due_at <= (SELECT now FROM clock)
                AND message_type = ANY (%(types)s::text[])
                AND crashes BETWEEN %(crashes_least)s::int AND %(crashes_most)s::int
            ORDER BY due_at LIMIT asked.number
            FOR UPDATE SKIP LOCKED
        ) on_level
        ORDER BY due_at - level * %(step)s::bigint LIMIT asked.number
    ) due
    LIMIT %(limit)s
),
taken AS (
    UPDATE onefold.delivery
    SET state = 1, fence = fence + 1, lease_until = (SELECT now FROM clock) + %(lease)s::bigint,
        worker = %(worker)s::text, started = CASE WHEN crashes < %(suspect_after)s THEN 1 ELSE 0 END, wake_target = NULL,
        call = %(call)s::bigint
    WHERE id = ANY (ARRAY(SELECT id FROM picked))
    RETURNING id, queue, due_at, expires_at, fence, attempt, crashes, replay_count, wake, gate
)
SELECT m.id::text, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id,
    m.subject, m.created_at, m.retention, m.payload, m.headers,
    t.due_at, t.expires_at, t.fence - 1, t.attempt, t.crashes, t.replay_count, t.wake, (SELECT now FROM clock),
    t.gate, pg_catalog.array_position(ARRAY(SELECT id FROM picked), t.id)
FROM taken t
CROSS JOIN LATERAL (SELECT * FROM onefold.message WHERE message.id = t.id OFFSET 0) m

-- name: gate_make
INSERT INTO onefold.gate (gate, expires_at)
SELECT gate, coalesce(%(now)s::bigint, onefold.clock()) + %(kept)s::bigint FROM pg_catalog.unnest(%(keys)s::text[]) AS k (gate)
ON CONFLICT DO NOTHING

-- name: gate_hold
-- Who holds a gate's row until its commit is the only one to count and let through; others pass by and come back.
SELECT gate, tokens, at, coalesce(%(now)s::bigint, onefold.clock())
FROM onefold.gate WHERE gate = ANY (%(keys)s::text[]) ORDER BY gate
FOR UPDATE SKIP LOCKED

-- name: gate_running
-- After gate_hold and in a statement of its own: it must see what whoever held the row before has let through.
SELECT key, (
    SELECT pg_catalog.count(*) FROM onefold.delivery
    WHERE state = 1 AND place IS NULL AND gate IS NOT NULL AND gate >= k.first AND gate < k.until
) + (
    SELECT pg_catalog.count(*) FROM onefold.delivery WHERE state = 1 AND place IS NOT NULL AND gate >= k.first AND gate < k.until)
FROM (
    SELECT gate AS key, gate AS first, gate || pg_catalog.chr(1) AS until FROM pg_catalog.unnest(%(gates)s::text[]) AS g (gate)
    UNION ALL
    SELECT name, name || ':', name || ';' FROM pg_catalog.unnest(%(names)s::text[]) AS n (name)
) k

-- name: gate_tokens
UPDATE onefold.gate
SET tokens = (%(tokens)s::double precision[])[pg_catalog.array_position(%(keys)s::text[], gate)], at = %(at)s::bigint,
    expires_at = greatest(expires_at, (%(full_ats)s::bigint[])[pg_catalog.array_position(%(keys)s::text[], gate)])
WHERE gate = ANY (%(keys)s::text[])

-- name: gate_passed
-- After a settle, in its transaction: numbers that have ended let those behind them through.  A message that is still
-- there was settled by a stale lease.
INSERT INTO onefold.gate AS g (gate, last, expires_at)
SELECT gate, pg_catalog.max(sequence), pg_catalog.max(coalesce(%(now)s::bigint, onefold.clock())) + %(line_retention)s::bigint
FROM unnest(%(ids)s::uuid[], %(gates)s::text[], %(sequences)s::bigint[]) AS ended (id, gate, sequence)
WHERE NOT EXISTS (SELECT FROM onefold.delivery WHERE delivery.id = ended.id OFFSET 0)
GROUP BY gate ORDER BY gate
ON CONFLICT (gate) DO UPDATE
SET last = greatest(g.last, excluded.last), expires_at = greatest(g.expires_at, excluded.expires_at)

-- name: purge_gates
DELETE FROM onefold.gate WHERE gate IN (
    SELECT gate FROM onefold.gate
    WHERE expires_at <= (SELECT coalesce(%(now)s::bigint, onefold.clock())) LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED)
RETURNING 1
