-- Journals: what the owner of a message did step by step, and what others told it.

-- name: settle_park
-- One statement looks how much others have recorded and parks, so that none of it is overlooked: if enough has come
-- meanwhile, the message is scheduled instead.  It got this far without harm, so earlier crashes are forgiven, and unless
-- it waits because of a failure its attempts are too.
UPDATE onefold_delivery
SET state = CASE WHEN wake < ?1 THEN {parked} ELSE {scheduled} END, fence = fence + 1,
    attempt = CASE WHEN ?5 THEN attempt ELSE 0 END, crashes = 0, expires_at = 0, lease_until = NULL, worker = NULL,
    due_at = CASE WHEN wake < ?1 THEN ?2 ELSE ?3 END,
    wake_target = CASE WHEN wake < ?1 THEN ?1 END
WHERE seq = ?4

-- name: record_step
INSERT INTO onefold_step (message_id, name, kind, at, fingerprint, value) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING

-- name: record_part
INSERT INTO onefold_blob (message_id, name, part, data) VALUES (?, ?, ?, ?)

-- name: record_stands
SELECT name, kind, value, fingerprint, at, seq FROM onefold_step WHERE message_id = ? AND name = ? AND kind = ?

-- name: record_listens
-- Whether it is alive, or dead and so perhaps redriven.
SELECT 1 FROM onefold_delivery WHERE seq = ?1
UNION ALL
SELECT 1 FROM onefold_outcome WHERE seq = ?1 AND state = {dead}

-- name: record_dead
SELECT 1 FROM onefold_outcome WHERE seq = ? AND state = {dead}

-- name: record_wake
UPDATE onefold_delivery
SET wake = wake + ?1,
    state = CASE WHEN wake + ?1 >= wake_target THEN {scheduled} ELSE state END,
    due_at = CASE WHEN wake + ?1 >= wake_target THEN min(due_at, ?2) ELSE due_at END,
    wake_target = CASE WHEN wake + ?1 < wake_target THEN wake_target END
WHERE seq = ?3
RETURNING wake

-- name: record_by_hand
UPDATE onefold_delivery
SET state = {scheduled}, fence = fence + 1, due_at = CASE state WHEN {parked} THEN min(due_at, ?1) ELSE due_at END,
    wake_target = NULL
WHERE seq = ?2 AND state <> {leased}
RETURNING seq

-- name: rewind
UPDATE onefold_delivery
SET state = {scheduled}, fence = fence + 1, due_at = ?1, lease_until = NULL, worker = NULL, wake_target = NULL
WHERE seq = ?2
RETURNING seq

-- name: rewind_step
DELETE FROM onefold_step WHERE seq = ?

-- name: rewind_parts
DELETE FROM onefold_blob WHERE message_id = ? AND name = ?

-- name: move_resume
UPDATE onefold_delivery SET state = {scheduled}, due_at = min(due_at, ?1), wake_target = NULL, fence = fence + 1
WHERE seq = ?2 AND state = {parked}
RETURNING seq

-- name: move_reply
-- Headers, with the address of the reply, of a message that a person ended.
SELECT m.headers, o.replay_count, o.failure
FROM onefold_message m JOIN onefold_outcome o ON o.seq = m.seq
WHERE m.seq = ? AND m.headers IS NOT NULL

-- name: steps
SELECT name, kind, value, fingerprint, at, seq FROM onefold_step WHERE message_id = ? ORDER BY seq

-- name: claim_journals
-- Those of several messages, each by its place among them, and in the order of these, which a CROSS JOIN keeps.
SELECT given.key, s.name, s.kind, CASE WHEN length(s.value) <= ?2 THEN s.value END, s.fingerprint, s.at, s.seq
FROM json_each(?1) given
CROSS JOIN onefold_step s ON s.message_id = given.value
LIMIT ?3

-- name: parts
SELECT data FROM onefold_blob WHERE message_id = ? AND name = ? ORDER BY part
