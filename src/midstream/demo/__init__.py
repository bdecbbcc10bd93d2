"""The demo: a conversation, a cut, a kill, and what the files say afterwards."""
