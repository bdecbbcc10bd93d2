"""The HTTP interface: its endpoints, its description, its errors."""
