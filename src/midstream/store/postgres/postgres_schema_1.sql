-- Version 1 of the tables of a midstream store in PostgreSQL, in a schema of their own (`midstream` by default).
-- They are plain on purpose: any PostgreSQL tool reads them. Times are seconds since 1970, except in `node`.

-- One row about the whole store.
create table ledger (
    schema_version integer not null,
    epochs_spent bigint not null default 0,    -- highest epoch of any deleted session: a new one starts above it
    versions_spent bigint not null default 0,  -- highest version of any deleted key-value entry: see above
    timeline text not null default '',         -- of the server, when it was last opened
    era integer not null default 0             -- changes of the timeline: promotions of a replica, restores
);

insert into ledger (schema_version) values (1);

-- One row for each node, from its start until its end was noticed. It lives while it holds the advisory lock
-- (oid of this schema, number). Numbers are never used twice.
create table node (
    number integer generated always as identity primary key,
    name text not null,
    address text not null,                     -- host and process, for people
    joined_at timestamptz not null default now(),
    seen_at timestamptz not null default now() -- its last heartbeat
) with (fillfactor = 50);

-- One row for each session. An append updates it in place: none of the indexed columns changes.
create table session (
    id bigint generated always as identity primary key,  -- never used twice, not even after a delete
    name text collate "C" not null unique,
    epoch bigint not null,                     -- appends under any other epoch are refused
    era integer not null,                      -- of the ledger, at the last claim
    node integer,                              -- the number of its node; null: released
    last bigint not null default 0,            -- position of the last record
    created_at double precision not null,
    -- The fields of a listing.
    changed_at double precision not null,
    is_live boolean not null default false,    -- a turn is open
    title text not null default '',
    turns integer not null default 0,
    status text not null default '',
    -- The seal of an encrypted journal: where it ends, so that a cut is detected; empty where nothing encrypts it.
    seal bytea not null default ''
) with (fillfactor = 70);

create index session_changed on session (changed_at desc, name desc);
-- Open turns by node: read each second to find those of dead nodes and those that were released.
create index session_live on session (node) where is_live;
create index session_node on session (node) where node is not null;

-- The journals. Rows are only added, or deleted together with their session; pruning replaces the first rows by one that
-- holds the session they fold to, at the position of the last of them.
create table record (
    session_id bigint not null,
    position bigint not null,                  -- 1, 2, 3, ... without gap in each session; a pruned one begins later
    epoch bigint not null,                     -- under which it was appended
    body bytea not null,                       -- JSON, one record of midstream.session.records
    primary key (session_id, position)
);

-- Large results, stored beside the records that name them.
create table blob (
    session_id bigint not null,
    digest text collate "C" not null,          -- of the body; see midstream.session.blobs
    body bytea not null,
    primary key (session_id, digest)
);

-- Commands that reached a node without the lease of their session. The node with the lease decides one and writes the
-- answer; the sender deletes the row.
create table inbox (
    number bigint generated always as identity primary key,
    session text collate "C" not null,
    sender integer not null,                   -- the node that waits for the answer
    body bytea not null,
    answer bytea                               -- null: not decided yet
);

-- Small versioned values by name, such as a pool's records of its agents.
create table key_value (
    namespace text collate "C" not null,
    key text collate "C" not null,
    version bigint not null,                   -- one more with each write; a replacement names the version that was read
    body bytea not null,
    at double precision not null,              -- of the last write
    primary key (namespace, key)
);

-- For people: `select * from midstream.journal where session = '...'`.
create view journal as
    select session.name as session, record.position, record.epoch,
        case when get_byte(record.body || '\x00', 0) = 123 then convert_from(record.body, 'UTF8') end as body
    from record join session on session.id = record.session_id;
