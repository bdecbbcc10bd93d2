-- The tables of a midstream database. They are plain on purpose: look into them with any SQLite tool.
-- Read-only tools may look at any time; to write, close every midstream process first.
-- Times are seconds since 1970. `pragma user_version` names the version: 1 after this page, which `sqlite-2.sql` follows.

-- One row for each session. Plain appends do not touch it; claims and marks do.
create table session (
    id integer primary key autoincrement,   -- never used twice, not even after a delete
    name text not null unique,
    epoch integer not null,                 -- appends under any other epoch are refused
    owner text,                             -- alive while it holds <database>.owners/<owner>.lock; null: given up
    created_at real not null,
    -- The mark: what a listing shows.
    changed_at real not null,
    is_live integer not null default 0,     -- 1: a turn is open
    title text not null default '',
    turns integer not null default 0,
    status text not null default ''
) strict;

-- The journals. Rows are only ever added, or removed together with their session; pruning replaces the first ones by one
-- that holds what they fold to, in the place of the last of them. They lie in the order in which
-- they were appended, whoever appended, so that a commit of many sessions touches few pages: measured at 100
-- sessions, half the bytes and half the CPU of `without rowid`, where each session touches pages of its own.
create table record (
    session_id integer not null,
    position integer not null,              -- 1, 2, 3, ... without gap in each session; a pruned one begins later
    epoch integer not null,                 -- under which it was appended
    body blob not null,                     -- JSON, one record of midstream.session.records
    primary key (session_id, position)
) strict;

-- One row about the whole database.
create table ledger (
    epochs_spent integer not null,          -- highest epoch of any deleted session: a new one starts above it
    voided integer not null                 -- commits that failed half-way and were overwritten
) strict;

insert into ledger (epochs_spent, voided) values (0, 0);

-- For people: `select * from journal where session = '...'`.
create view journal as
    select session.name as session, record.position, record.epoch, cast(record.body as text) as body
    from record join session on session.id = record.session_id;
