-- A message's life in five tables.
-- `message` never changes until its body is dropped; `delivery` is the narrow row that moves while it lives;
-- `outcome` replaces the delivery when it ended; `key` outlives both; `attempt` says what went wrong on the way.
-- Instants are microseconds since 1970, UTC, on the server's clock.
-- Text that is indexed is compared byte by byte: faster than a language's rules, and the same after an upgrade of them.
-- The server parses every CHECK again for every statement, a sixth of the cost of storing one message; so there is one
-- for each of the two tables in which a mistake would do harm, and that of the delivery is short.

-- Not now(), which stands still for the length of a transaction.
-- Its body is not kept as text, so that its names are resolved here, whatever the search path of the caller.
CREATE FUNCTION onefold.clock() RETURNS bigint
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN (extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000::numeric)::bigint;

-- Ends a transaction whose lease was taken over, before the COMMIT that is already on its way.
CREATE FUNCTION onefold.refuse_stale() RETURNS boolean
LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
SET search_path = pg_catalog, pg_temp
AS 'BEGIN RAISE EXCEPTION ''the lease was taken over'' USING ERRCODE = ''OF001''; END';

CREATE TABLE onefold.message (
    id uuid PRIMARY KEY,
    message_type text COLLATE "C" NOT NULL,
    schema_version integer NOT NULL,
    queue text COLLATE "C" NOT NULL,
    idempotency_key text COLLATE "C" NOT NULL,
    correlation_id text NOT NULL,
    causation_id text NOT NULL,
    subject text NOT NULL,
    created_at bigint NOT NULL,
    retention bigint NOT NULL,
    payload bytea,
    headers bytea
);

-- Messages that were caused by another; those that begin a chain are found by their id and are not in the index.
CREATE INDEX message_correlation ON onefold.message (correlation_id) WHERE correlation_id <> id::text;

CREATE TABLE onefold.delivery (
    id uuid PRIMARY KEY,
    due_at bigint NOT NULL,
    expires_at bigint NOT NULL,
    fence bigint NOT NULL,
    lease_until bigint,
    attempt integer NOT NULL,
    crashes integer NOT NULL,
    replay_count integer NOT NULL,
    state smallint NOT NULL,
    -- Whether its handler may have begun under the current lease, so that a worker's death may be its doing.
    started smallint NOT NULL DEFAULT 0,
    -- How many lines others have recorded for it; and, only while it is parked, at how many it is due.
    wake integer NOT NULL DEFAULT 0,
    wake_target bigint,
    -- Which call of claim took it, so that a lost answer can be asked for again.
    call bigint,
    priority smallint NOT NULL DEFAULT 0,
    -- The gate it waits at, if any; and its place if that is a line: its number, or a place before all numbers.
    gate text COLLATE "C",
    place bigint,
    queue text COLLATE "C" NOT NULL,
    message_type text COLLATE "C" NOT NULL,
    worker text,
    -- It has a lease and a worker exactly while it is leased, and a target exactly while it is parked: the sum is 0 for a
    -- scheduled row, 2 for a leased one and 4 for a parked one.
    CHECK (pg_catalog.num_nonnulls(lease_until, worker) + 4 * pg_catalog.num_nonnulls(wake_target) = 2 * state
        AND state <= {parked})
) WITH (
    -- Every message leaves two dead rows here, so the table is cleaned after a number of them, however large it is,
    -- and without pauses: a claim walks past what has not been cleaned yet.
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_threshold = -1,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_threshold = 5000,
    autovacuum_analyze_scale_factor = 0.1
);

-- Claimable messages: one short range for each priority and type, so that a claim never visits a type that its worker
-- does not know.
CREATE INDEX delivery_due ON onefold.delivery (queue, priority, message_type, due_at)
    WHERE state <> {leased} AND gate IS NULL;
-- Messages that wait at gates without an order; the gates themselves are found by leaping from one to the next.
CREATE INDEX delivery_crowd ON onefold.delivery (queue, gate, priority, message_type, due_at)
    WHERE state <> {leased} AND gate IS NOT NULL AND place IS NULL;
-- At which gates messages have become due since a claim last looked.
CREATE INDEX delivery_gate_due ON onefold.delivery (queue, message_type, due_at) INCLUDE (gate, place)
    WHERE state <> {leased} AND gate IS NOT NULL;
