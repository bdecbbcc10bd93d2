"""The HTTP interface: endpoints, OpenAPI document, errors."""
