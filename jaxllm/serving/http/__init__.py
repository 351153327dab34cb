"""The HTTP that every API needs: bodies checked, errors, streams, the OpenAPI document."""
