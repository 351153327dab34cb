"""Files and batches as OpenAI's API has them."""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from jaxllm.serving.http.request_model import RequestModel
from jaxllm.serving.openai.sampling import PromptTokensDetails
from jaxllm.serving.responses.objects import OutputTokensDetails
from jaxllm.serving.responses.request import MetadataFields

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
"""What a client may upload a file for; only batch has a meaning here."""

MIN_EXPIRY_SECONDS = 3600
MAX_EXPIRY_SECONDS = 30 * 24 * 3600

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]  # fmt: skip
COMPLETION_WINDOWS = {"24h": 24 * 3600}
"""Seconds after its creation at which a batch expires."""


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
    order: Literal["asc", "desc"] = "desc"
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


class OutputExpiresAfter(RequestModel):
    anchor: Literal["created_at"]
    """Of the output and error files, not of the batch."""
    seconds: int = Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)
    """After which they are deleted: one hour to 30 days."""


class BatchRequest(MetadataFields):
    input_file_id: str
    """A file uploaded with purpose batch: one request a line."""
    endpoint: Endpoint
    """Where every line of the file goes."""
    completion_window: Literal["24h"]
    """What has not run by then expires."""
    output_expires_after: OutputExpiresAfter | None = None
    """When the output and error files are deleted; by default never."""


class BatchListQuery(Query):
    limit: int = Field(default=20, ge=1, le=100)
    """Most batches on a page."""
    after: str | None = None
    """The id of the last batch of the page before."""


class BatchError(msgspec.Struct, kw_only=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LineResponse(msgspec.Struct, kw_only=True):
    """The endpoint's answer to one line."""

    status_code: int
    request_id: str | None
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str


class LineResult(msgspec.Struct, kw_only=True):
    """One line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None
