"""The engine: runs sessions and executes their pending work."""
