-- A message's life in five tables.
-- `message` never changes until its body is dropped; `delivery` is the narrow row that moves while it lives;
-- `outcome` replaces the delivery when it ended; `key` outlives both; `attempt` says what went wrong on the way.
-- People know a message by its id, the tables by its number `seq`, which is shorter and quicker to find.
-- Instants are microseconds since 1970, UTC; `lease_until` alone is on the machine's steady clock.
-- Checks name ranges, because SQLite builds a table for every row it compares with a list of three.

CREATE TABLE onefold_message (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    message_type TEXT NOT NULL,
    schema_version INTEGER NOT NULL CHECK (schema_version >= 1),
    queue TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    causation_id TEXT NOT NULL,
    subject TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    retention INTEGER NOT NULL,
    payload BLOB,
    headers BLOB
);

-- What goes back to another message; the many that do not are found by their id, and cost nothing here.
CREATE INDEX onefold_message_correlation ON onefold_message (correlation_id) WHERE correlation_id <> id;

CREATE TABLE onefold_sequence (
    -- The highest number of a message that is gone: no number is given twice, so an old lease meets no new message.
    last INTEGER NOT NULL,
    -- Up to here every message has, or had, its delivery; above, those that are due at once get theirs when needed.
    delivered INTEGER NOT NULL
);

INSERT INTO onefold_sequence (last, delivered) VALUES (0, 0);

CREATE TABLE onefold_delivery (
    seq INTEGER PRIMARY KEY,
    queue TEXT NOT NULL,
    message_type TEXT NOT NULL,
    state INTEGER NOT NULL CHECK (state BETWEEN 0 AND 1),
    due_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    fence INTEGER NOT NULL CHECK (fence >= 1),
    attempt INTEGER NOT NULL CHECK (attempt >= 0),
    crashes INTEGER NOT NULL CHECK (crashes >= 0),
    -- Whether its handler may have begun under the current lease, so that a worker's death may be its doing.
    started INTEGER NOT NULL DEFAULT 0 CHECK (started BETWEEN 0 AND 1),
    replay_count INTEGER NOT NULL,
    lease_until INTEGER,
    -- Whether the lease has run out once and was extended for its owner by another process.
    graced INTEGER NOT NULL DEFAULT 0 CHECK (graced BETWEEN 0 AND 1),
    worker TEXT,
    -- How much others have recorded for it; and, only while it is parked, at how much it is due.
    wake INTEGER NOT NULL DEFAULT 0,
    wake_target INTEGER CHECK (wake_target IS NULL OR state = 0),
    priority INTEGER NOT NULL DEFAULT 0 CHECK (priority BETWEEN 0 AND 9),
    -- Where it waits, and its place if that is a line: from zero on its own number, below zero the order of sends.
    gate TEXT,
    place INTEGER CHECK (place IS NULL OR gate IS NOT NULL),
    CHECK ((state = 1) = (lease_until IS NOT NULL)),
    CHECK ((state = 1) = (worker IS NOT NULL))
);

-- What may be claimed, in the order in which it is: one short range per queue.
CREATE INDEX onefold_delivery_due ON onefold_delivery (queue, due_at)
WHERE state = 0 AND gate IS NULL AND priority = 0;
CREATE INDEX onefold_delivery_priority ON onefold_delivery (queue, priority, due_at)
WHERE state = 0 AND gate IS NULL AND priority > 0;
-- Who waits at a gate: in a crowd, or in a line.
CREATE INDEX onefold_delivery_crowd ON onefold_delivery (queue, gate, priority, due_at)
WHERE state = 0 AND gate IS NOT NULL AND place IS NULL;
-- Which gates have messages that are due, where most have none.
CREATE INDEX onefold_delivery_crowd_due ON onefold_delivery (queue, due_at)
WHERE state = 0 AND gate IS NOT NULL AND place IS NULL;
CREATE INDEX onefold_delivery_lined ON onefold_delivery (queue, gate) WHERE state = 0 AND place IS NOT NULL;
-- Who is first in a line, and that only one of it runs, whatever a claim thinks.
CREATE INDEX onefold_delivery_line ON onefold_delivery (gate, place) WHERE place IS NOT NULL;
CREATE UNIQUE INDEX onefold_delivery_turn ON onefold_delivery (gate) WHERE place IS NOT NULL AND state = 1;
-- Who else has come through a gate and runs.
CREATE INDEX onefold_delivery_inside ON onefold_delivery (gate)
WHERE state = 1 AND gate IS NOT NULL AND place IS NULL;
-- Leases that may have run out.
CREATE INDEX onefold_delivery_lease ON onefold_delivery (lease_until) WHERE state = 1;
-- The few that a worker died with, for those who run or judge them apart.
CREATE INDEX onefold_delivery_crashed ON onefold_delivery (queue, due_at) WHERE crashes > 0;

