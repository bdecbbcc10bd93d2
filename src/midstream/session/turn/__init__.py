"""The turn: decide, evolve, owed.

All rules of a turn stand in this package, and nothing here acts. Theory of operation: `decide` judges a command and
returns the records to append; `evolve` folds a record that is in the journal; `pending_work` returns what the state
still needs done. The runner appends what is decided, folds it, and starts or stops whatever `pending_work` gained or
lost. A new node does the same after one `Recover`, so recovery is no special path; and neither is cancelling: what
is no longer owed is stopped.

    Idle ──message──▶ AwaitingModel ──response──▶ RunningCalls ──last outcome──▶ AwaitingModel (next response)
                          │    ▲                   │                               │
                          │    └─attempt n+1       └──cancel──▶ Cancelling         └─ a response without calls
                          └────── cancel, failure, end ──────────────┴──────────────▶ Idle

A call of `RunningCalls` may wait for a person; the turn waits with it, across restarts and for days. So may an
upstream's agent in the middle of `AwaitingModel`; but its wait ends with the process, and its next attempt asks anew.

A command that is late, repeated or about something else decides to no record at all (TURN-9): that happens
whenever a node died or a cancel was faster, and it is no error.

Where things stand: `states` (and limits), `commands`, `deciding`, `batches` (the calls of one response), `asking`
(permissions of upstream agents), `folding`, `owing`.
"""
