-- What version 2 adds: commands on their way to the owner of a session, and a quick look at open turns.

-- A command that reached a process which does not own its session. The owner decides it, its answer goes to the sender,
-- who removes the row.
create table inbox (
    number integer primary key autoincrement,
    session text not null,
    sender text not null,                   -- the owner (see session.owner) that waits for the answer
    body blob not null,
    answer blob                             -- null: nobody has decided it yet
) strict;

-- Open turns by their owner: who died with some, and which were given up, is asked many times a second.
create index session_live on session (owner) where is_live = 1;