-- What is to be remembered of a gate while nobody waits there: tokens, and the last number that ended in a line.
CREATE TABLE onefold_gate (
    gate TEXT PRIMARY KEY,
    tokens REAL,
    at INTEGER,
    last INTEGER,
    expires_at INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX onefold_gate_expires ON onefold_gate (expires_at);

CREATE TABLE onefold_outcome (
    seq INTEGER PRIMARY KEY,
    state INTEGER NOT NULL CHECK (state BETWEEN 3 AND 6),
    fence INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    crashes INTEGER NOT NULL,
    replay_count INTEGER NOT NULL,
    ended_at INTEGER NOT NULL,
    kept_until INTEGER NOT NULL,
    body_until INTEGER NOT NULL,
    result BLOB,
    failure BLOB,
    -- The message's id while it is a dead letter, so that their pages follow the ids without reading the rest.
    letter TEXT,
    CHECK ((state = 3) = (result IS NOT NULL)),
    CHECK ((state = 4 OR state = 6) = (failure IS NOT NULL)),
    CHECK ((state = 4) = (letter IS NOT NULL))
);

-- What is removed of an ended message, and in which order: first its body, then all of it.
CREATE INDEX onefold_outcome_body ON onefold_outcome (body_until);
CREATE INDEX onefold_outcome_kept ON onefold_outcome (kept_until);
CREATE INDEX onefold_outcome_letter ON onefold_outcome (letter, ended_at) WHERE letter IS NOT NULL;

-- One row.  Bodies that were to be kept until `bodies` or less are gone: to say so once for all of them is cheaper than
-- to write it into every outcome.
CREATE TABLE onefold_purge (bodies INTEGER NOT NULL);

INSERT INTO onefold_purge (bodies) VALUES (0);

CREATE TABLE onefold_key (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    kind INTEGER NOT NULL CHECK (kind BETWEEN 0 AND 2),
    seq INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    schema_version INTEGER NOT NULL,
    expires_at INTEGER,
    suppressed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, key, kind)
) WITHOUT ROWID;

CREATE INDEX onefold_key_expires ON onefold_key (expires_at) WHERE expires_at IS NOT NULL;

-- Messages that have come and have no delivery yet.
-- To write one here is the way for a message by itself: one statement in a transaction of its own is much cheaper than
-- to begin, to run a statement for each table and to commit.  A conflict undoes all of it.
CREATE VIEW onefold_arrival AS
SELECT m.id, m.message_type, m.schema_version, m.queue, m.idempotency_key, m.correlation_id, m.causation_id, m.subject,
    m.created_at, m.retention, m.payload, m.headers, NULL AS fingerprint
FROM onefold_message m
WHERE m.seq > (SELECT delivered FROM onefold_sequence)
    AND NOT EXISTS (SELECT 1 FROM onefold_delivery d WHERE d.seq = m.seq);

CREATE TRIGGER onefold_arrive INSTEAD OF INSERT ON onefold_arrival BEGIN
    INSERT INTO onefold_message (seq, id, message_type, schema_version, queue, idempotency_key, correlation_id,
        causation_id, subject, created_at, retention, payload, headers)
    VALUES (max((SELECT coalesce(max(seq), 0) FROM onefold_message), (SELECT last FROM onefold_sequence)) + 1,
        NEW.id, NEW.message_type, NEW.schema_version, NEW.queue, NEW.idempotency_key, NEW.correlation_id,
        NEW.causation_id, NEW.subject, NEW.created_at, NEW.retention, NEW.payload, NEW.headers);
    INSERT INTO onefold_key (scope, key, kind, seq, fingerprint, schema_version)
    SELECT NEW.message_type, NEW.idempotency_key, 0, last_insert_rowid(), NEW.fingerprint, NEW.schema_version
    WHERE NEW.fingerprint IS NOT NULL;
END;

CREATE TABLE onefold_attempt (
    seq INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    at INTEGER NOT NULL,
    worker TEXT NOT NULL,
    failure BLOB NOT NULL,
    delay REAL,
    PRIMARY KEY (seq, fence)
) WITHOUT ROWID;

-- What handlers last said about themselves; apart, so that a talkative one does not rewrite what is claimed and settled.
CREATE TABLE onefold_progress (
    seq INTEGER PRIMARY KEY,
    fence INTEGER NOT NULL,
    percent REAL NOT NULL CHECK (percent BETWEEN 0 AND 100),
    message TEXT NOT NULL,
    at INTEGER,
    beat_at INTEGER NOT NULL
);

-- The journals: what the owner of a message did step by step, and what others told it.
CREATE TABLE onefold_step (
    seq INTEGER PRIMARY KEY,
    message_id TEXT NOT NULL,
    name TEXT NOT NULL,
    kind INTEGER NOT NULL CHECK (kind BETWEEN 0 AND 15),
    at INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    -- Null when it is so large that it lies in parts.
    value BLOB,
    UNIQUE (message_id, name, kind)
);

