-- Gates: which messages a claim lets through.  All but the last few only read; `claim_take` takes what they find.
-- A line holds ordered messages, of which one runs at a time; a crowd is all other messages that wait at a gate.

-- name: claim_kinds
-- The queues with messages that are not leased: whether any wait at no gate, in lines, and in crowds.  Of hundreds of
-- queues most have none, and cost no statement of their own.
SELECT * FROM (
    SELECT given.value,
        EXISTS (SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_due
            WHERE queue = given.value AND state <> {leased} AND gate IS NULL) AS plain,
        EXISTS (SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_lined
            WHERE queue = given.value AND state <> {leased} AND place IS NOT NULL) AS lined,
        EXISTS (SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_crowd
            WHERE queue = given.value AND state <> {leased} AND gate IS NOT NULL AND place IS NULL) AS crowded
    FROM json_each(?1) given)
WHERE plain OR lined OR crowded

-- name: lines_after
-- From gate to gate, without reading what waits at them.
WITH RECURSIVE walk (gate) AS (
    SELECT (SELECT gate FROM onefold_delivery INDEXED BY onefold_delivery_lined
        WHERE queue = ?1 AND state <> {leased} AND place IS NOT NULL AND gate > ?2 ORDER BY gate LIMIT 1)
    UNION ALL
    SELECT (SELECT gate FROM onefold_delivery INDEXED BY onefold_delivery_lined
        WHERE queue = ?1 AND state <> {leased} AND place IS NOT NULL AND gate > walk.gate ORDER BY gate LIMIT 1)
    FROM walk WHERE walk.gate IS NOT NULL
    LIMIT ?3
)
SELECT gate FROM walk WHERE gate IS NOT NULL

-- name: lines_crashed
SELECT DISTINCT gate FROM onefold_delivery INDEXED BY onefold_delivery_crashed
WHERE crashes > 0 AND queue = ?1 AND state <> {leased} AND due_at <= ?2 AND place IS NOT NULL
LIMIT ?3

-- name: line_heads
-- The first of each line, whether one of the line runs, and the last number that has ended.
SELECT given.value,
    EXISTS (SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_turn
        WHERE gate = given.value AND place IS NOT NULL AND state = {leased}),
    (SELECT last FROM onefold_gate WHERE gate = given.value),
    d.seq, d.due_at, d.message_type, d.crashes, d.attempt, d.state = {parked}, d.place
FROM json_each(?1) given
CROSS JOIN onefold_delivery d ON d.seq = (
    SELECT seq FROM onefold_delivery INDEXED BY onefold_delivery_line
    WHERE gate = given.value AND place IS NOT NULL ORDER BY place, seq LIMIT 1)

-- name: line_front
SELECT seq, due_at, message_type, crashes, attempt, state = {parked}, place
FROM onefold_delivery INDEXED BY onefold_delivery_line
WHERE gate = ?1 AND place IS NOT NULL ORDER BY place, seq LIMIT ?2

-- name: crowds_after
-- Likewise, for crowds.
WITH RECURSIVE walk (gate) AS (
    SELECT (SELECT gate FROM onefold_delivery INDEXED BY onefold_delivery_crowd
        WHERE queue = ?1 AND state <> {leased} AND gate IS NOT NULL AND place IS NULL AND gate > ?2 ORDER BY gate LIMIT 1)
    UNION ALL
    SELECT (SELECT gate FROM onefold_delivery INDEXED BY onefold_delivery_crowd
        WHERE queue = ?1 AND state <> {leased} AND gate IS NOT NULL AND place IS NULL AND gate > walk.gate
        ORDER BY gate LIMIT 1)
    FROM walk WHERE walk.gate IS NOT NULL
    LIMIT ?3
)
SELECT gate FROM walk WHERE gate IS NOT NULL

-- name: gates_due
-- The gates of messages that became due in a time, whether those wait in lines there, and how many they are.
SELECT gate, is_line, count(*) FROM (
    SELECT due.gate, due.place IS NOT NULL AS is_line
    FROM json_each(?2) type
    CROSS JOIN onefold_delivery due INDEXED BY onefold_delivery_gate_due
    WHERE due.queue = ?1 AND due.state <> {leased} AND due.gate IS NOT NULL AND due.message_type = type.value
        AND due.due_at > ?3 AND due.due_at <= ?4
    LIMIT ?5)
