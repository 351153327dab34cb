"""In whose name a request comes, and what that name may do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from jaxllm.config.values import split_if_text
from jaxllm.errors import InvalidRequestError
from jaxllm.serving.http.api_error import APIError
from jaxllm.serving.http.route import TENANT

Positive = Annotated[int, Field(ge=1)]


class Tenant(BaseModel):
    """What requests of one name may do; by default all that a server without a file of keys lets everybody do."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str | None = None
    """The key's in the file of keys; null for whoever has a key of `--api-key`, or needs none."""
    models: Annotated[frozenset[str] | None, BeforeValidator(split_if_text)] = None
    """Names of the models that it may use (default: all). It is not told of others."""
    priority_ceiling: int | None = None
    """The lowest `priority` that its requests may ask for: lower runs earlier. Null allows any."""
    max_concurrency: Positive | None = None
    """Most of its requests that may be under way at once (default: any number)."""
    requests_per_minute: Positive | None = None
    """Most requests that it may send in a minute (default: any number)."""
    tokens_per_minute: Positive | None = None
    """Most tokens that its requests may use in a minute, of prompts and answers together (default: any number)."""
    own_cache: bool = False
    """Share cached prefixes of prompts only among its own requests, so that times tell nobody what others have sent."""
    admin: bool = False
    """Whether it may unload models, put them to sleep, and change adapters and weights. Any request wakes one up."""

    @property
    def group(self) -> str:
        """What the engine tells its requests from others' by: see FairQueue."""
        return self.name or ""

    def may_use(self, names: Iterable[str]) -> bool:
        """Whether a model of these names is one of its own."""
        return self.models is None or not self.models.isdisjoint(names)

    def cache_salt(self, asked: str | None) -> str | None:
        """Of a request that brings one: only requests with the same share cached prefixes."""
        return asked

    def priority(self, asked: int) -> int:
        """Of a request that asks for one; 0 is what it asks for that says nothing, which may be less than allowed.

        Raises InvalidRequestError where it asks for more than is allowed.
        """
        ceiling = self.priority_ceiling
        if ceiling is None or asked >= ceiling:
            return asked
        if asked:
            raise InvalidRequestError(
                f"priority is {asked}; with this API key it must be {ceiling} or more", "priority"
            )
        return ceiling


OTHERS = Tenant(admin=True)
"""Whoever calls a server without keys, or with one of `--api-key`."""


def tenant_of(request: Request) -> Tenant:
    """In whose name a request comes that its route has let in."""
    tenant: Tenant = request.scope[TENANT]
    return tenant


def check_admin(request: Request, what: str = "unload models or put them to sleep") -> None:
    """Raises 403 where a request may not do `what` only some keys may do."""
    if not tenant_of(request).admin:
        message = f"this API key may not {what}; that needs `admin: true` in the file of keys"
        raise APIError(403, message, type="permission_error", code="not_admin")
