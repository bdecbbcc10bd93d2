-- What this version adds: small values kept by name, such as what a pool knows of its agents.

create table shelf_entry (
    shelf text not null,
    key text not null,
    version integer not null,               -- one more with each write; who replaces an entry names what was read
    body blob not null,
    at real not null,                       -- of the last write
    primary key (shelf, key)
) strict, without rowid;

-- Highest version of any dropped entry: a new one starts above it.
alter table ledger add column versions_spent integer not null default 0;