GROUP BY gate, is_line

-- name: crowds_crashed
SELECT DISTINCT gate FROM onefold_delivery INDEXED BY onefold_delivery_crashed
WHERE crashes > 0 AND queue = ?1 AND state <> {leased} AND due_at <= ?2 AND gate IS NOT NULL AND place IS NULL
LIMIT ?3

-- name: crowd_kinds
-- Which priorities and types the messages of a crowd have, without reading the messages.
WITH RECURSIVE kind (priority, message_type) AS (
    SELECT * FROM (SELECT priority, message_type FROM onefold_delivery INDEXED BY onefold_delivery_crowd
        WHERE queue = ?1 AND state <> {leased} AND gate = ?2 AND place IS NULL
        ORDER BY priority, message_type LIMIT 1)
    UNION ALL
    SELECT next.priority, next.message_type FROM kind CROSS JOIN onefold_delivery next ON next.seq = coalesce(
        (SELECT seq FROM onefold_delivery INDEXED BY onefold_delivery_crowd
            WHERE queue = ?1 AND state <> {leased} AND gate = ?2 AND place IS NULL AND priority = kind.priority
                AND message_type > kind.message_type
            ORDER BY message_type LIMIT 1),
        (SELECT seq FROM onefold_delivery INDEXED BY onefold_delivery_crowd
            WHERE queue = ?1 AND state <> {leased} AND gate = ?2 AND place IS NULL AND priority > kind.priority
            ORDER BY priority, message_type LIMIT 1))
)
SELECT priority, message_type FROM kind

-- name: crowd
SELECT due_at, seq FROM onefold_delivery INDEXED BY onefold_delivery_crowd
WHERE queue = ?1 AND state <> {leased} AND gate = ?2 AND place IS NULL AND priority = ?3 AND message_type = ?4
    AND due_at <= ?5 AND crashes <= ?6
ORDER BY due_at, seq LIMIT ?7

-- name: crowd_crashed
SELECT due_at, seq, priority FROM onefold_delivery INDEXED BY onefold_delivery_crashed
WHERE crashes > 0 AND queue = ?1 AND state <> {leased} AND gate = ?2 AND place IS NULL AND due_at <= ?3
    AND message_type IN (SELECT value FROM json_each(?4))
ORDER BY due_at, seq LIMIT ?5

-- name: gate_running
-- Counted anew each time: a counter would stay behind when a worker dies.
SELECT (SELECT count(*) FROM onefold_delivery INDEXED BY onefold_delivery_inside
        WHERE state = {leased} AND gate IS NOT NULL AND place IS NULL AND gate >= ?1 AND gate <= ?2)
    + (SELECT count(*) FROM onefold_delivery INDEXED BY onefold_delivery_turn
        WHERE state = {leased} AND place IS NOT NULL AND gate >= ?1 AND gate <= ?2)

-- name: gate_bucket
SELECT tokens, at FROM onefold_gate WHERE gate = ? AND tokens IS NOT NULL

-- name: gate_tokens
INSERT INTO onefold_gate (gate, tokens, at, expires_at) VALUES (?1, ?2, ?3, ?4)
ON CONFLICT (gate) DO UPDATE SET tokens = ?2, at = ?3, expires_at = max(expires_at, ?4)

-- name: gate_passed
-- A message with a number has ended, however it did: the next one may come.
INSERT INTO onefold_gate (gate, last, expires_at) VALUES (?1, ?2, ?3)
ON CONFLICT (gate) DO UPDATE SET last = max(coalesce(last, 0), ?2), expires_at = max(expires_at, ?3)

-- name: gate_cancelled
INSERT INTO onefold_gate (gate, last, expires_at)
SELECT gate, place, ?2 FROM onefold_delivery WHERE seq = ?1 AND place >= 0
ON CONFLICT (gate) DO UPDATE SET last = max(coalesce(last, 0), excluded.last),
    expires_at = max(expires_at, excluded.expires_at)

-- name: purge_gates
DELETE FROM onefold_gate WHERE gate IN (SELECT gate FROM onefold_gate WHERE expires_at <= ? LIMIT ?)
