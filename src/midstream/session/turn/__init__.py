"""The turn: commands, records, state and pending work.

This package has all rules of a turn, and is pure. `decide` returns the records of a command; `evolve` folds a journaled
record; `pending_work` returns what the state still needs done. The runner appends the records, folds them, and starts
or stops work according to `pending_work`. A new node does the same after one `Recover`, so recovery is no special path.
Cancelling is no special path either: work that is no longer pending is stopped.

    Idle ──message──▶ AwaitingModel ──response──▶ RunningCalls ──last outcome──▶ AwaitingModel (next response)
                          │    ▲                   │                               │
                          │    └─attempt n+1       └──cancel──▶ Cancelling         └─ a response without calls
                          └────── cancel, failure, end ──────────────┴──────────────▶ Idle

A call of `RunningCalls` may wait for a person; the turn waits with it, across restarts and for days. An upstream's
agent may also wait for a person during `AwaitingModel`; but its wait ends with the process, and its next attempt asks
again.

A late or repeated command, or one about another turn, has no records (TURN-9). It is no error: a node may have died, or
a cancellation may have been faster.

Modules: `states` (and limits), `commands`, `deciding`, `call_batches` (the calls of one response), `approvals`
(permissions of upstream agents), `folding`, `pending`.
"""
