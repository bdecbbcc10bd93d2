-- The tables of a midstream database. They are plain on purpose: any SQLite tool reads them.
-- Read-only tools may read at any time; to write, stop every midstream process first.
-- Times are seconds since 1970. `pragma user_version` is the version of this schema.

-- One row for each session. Appends do not change it; claims and the fields of the listing do.
create table session (
    id integer primary key autoincrement,   -- never used twice, not even after a delete
    name text not null unique,
    epoch integer not null,                 -- appends under any other epoch are refused
    node text,                              -- alive while it holds <database>.nodes/<node>.lock; null: released
    created_at real not null,
    -- The fields of a listing.
    changed_at real not null,
    is_live integer not null default 0,     -- 1: a turn is open
    title text not null default '',
    turns integer not null default 0,
    status text not null default '',
    -- The seal of an encrypted journal: where it ends, so that a cut is detected. Written with each synced append;
    -- x'' where nothing encrypts this session.
    seal blob not null default x''
) strict;

-- Open turns by node: read many times a second to find those of dead nodes and those that were released.
create index session_live on session (node) where is_live = 1;

-- Listings, last changed first: a page is found by the place behind which it begins.
create index session_changed on session (changed_at, name);

-- The journals. Rows are only added, or deleted together with their session; pruning replaces the first rows by one
-- that holds the session they fold to, at the position of the last of them. Rows lie in the order of the appends of all
-- sessions, so that a commit of many sessions writes few pages: at 100 sessions half the bytes and half the CPU of
-- `without rowid`, where each session writes pages of its own.
create table record (
    session_id integer not null,
    position integer not null,              -- 1, 2, 3, ... without gap in each session; a pruned one begins later
    epoch integer not null,                 -- under which it was appended
    body blob not null,                     -- JSON, one record of midstream.session.records
    link blob not null default x'',         -- of the last record of an append: binds it to the one before; docs/spec/security.md
    primary key (session_id, position)
) strict;

-- Large results, stored beside the records that name them.
create table blob (
    session_id integer not null,
    digest text not null,                   -- of the body; see midstream.session.blobs
    body blob not null,                     -- the whole result, in UTF-8
    primary key (session_id, digest)
) strict;

-- Commands that reached a node without the lease of their session. The node with the lease decides one and writes the
-- answer; the sender deletes the row.
create table inbox (
    number integer primary key autoincrement,
    session text not null,
    sender text not null,                   -- the node (see session.node) that waits for the answer
    body blob not null,
    answer blob                             -- null: not decided yet
) strict;

-- Small versioned values by name, such as a pool's records of its agents.
create table key_value (
    namespace text not null,
    key text not null,
    version integer not null,               -- one more with each write; a replacement names the version that was read
    body blob not null,
    at real not null,                       -- of the last write
    primary key (namespace, key)
) strict, without rowid;

-- One row about the whole database.
create table ledger (
    epochs_spent integer not null,          -- highest epoch of any deleted session: a new one starts above it
    voided integer not null,                -- commits that failed half-way and were overwritten
    versions_spent integer not null         -- highest version of any deleted key-value entry: a new one starts above it
) strict;

insert into ledger (epochs_spent, voided, versions_spent) values (0, 0, 0);

-- For people: `select * from journal where session = '...'`.
create view journal as
    select session.name as session, record.position, record.epoch, cast(record.body as text) as body
    from record join session on session.id = record.session_id;
