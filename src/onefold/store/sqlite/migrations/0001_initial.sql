-- A message's life in five tables.
-- `message` never changes until its body is dropped; `delivery` is the narrow row that moves while it lives;
-- `outcome` replaces the delivery when it ended; `key` outlives both; `attempt` says what went wrong on the way.
-- The tables know a message by its number `seq`, which is made of its id (`numbers.py`): a message is found by its id
-- without an index of ids, and messages lie in the order in which they were made.
-- Instants are microseconds since 1970, UTC; `lease_until` alone is on the machine's steady clock.
-- Checks name ranges, because SQLite builds a table for every row it compares with a list of three.

CREATE TABLE onefold_message (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
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

-- Messages that go back to another one; all others are found by their number, and cost nothing here.
CREATE INDEX onefold_message_correlation ON onefold_message (correlation_id) WHERE correlation_id <> id;

CREATE TABLE onefold_delivery (
    seq INTEGER PRIMARY KEY,
    queue TEXT NOT NULL,
    message_type TEXT NOT NULL,
    state INTEGER NOT NULL CHECK (state BETWEEN {scheduled} AND {parked}),
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
    wake_target INTEGER,
    priority INTEGER NOT NULL DEFAULT 0 CHECK (priority BETWEEN 0 AND 9),
    -- Where it waits, and its place if that is a line: from zero on its own number, below zero the order of sends.
    gate TEXT,
    place INTEGER CHECK (place IS NULL OR gate IS NOT NULL),
    CHECK ((state = {leased}) = (lease_until IS NOT NULL)),
    CHECK ((state = {leased}) = (worker IS NOT NULL)),
    CHECK ((state = {parked}) = (wake_target IS NOT NULL))
);

-- Messages that may be claimed: one short range for each priority and type, so that a claim never visits a type that its
-- worker does not know.
CREATE INDEX onefold_delivery_due ON onefold_delivery (queue, priority, message_type, due_at)
WHERE state <> {leased} AND gate IS NULL;
-- Messages at gates: in a crowd, or in a line.
CREATE INDEX onefold_delivery_crowd ON onefold_delivery (queue, gate, priority, message_type, due_at)
WHERE state <> {leased} AND gate IS NOT NULL AND place IS NULL;
-- At which gates messages have become due since a claim last looked.
CREATE INDEX onefold_delivery_gate_due ON onefold_delivery (queue, message_type, due_at, gate, place)
WHERE state <> {leased} AND gate IS NOT NULL;
CREATE INDEX onefold_delivery_lined ON onefold_delivery (queue, gate) WHERE state <> {leased} AND place IS NOT NULL;
-- The order of a line, and that only one of it runs, whatever a claim has read.
CREATE INDEX onefold_delivery_line ON onefold_delivery (gate, place) WHERE place IS NOT NULL;
CREATE UNIQUE INDEX onefold_delivery_turn ON onefold_delivery (gate) WHERE place IS NOT NULL AND state = {leased};
-- Messages of crowds that have come through a gate and run.
CREATE INDEX onefold_delivery_inside ON onefold_delivery (gate)
WHERE state = {leased} AND gate IS NOT NULL AND place IS NULL;
-- Leases that may have run out.
CREATE INDEX onefold_delivery_lease ON onefold_delivery (lease_until) WHERE state = {leased};
-- The few that a worker died with, which are run and judged apart.
CREATE INDEX onefold_delivery_crashed ON onefold_delivery (queue, due_at) WHERE crashes > 0;
-- For people: messages that are parked, and runs of workflows, which are claimed by their type and version.
CREATE INDEX onefold_delivery_parked ON onefold_delivery (seq) WHERE state = {parked};
CREATE INDEX onefold_delivery_run ON onefold_delivery (seq) WHERE instr(message_type, '@') > 0;

-- The state of a gate that outlives its messages: tokens, and the last number that ended in a line.
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
    state INTEGER NOT NULL CHECK (state BETWEEN {done} AND {discarded}),
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
    CHECK ((state = {done}) = (result IS NOT NULL)),
    CHECK ((state = {dead} OR state = {discarded}) = (failure IS NOT NULL)),
    CHECK ((state = {dead}) = (letter IS NOT NULL))
);

