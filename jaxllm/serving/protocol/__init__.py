"""What requests and responses look like on the wire: pydantic models in, msgspec structs out."""
