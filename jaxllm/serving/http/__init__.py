"""What every API needs of HTTP: bodies checked, errors, streams, the OpenAPI document."""
