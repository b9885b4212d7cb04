-- Gates: the messages that wait at them, which of those may run, and the rows of the gates themselves.
-- The statements that take these messages are in claim.sql.
-- A claim looks from where the last one ended, a portion of gates at a time; one long line or one rich tenant is one gate.

-- part: ready
-- The head of a line is due, its type is wanted, and no later message of the line, which had passed it, is running.
state <> {leased} AND due_at <= now AND queue = ANY (%(queues)s::text[]) AND message_type = ANY (%(types)s::text[])
        AND crashes BETWEEN %(crashes_least)s::int AND %(crashes_most)s::int
        AND CASE WHEN attempt = 0 AND place < 0 THEN true ELSE NOT EXISTS (
            SELECT FROM onefold.delivery d WHERE d.gate = head.gate AND d.place IS NOT NULL AND d.state = {leased}) END

-- part: backs_off
-- It has failed and waits for another attempt.
state = {scheduled} AND due_at > now AND attempt > 0

-- part: gap
-- It has a number, and its predecessor has not ended.  1 is subtracted from the place, which is not negative here: the
-- last number plus 1 could overflow, and a claim that fails for one line fails for all.
CASE WHEN place < 0 THEN false
        ELSE place - 1 > coalesce((SELECT g.last FROM onefold.gate g WHERE g.gate = head.gate), 0) END

-- part: kind
-- Which priorities and types the messages of a crowd `here` have, without reading the messages.
LATERAL (
    WITH RECURSIVE walk AS (
        (SELECT delivery.priority, delivery.message_type FROM onefold.delivery
        WHERE queue = here.queue AND delivery.gate = here.gate AND delivery.gate IS NOT NULL AND place IS NULL
            AND state <> {leased}
        ORDER BY priority, message_type LIMIT 1)
        UNION ALL
        SELECT next.* FROM walk CROSS JOIN LATERAL (
            SELECT delivery.priority, delivery.message_type FROM onefold.delivery
            WHERE queue = here.queue AND delivery.gate = here.gate AND delivery.gate IS NOT NULL AND place IS NULL
                AND state <> {leased}
                AND (delivery.priority, delivery.message_type) > (walk.priority, walk.message_type)
            ORDER BY priority, message_type LIMIT 1
        ) next
    )
    SELECT walk.priority, walk.message_type FROM walk WHERE walk.message_type = ANY (%(types)s::text[])
) kind

-- part: of_kind
-- Messages of one kind in a crowd that may be taken.
queue = here.queue AND delivery.gate = here.gate AND delivery.gate IS NOT NULL AND place IS NULL AND state <> {leased}
        AND delivery.priority = kind.priority AND delivery.message_type = kind.message_type AND due_at <= now
        AND crashes BETWEEN %(crashes_least)s::int AND %(crashes_most)s::int

-- name: lines_after
-- The heads of the lines behind `after`.  The index has every line's head first, so this leaps from head to head.
WITH RECURSIVE {clock},
walk AS (
    (SELECT gate, id, fence, state, due_at, queue, message_type, crashes, attempt, place
    FROM onefold.delivery WHERE place IS NOT NULL AND gate > %(after)s::text ORDER BY gate, place LIMIT 1)
    UNION ALL
    SELECT next.* FROM walk CROSS JOIN LATERAL (
        SELECT gate, id, fence, state, due_at, queue, message_type, crashes, attempt, place
        FROM onefold.delivery WHERE place IS NOT NULL AND delivery.gate > walk.gate ORDER BY gate, place LIMIT 1
    ) next
)
SELECT gate, id::text, fence, {ready}, {backs_off}, {gap}, now - due_at
FROM (SELECT * FROM walk LIMIT %(portion)s::bigint) head CROSS JOIN clock

-- name: lines_crashed
-- The same for lines with a message that a worker died with, which are few.
WITH {clock}
SELECT gate, id::text, fence, {ready}, {backs_off}, {gap}, now - due_at
FROM (
    SELECT DISTINCT gate AS crashed FROM onefold.delivery
    WHERE crashes > 0 AND queue = ANY (%(queues)s::text[]) AND place IS NOT NULL LIMIT %(portion)s::bigint
) line
CROSS JOIN LATERAL (
    SELECT * FROM onefold.delivery WHERE delivery.gate = line.crashed AND place IS NOT NULL ORDER BY place LIMIT 1
) head
CROSS JOIN clock

-- name: line_front
-- The first message of each line that does not back off, among as many as may be passed over; the numbers of those that
-- are passed over are not missing.
WITH {clock}
SELECT head.gate, id::text, fence,
    {ready},
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
    WHERE NOT ({backs_off})
    ORDER BY place LIMIT 1
) head

-- name: lines_at
-- lines_after for these lines.
WITH {clock}
SELECT gate, id::text, fence, {ready}, {backs_off}, {gap}, now - due_at
FROM clock CROSS JOIN pg_catalog.unnest(%(gates)s::text[]) AS asked (line)
CROSS JOIN LATERAL (
    SELECT * FROM onefold.delivery WHERE delivery.gate = asked.line AND place IS NOT NULL ORDER BY place LIMIT 1
) head