-- The order in which ended messages are purged: first the body, then all of the message.
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
    kind INTEGER NOT NULL CHECK (kind BETWEEN {key_idempotency} AND {key_batch}),
    seq INTEGER NOT NULL,
    fingerprint BLOB NOT NULL,
    schema_version INTEGER NOT NULL,
    expires_at INTEGER,
    suppressed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, key, kind)
) WITHOUT ROWID;

CREATE INDEX onefold_key_expires ON onefold_key (expires_at) WHERE expires_at IS NOT NULL;

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

-- The last report of each handler; apart, so that frequent reports do not rewrite the rows that are claimed and settled.
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
    kind INTEGER NOT NULL CHECK (kind BETWEEN {line_result} AND {line_undoing}),
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
    CASE coalesce(d.state, o.state)
        WHEN {scheduled} THEN 'scheduled' WHEN {leased} THEN 'leased' WHEN {parked} THEN 'parked'
        WHEN {done} THEN 'done' WHEN {dead} THEN 'dead' WHEN {cancelled} THEN 'cancelled'
        WHEN {discarded} THEN 'discarded'
    END AS state,
    coalesce(d.fence, o.fence) AS fence,
    coalesce(d.attempt, o.attempt) AS attempt,
    coalesce(d.crashes, o.crashes) AS crashes,
    coalesce(d.replay_count, o.replay_count) AS replay_count,
    m.created_at, d.due_at, o.ended_at, o.kept_until,
    CASE WHEN o.state = {dead} AND m.payload IS NOT NULL THEN o.body_until END AS redrive_until, d.worker,
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
            (r.kind = {line_result} AND r.name = b.name)
            OR (r.kind = {line_child} AND (r.name = b.name OR substr(r.name, 1, length(b.name) + 1) = b.name || '@')
                AND CAST(r.value AS TEXT) ->> '$.state' = {done}))
    ) AS completed_at,
    CAST(b.value AS TEXT) ->> '$.undo' AS undo,
    (
        SELECT max(r.at) FROM onefold_step r
        WHERE r.message_id = b.message_id AND (
            (r.kind = {line_result} AND r.name = 'undo:' || b.name)
            OR (r.kind = {line_child} AND (r.name = 'undo:' || b.name OR substr(r.name, 1, length('undo:' || b.name) + 1) = 'undo:' || b.name || '@')
                AND CAST(r.value AS TEXT) ->> '$.state' = {done}))
    ) AS undone_at
FROM onefold_step b
WHERE b.kind = {line_begun};

CREATE VIEW onefold_saga AS
SELECT
    m.id, m.message_type, m.schema_version, m.queue, m.subject, m.idempotency_key, m.correlation_id, m.created_at,
    o.ended_at,
    CASE
        WHEN o.state = {done} THEN 'completed'
        WHEN CAST(o.failure AS TEXT) ->> '$.reason' = 'compensated' THEN 'compensated'
        WHEN o.state IS NOT NULL THEN 'failed'
        WHEN EXISTS (
            SELECT 1 FROM onefold_step s JOIN onefold_saga_step b ON b.id = s.message_id
            WHERE s.message_id = m.id AND s.kind = {line_stuck} AND b.undone_at IS NULL
                AND substr(s.name, 1, length(b.name) + 6) = 'undo:' || b.name || '!'
        ) THEN 'stuck'
        WHEN EXISTS (
            SELECT 1 FROM onefold_step s
            WHERE s.message_id = m.id AND s.kind = {line_undo} AND (s.name = 'undo#' || d.replay_count
                OR EXISTS (SELECT 1 FROM onefold_step b WHERE b.message_id = m.id AND b.kind = {line_begun}))
        ) THEN 'compensating'
        WHEN EXISTS (SELECT 1 FROM onefold_saga_step b WHERE b.id = m.id AND b.completed_at IS NOT NULL)
            THEN 'completing'
        ELSE 'started'
    END AS status
FROM onefold_message m
LEFT JOIN onefold_delivery d ON d.seq = m.seq
LEFT JOIN onefold_outcome o ON o.seq = m.seq
WHERE CAST(m.headers AS TEXT) ->> '$.saga';
