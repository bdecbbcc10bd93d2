"""The demo: a conversation, a cut, a kill, and what is in the files afterwards."""
