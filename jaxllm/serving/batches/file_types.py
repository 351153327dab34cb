"""/v1/files"""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
"""What a client may upload a file for; only batch has a meaning here."""

Order = Literal["asc", "desc"]

MIN_EXPIRY_SECONDS = 3600
MAX_EXPIRY_SECONDS = 30 * 24 * 3600


class Query(BaseModel):
    """Parameters of an address: unknown ones are refused, numbers are written as text."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class FileListQuery(Query):
    purpose: str | None = None
    """Only files of this purpose."""
    limit: int = Field(default=10_000, ge=1, le=10_000)
    """Most files on a page."""
    after: str | None = None
    """The id of the last file of the page before."""
    order: Order = "desc"
    """By time of creation; desc begins with the newest."""


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True
