-- What this version adds: large results, apart from the records that name them.

create table blob (
    session_id integer not null,
    digest text not null,                   -- of the body; see midstream.session.blobs
    body blob not null,                     -- the whole of a result, in UTF-8
    primary key (session_id, digest)
) strict;
