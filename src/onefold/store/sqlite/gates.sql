-- Gates: which messages a claim lets through.  All but the last few only read; `claim_take` takes what they find.
-- A line holds ordered messages, of which one runs at a time; a crowd is all other messages that wait at a gate.

-- name: claim_kinds
-- Whether messages wait in lines and in crowds, so that queues without any cost one statement.
SELECT
    EXISTS (SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_lined
        WHERE queue = ?1 AND state <> {leased} AND place IS NOT NULL),
    EXISTS (SELECT 1 FROM onefold_delivery INDEXED BY onefold_delivery_crowd
        WHERE queue = ?1 AND state <> {leased} AND gate IS NOT NULL AND place IS NULL)

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
-- Likewise, with the highest priority of the messages there.
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
SELECT gate, (SELECT max(priority) FROM onefold_delivery INDEXED BY onefold_delivery_crowd
    WHERE queue = ?1 AND state <> {leased} AND gate = walk.gate AND place IS NULL)
FROM walk WHERE gate IS NOT NULL

-- name: crowds_due
-- The gates of the first `?3` messages that are due, and how many of those wait at each.  When they are fewer than
-- `?3`, no other gate has a message that is due.
SELECT gate, max(priority), count(*) FROM (
    SELECT gate, priority FROM onefold_delivery INDEXED BY onefold_delivery_crowd_due
    WHERE queue = ?1 AND state <> {leased} AND gate IS NOT NULL AND place IS NULL AND due_at <= ?2
    ORDER BY due_at LIMIT ?3)
GROUP BY gate ORDER BY gate

-- name: crowds_crashed
SELECT gate, max(priority) FROM onefold_delivery INDEXED BY onefold_delivery_crashed
WHERE crashes > 0 AND queue = ?1 AND state <> {leased} AND due_at <= ?2 AND gate IS NOT NULL AND place IS NULL
GROUP BY gate LIMIT ?3

-- name: crowd
SELECT seq, due_at FROM onefold_delivery INDEXED BY onefold_delivery_crowd
WHERE queue = ?1 AND state <> {leased} AND gate = ?6 AND place IS NULL AND priority = ?7 AND due_at <= ?2
    AND message_type IN (SELECT value FROM json_each(?3)) AND crashes <= ?4
ORDER BY due_at LIMIT ?5

-- name: crowd_crashed
SELECT seq, due_at FROM onefold_delivery INDEXED BY onefold_delivery_crashed
WHERE crashes > 0 AND queue = ?1 AND state <> {leased} AND gate = ?6 AND place IS NULL AND priority = ?7 AND due_at <= ?2
    AND message_type IN (SELECT value FROM json_each(?3)) AND crashes <= ?4
ORDER BY due_at LIMIT ?5

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
