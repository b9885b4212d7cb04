-- A message's life in five tables.
-- `message` never changes until its body is dropped; `delivery` is the narrow row that moves while it lives;
-- `outcome` replaces the delivery when it ended; `key` outlives both; `attempt` says what went wrong on the way.
-- Instants are microseconds since 1970, UTC; `lease_until` alone is on the machine's steady clock.

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

CREATE TABLE onefold_delivery (
    id TEXT NOT NULL PRIMARY KEY,
    queue TEXT NOT NULL,
    message_type TEXT NOT NULL,
    state INTEGER NOT NULL CHECK (state IN (0, 1)),
    due_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    fence INTEGER NOT NULL CHECK (fence >= 1),
    attempt INTEGER NOT NULL CHECK (attempt >= 0),
    crashes INTEGER NOT NULL CHECK (crashes >= 0),
    -- Whether its handler may have begun under the current lease, so that a worker's death may be its doing.
    started INTEGER NOT NULL DEFAULT 0 CHECK (started IN (0, 1)),
    replay_count INTEGER NOT NULL,
    lease_until INTEGER,
    worker TEXT,
    -- How much others have recorded for it; and, only while it is parked, at how much it is due.
    wake INTEGER NOT NULL DEFAULT 0,
    wake_target INTEGER CHECK (wake_target IS NULL OR state = 0),
    CHECK ((state = 1) = (lease_until IS NOT NULL)),
    CHECK ((state = 1) = (worker IS NOT NULL))
) WITHOUT ROWID;

-- What may be claimed, in the order in which it is: one short range per queue.
CREATE INDEX onefold_delivery_due ON onefold_delivery (queue, due_at) WHERE state = 0;
-- Leases that may have run out.
CREATE INDEX onefold_delivery_lease ON onefold_delivery (lease_until) WHERE state = 1;
-- The few that a worker died with, for those who run or judge them apart.
CREATE INDEX onefold_delivery_crashed ON onefold_delivery (queue, due_at) WHERE crashes > 0;

CREATE TABLE onefold_outcome (
    id TEXT NOT NULL PRIMARY KEY,
    queue TEXT NOT NULL,
    state INTEGER NOT NULL CHECK (state IN (3, 4, 5, 6)),
    fence INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    crashes INTEGER NOT NULL,
    replay_count INTEGER NOT NULL,
    ended_at INTEGER NOT NULL,
    kept_until INTEGER NOT NULL,
    purge_at INTEGER NOT NULL,
    result BLOB,
    failure BLOB,
    CHECK ((state = 3) = (result IS NOT NULL)),
    CHECK ((state IN (4, 6)) = (failure IS NOT NULL))
) WITHOUT ROWID;

-- The next time that anything of an ended message is to be removed: first its body, then all of it.
CREATE INDEX onefold_outcome_purge ON onefold_outcome (purge_at);
CREATE INDEX onefold_outcome_dead ON onefold_outcome (id) WHERE state = 4;

CREATE TABLE onefold_key (
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    kind INTEGER NOT NULL CHECK (kind IN (0, 1, 2)),
    message_id TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    schema_version INTEGER NOT NULL,
    expires_at INTEGER,
    suppressed INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, key, kind)
) WITHOUT ROWID;

CREATE INDEX onefold_key_expires ON onefold_key (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE onefold_attempt (
    message_id TEXT NOT NULL,
    fence INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    at INTEGER NOT NULL,
    worker TEXT NOT NULL,
    failure BLOB NOT NULL,
    delay REAL,
    PRIMARY KEY (message_id, fence)
) WITHOUT ROWID;

-- The journals: what the owner of a message did step by step, and what others told it.
CREATE TABLE onefold_step (
    seq INTEGER PRIMARY KEY,
    message_id TEXT NOT NULL,
    name TEXT NOT NULL,
    kind INTEGER NOT NULL CHECK (kind BETWEEN 0 AND 11),
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

CREATE TABLE onefold_event (
    seq INTEGER PRIMARY KEY,
    at INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    actor TEXT NOT NULL,
    reason TEXT NOT NULL
);

CREATE INDEX onefold_event_message ON onefold_event (message_id);

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
    CASE coalesce(CASE WHEN d.wake_target IS NULL THEN d.state ELSE 2 END, o.state)
        WHEN 0 THEN 'scheduled' WHEN 1 THEN 'leased' WHEN 2 THEN 'parked' WHEN 3 THEN 'done' WHEN 4 THEN 'dead'
        WHEN 5 THEN 'cancelled' WHEN 6 THEN 'discarded'
    END AS state,
    coalesce(d.fence, o.fence) AS fence,
    coalesce(d.attempt, o.attempt) AS attempt,
    coalesce(d.crashes, o.crashes) AS crashes,
    coalesce(d.replay_count, o.replay_count) AS replay_count,
    m.created_at, d.due_at, o.ended_at, o.kept_until, d.worker,
    o.result, o.failure
FROM onefold_message m
LEFT JOIN onefold_delivery d ON d.id = m.id
LEFT JOIN onefold_outcome o ON o.id = m.id;