-- Lines, each beginning with its head, whatever state that is in.
CREATE INDEX delivery_line ON onefold.delivery (gate, place) WHERE place IS NOT NULL;
-- Of a line one message runs at a time, whatever claims race for it.
CREATE UNIQUE INDEX delivery_turn ON onefold.delivery (gate) WHERE place IS NOT NULL AND state = {leased};
-- The other messages that run behind a gate: caps are counted from these two indexes.
CREATE INDEX delivery_inside ON onefold.delivery (gate) WHERE state = {leased} AND gate IS NOT NULL AND place IS NULL;
-- Leases that may have run out.
CREATE INDEX delivery_lease ON onefold.delivery (lease_until) WHERE state = {leased};
-- Messages that workers died with: few, and some workers take nothing else.
CREATE INDEX delivery_crashed ON onefold.delivery (queue, due_at) WHERE crashes > 0;
-- For people: messages that are parked, and runs of workflows, which are claimed by their type and version.
CREATE INDEX delivery_parked ON onefold.delivery (id) WHERE state = {parked};
CREATE INDEX delivery_run ON onefold.delivery (id) WHERE pg_catalog.strpos(message_type, '@') > 0;

-- Places of messages without a number, in the order of their puts.
CREATE SEQUENCE onefold.place MINVALUE -4611686018427387904 START -4611686018427387904 MAXVALUE -1;

-- A gate's tokens as of an instant, and the last number of its line that has ended.
-- The row of a name without a key stands for all gates of that name.  A claim at a limited gate locks its row.
CREATE TABLE onefold.gate (
    gate text COLLATE "C" PRIMARY KEY,
    tokens double precision,
    at bigint,
    last bigint,
    -- When the row is of no more use: the bucket is full again, and the line's numbers may be forgotten.
    expires_at bigint NOT NULL
);

CREATE INDEX gate_expires ON onefold.gate (expires_at);

CREATE TABLE onefold.outcome (
    id uuid PRIMARY KEY,
    fence bigint NOT NULL,
    ended_at bigint NOT NULL,
    kept_until bigint NOT NULL,
    body_until bigint NOT NULL,
    attempt integer NOT NULL,
    crashes integer NOT NULL,
    replay_count integer NOT NULL,
    state smallint NOT NULL,
    queue text COLLATE "C" NOT NULL,
    result bytea,
    failure bytea,
    CHECK (CASE state
        WHEN {done} THEN result IS NOT NULL AND failure IS NULL
        WHEN {dead} THEN result IS NULL AND failure IS NOT NULL
        WHEN {cancelled} THEN result IS NULL AND failure IS NULL
        WHEN {discarded} THEN result IS NULL AND failure IS NOT NULL
        ELSE false END)
);

-- In which order ended messages are purged: first the body, then the rest.
CREATE INDEX outcome_body ON onefold.outcome (body_until);
CREATE INDEX outcome_kept ON onefold.outcome (kept_until);
CREATE INDEX outcome_dead ON onefold.outcome (id) INCLUDE (queue, ended_at) WHERE state = {dead};

-- One row.  Bodies that were to be kept until `bodies` or less are gone: one row for all of them is cheaper than to
-- write it into every outcome.  A purger locks it.
CREATE TABLE onefold.purge (bodies bigint NOT NULL);

INSERT INTO onefold.purge (bodies) VALUES (0);

CREATE TABLE onefold.key (
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    kind smallint NOT NULL,
    schema_version integer NOT NULL,
    suppressed integer NOT NULL DEFAULT 0,
    message_id uuid NOT NULL,
    expires_at bigint,
    fingerprint bytea NOT NULL,
    PRIMARY KEY (scope, key, kind)
);

