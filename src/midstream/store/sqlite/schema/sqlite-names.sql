-- What this version changes: the standard names of what is stored.

alter table shelf_entry rename to key_value;
alter table key_value rename column shelf to namespace;
