"""Where pydantic is not installed, nothing is checked that could fail."""

from __future__ import annotations


class PydanticKnownError(ValueError):
    """Why a value is refused."""
