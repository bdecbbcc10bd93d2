"""Records, commands, state and pending work of a session. Pure."""