CREATE INDEX key_expires ON onefold.key (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE onefold.attempt (
    message_id uuid NOT NULL,
    fence bigint NOT NULL,
    attempt integer NOT NULL,
    at bigint NOT NULL,
    worker text NOT NULL,
    failure bytea NOT NULL,
    delay double precision,
    PRIMARY KEY (message_id, fence)
);

-- The last reports of handlers; apart from the delivery, so that frequent reports do not rewrite the row that is claimed
-- and settled.
CREATE TABLE onefold.progress (
    message_id uuid PRIMARY KEY,
    fence bigint NOT NULL,
    percent double precision NOT NULL CHECK (percent BETWEEN 0 AND 100),
    message text NOT NULL,
    at bigint,
    beat_at bigint NOT NULL
);

-- The journals: the steps of a message's owner, and the lines that others have recorded for it.
CREATE TABLE onefold.step (
    message_id uuid NOT NULL,
    name text COLLATE "C" NOT NULL,
    kind smallint NOT NULL CHECK (kind BETWEEN 0 AND 15),
    seq bigint GENERATED ALWAYS AS IDENTITY,
    at bigint NOT NULL,
    fingerprint bytea NOT NULL,
    -- Null when it is so large that it lies in parts.
    value bytea,
    PRIMARY KEY (message_id, name, kind)
);

CREATE TABLE onefold.blob (
    message_id uuid NOT NULL,
    name text COLLATE "C" NOT NULL,
    part integer NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (message_id, name, part)
);

CREATE TABLE onefold.act (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at bigint NOT NULL,
    message_id uuid NOT NULL,
    kind text NOT NULL,
    actor text NOT NULL,
    reason text NOT NULL
);

CREATE INDEX act_message ON onefold.act (message_id);

CREATE TABLE onefold.register (
    kind text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    value bytea NOT NULL,
    version bigint NOT NULL,
    expires_at bigint,
    PRIMARY KEY (kind, name)
);

-- For operators and their own tools: the inbox with names that stay when the tables change.
CREATE VIEW onefold.inbox AS
SELECT
    m.id, m.message_type, m.schema_version, m.queue, m.subject, m.idempotency_key, m.correlation_id, m.causation_id,
    CASE coalesce(d.state, o.state)
        WHEN {scheduled} THEN 'scheduled' WHEN {leased} THEN 'leased' WHEN {parked} THEN 'parked' WHEN {done} THEN 'done' WHEN {dead} THEN 'dead'
        WHEN {cancelled} THEN 'cancelled' WHEN {discarded} THEN 'discarded'
    END AS state,
    coalesce(d.fence, o.fence) AS fence,
    coalesce(d.attempt, o.attempt) AS attempt,
    coalesce(d.crashes, o.crashes) AS crashes,
    coalesce(d.replay_count, o.replay_count) AS replay_count,
    m.created_at, d.due_at, o.ended_at, o.kept_until,
    CASE WHEN o.state = {dead} AND m.payload IS NOT NULL THEN o.body_until END AS redrive_until, d.worker,
    o.result, o.failure
FROM onefold.message m
LEFT JOIN onefold.delivery d ON d.id = m.id
LEFT JOIN onefold.outcome o ON o.id = m.id;

-- Sagas and their steps as read from their journals, by the same rules as ``app.saga_status``.
CREATE VIEW onefold.saga_step AS
SELECT
    b.message_id AS id, b.name, b.at AS started_at,
    (
        SELECT pg_catalog.max(r.at) FROM onefold.step r
        WHERE r.message_id = b.message_id AND (
            (r.kind = {line_result} AND r.name = b.name)
            OR (r.kind = {line_child} AND (r.name = b.name OR pg_catalog.substr(r.name, 1, pg_catalog.length(b.name) + 1) = b.name || '@')
                AND (pg_catalog.convert_from(r.value, 'UTF8')::json ->> 'state')::int = {done}))
    ) AS completed_at,
    pg_catalog.convert_from(b.value, 'UTF8')::json ->> 'undo' AS undo,
    (
        SELECT pg_catalog.max(r.at) FROM onefold.step r
        WHERE r.message_id = b.message_id AND (
            (r.kind = {line_result} AND r.name = 'undo:' || b.name)
            OR (r.kind = {line_child} AND (r.name = 'undo:' || b.name OR pg_catalog.substr(r.name, 1, pg_catalog.length('undo:' || b.name) + 1) = 'undo:' || b.name || '@')
                AND (pg_catalog.convert_from(r.value, 'UTF8')::json ->> 'state')::int = {done}))
    ) AS undone_at
FROM onefold.step b
WHERE b.kind = {line_begun};

CREATE VIEW onefold.saga AS
SELECT
    m.id, m.message_type, m.schema_version, m.queue, m.subject, m.idempotency_key, m.correlation_id, m.created_at,
    o.ended_at,
    CASE
        WHEN o.state = {done} THEN 'completed'
        WHEN pg_catalog.convert_from(o.failure, 'UTF8')::json ->> 'reason' = 'compensated' THEN 'compensated'
        WHEN o.state IS NOT NULL THEN 'failed'
        WHEN EXISTS (
            SELECT 1 FROM onefold.step s JOIN onefold.saga_step b ON b.id = s.message_id
            WHERE s.message_id = m.id AND s.kind = {line_stuck} AND b.undone_at IS NULL
                AND pg_catalog.substr(s.name, 1, pg_catalog.length(b.name) + 6) = 'undo:' || b.name || '!'
        ) THEN 'stuck'
        WHEN EXISTS (
            SELECT 1 FROM onefold.step s
            WHERE s.message_id = m.id AND s.kind = {line_undo} AND (s.name = 'undo#' || d.replay_count
                OR EXISTS (SELECT 1 FROM onefold.step b WHERE b.message_id = m.id AND b.kind = {line_begun}))
        ) THEN 'compensating'
        WHEN EXISTS (SELECT 1 FROM onefold.saga_step b WHERE b.id = m.id AND b.completed_at IS NOT NULL)
            THEN 'completing'
        ELSE 'started'
    END AS status
FROM onefold.message m
LEFT JOIN onefold.delivery d ON d.id = m.id
LEFT JOIN onefold.outcome o ON o.id = m.id
WHERE (pg_catalog.convert_from(m.headers, 'UTF8')::json ->> 'saga')::boolean;