CREATE TABLE onefold_blob (
    message_id TEXT NOT NULL,
    name TEXT NOT NULL,
    part INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (message_id, name, part)
);

CREATE TABLE onefold_act (
    seq INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT NOT NULL
);

CREATE INDEX onefold_act_message ON onefold_act (message_id);

CREATE TABLE onefold_register (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    value BLOB NOT NULL,
    version INTEGER NOT NULL,
    expires_at INTEGER,
    PRIMARY KEY (kind, name)
) WITHOUT ROWID;

-- For people and their own tools: the inbox with stable names, whatever the tables become.
CREATE VIEW onefold_inbox AS
SELECT
    m.id, m.message_type, m.schema_version, m.queue, m.subject, m.idempotency_key, m.correlation_id, m.causation_id,
    CASE coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state, 0)
        WHEN 0 THEN 'scheduled' WHEN 1 THEN 'leased' WHEN 2 THEN 'parked' WHEN 3 THEN 'done' WHEN 4 THEN 'dead'
        WHEN 5 THEN 'cancelled' WHEN 6 THEN 'discarded'
    END AS state,
    coalesce(d.fence, o.fence, 1) AS fence,
    coalesce(d.attempt, o.attempt, 0) AS attempt,
    coalesce(d.crashes, o.crashes, 0) AS crashes,
    coalesce(d.replay_count, o.replay_count, 0) AS replay_count,
    m.created_at, iif(o.seq, NULL, coalesce(d.due_at, m.created_at)) AS due_at, o.ended_at, o.kept_until,
    CASE WHEN o.state = 4 AND m.payload IS NOT NULL THEN o.body_until END AS redrive_until, d.worker,
    o.result, o.failure
FROM onefold_message m
LEFT JOIN onefold_delivery d ON d.seq = m.seq
LEFT JOIN onefold_outcome o ON o.seq = m.seq;

-- Sagas and their steps as their journals tell of them; ``app.saga_status`` says the same.
CREATE VIEW onefold_saga_step AS
SELECT
    b.message_id AS id, b.name, b.at AS started_at,
    (
        SELECT max(r.at) FROM onefold_step r
        WHERE r.message_id = b.message_id AND (
            (r.kind = 0 AND r.name = b.name)
            OR (r.kind = 10 AND (r.name = b.name OR substr(r.name, 1, length(b.name) + 1) = b.name || '@')
                AND CAST(r.value AS TEXT) ->> '$.state' = 3))
    ) AS completed_at,
    CAST(b.value AS TEXT) ->> '$.undo' AS undo,
    (
        SELECT max(r.at) FROM onefold_step r
        WHERE r.message_id = b.message_id AND (
            (r.kind = 0 AND r.name = 'undo:' || b.name)
            OR (r.kind = 10 AND (r.name = 'undo:' || b.name OR substr(r.name, 1, length('undo:' || b.name) + 1) = 'undo:' || b.name || '@')
                AND CAST(r.value AS TEXT) ->> '$.state' = 3))
    ) AS undone_at
FROM onefold_step b
WHERE b.kind = 12;

CREATE VIEW onefold_saga AS
SELECT
    m.id, m.message_type, m.schema_version, m.queue, m.subject, m.idempotency_key, m.correlation_id, m.created_at,
    o.ended_at,
    CASE
        WHEN o.state = 3 THEN 'completed'
        WHEN CAST(o.failure AS TEXT) ->> '$.reason' = 'compensated' THEN 'compensated'
        WHEN o.state IS NOT NULL THEN 'failed'
        WHEN EXISTS (
            SELECT 1 FROM onefold_step s JOIN onefold_saga_step b ON b.id = s.message_id
            WHERE s.message_id = m.id AND s.kind = 14 AND b.undone_at IS NULL
                AND substr(s.name, 1, length(b.name) + 6) = 'undo:' || b.name || '!'
        ) THEN 'stuck'
        WHEN EXISTS (
            SELECT 1 FROM onefold_step s
            WHERE s.message_id = m.id AND s.kind = 13 AND (s.name = 'undo#' || d.replay_count
                OR EXISTS (SELECT 1 FROM onefold_step b WHERE b.message_id = m.id AND b.kind = 12))
        ) THEN 'compensating'
        WHEN EXISTS (SELECT 1 FROM onefold_saga_step b WHERE b.id = m.id AND b.completed_at IS NOT NULL)
            THEN 'completing'
        ELSE 'started'
    END AS status
FROM onefold_message m
LEFT JOIN onefold_delivery d ON d.seq = m.seq
LEFT JOIN onefold_outcome o ON o.seq = m.seq
WHERE CAST(m.headers AS TEXT) ->> '$.saga';