-- name: crowds_after
-- The gates without an order behind `after` in each queue, and whether a message is ready.
WITH {clock}
SELECT here.queue, here.gate, EXISTS (
    SELECT FROM {kind} CROSS JOIN LATERAL (SELECT FROM onefold.delivery WHERE {of_kind} LIMIT 1) ready)
FROM clock CROSS JOIN unnest(%(queues)s::text[], %(afters)s::text[]) AS asked (queue, after)
CROSS JOIN LATERAL (
    WITH RECURSIVE walk AS (
        (SELECT delivery.gate FROM onefold.delivery
        WHERE queue = asked.queue AND delivery.gate > asked.after AND delivery.gate IS NOT NULL AND place IS NULL
            AND state <> {leased}
        ORDER BY delivery.gate LIMIT 1)
        UNION ALL
        SELECT next.gate FROM walk CROSS JOIN LATERAL (
            SELECT delivery.gate FROM onefold.delivery
            WHERE queue = asked.queue AND delivery.gate > walk.gate AND delivery.gate IS NOT NULL AND place IS NULL
                AND state <> {leased}
            ORDER BY delivery.gate LIMIT 1
        ) next
    )
    SELECT asked.queue, walk.gate FROM walk LIMIT %(portion)s::bigint
) here

-- name: gates_due
-- The gates of messages that became due since a time, in each queue, whether those wait in lines there, and how many they
-- are.  The last row, without a gate, has the time.
WITH {clock}
SELECT due.queue, due.gate, due.is_line, pg_catalog.count(*), NULL FROM (
    SELECT asked.queue, found.gate, found.is_line
    FROM clock CROSS JOIN pg_catalog.unnest(%(queues)s::text[]) AS asked (queue)
    CROSS JOIN pg_catalog.unnest(%(types)s::text[]) AS type (name)
    CROSS JOIN LATERAL (
        SELECT delivery.gate, place IS NOT NULL AS is_line FROM onefold.delivery
        WHERE delivery.queue = asked.queue AND message_type = type.name AND state <> {leased} AND gate IS NOT NULL
            AND due_at > %(since)s::bigint AND due_at <= now
        ORDER BY due_at LIMIT %(portion)s::bigint
    ) found
    LIMIT %(portion)s::bigint
) due
GROUP BY due.queue, due.gate, due.is_line
UNION ALL
SELECT NULL, NULL, NULL, NULL, now FROM clock

-- name: crowds_crashed
-- The same for gates at which a message waits that a worker died with.
SELECT DISTINCT queue, gate, true FROM onefold.delivery
WHERE crashes > 0 AND queue = ANY (%(queues)s::text[]) AND lease_until IS NULL AND gate IS NOT NULL AND place IS NULL
    AND due_at <= {now} AND message_type = ANY (%(types)s::text[])
LIMIT %(portion)s::bigint

-- name: gate_read
-- gate_hold without its locks: a gate that is shut is not locked, so workers that wait there write nothing.
SELECT gate, tokens, at, {now} FROM onefold.gate WHERE gate = ANY (%(keys)s::text[])

-- name: gate_make
INSERT INTO onefold.gate (gate, expires_at)
SELECT gate, {now} + %(kept)s::bigint FROM pg_catalog.unnest(%(keys)s::text[]) AS k (gate)
ON CONFLICT DO NOTHING

-- name: gate_hold
-- While a claim has locked a gate's row, no other counts there or takes from it; others skip the gate and try again.
SELECT gate, tokens, at, {now}
FROM onefold.gate WHERE gate = ANY (%(keys)s::text[]) ORDER BY gate
FOR UPDATE SKIP LOCKED

-- name: gate_running
-- After gate_hold and in a statement of its own: it must see the leases of the claim that had locked the row before.
SELECT key, (
    SELECT pg_catalog.count(*) FROM onefold.delivery
    WHERE state = {leased} AND place IS NULL AND gate IS NOT NULL AND gate >= k.first AND gate < k.until
) + (
    SELECT pg_catalog.count(*) FROM onefold.delivery WHERE state = {leased} AND place IS NOT NULL AND gate >= k.first AND gate < k.until)
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
-- After a settle, in its transaction: numbers that have ended let the next ones through.  A message that is still
-- there was settled by a stale lease.
INSERT INTO onefold.gate AS g (gate, last, expires_at)
SELECT gate, pg_catalog.max(sequence), pg_catalog.max({now}) + %(line_retention)s::bigint
FROM unnest(%(ids)s::uuid[], %(gates)s::text[], %(sequences)s::bigint[]) AS ended (id, gate, sequence)
WHERE NOT EXISTS (SELECT FROM onefold.delivery WHERE delivery.id = ended.id OFFSET 0)
GROUP BY gate ORDER BY gate
ON CONFLICT (gate) DO UPDATE
SET last = greatest(g.last, excluded.last), expires_at = greatest(g.expires_at, excluded.expires_at)

-- name: purge_gates
DELETE FROM onefold.gate WHERE gate = ANY (ARRAY(
    SELECT gate FROM onefold.gate
    WHERE expires_at <= (SELECT {now}) ORDER BY expires_at LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED))
RETURNING 1
