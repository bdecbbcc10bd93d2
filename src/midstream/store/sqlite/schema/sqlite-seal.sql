-- What this version adds: what an encrypted store says of where a journal ends, so that nobody can cut it unseen.

-- Written with an append that must survive a power cut; x'' where nothing encrypts this session.
alter table session add column seal blob not null default x'';
