"""The demo: a conversation, a cut, a kill, and a check of the files."""
