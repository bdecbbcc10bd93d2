"""Authentication and authorization of requests and streams."""
