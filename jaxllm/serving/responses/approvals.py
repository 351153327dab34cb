"""Answers to calls that waited for approval."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxllm.errors import Field, InvalidRequestError
from jaxllm.serving.responses.items import Item
from jaxllm.wording import shown


def approved_calls(context: Sequence[Item], own: Sequence[Item], labels: Collection[str]) -> list[Item]:
    """The approval requests in `context` that `own`, its end, approves, and that have not been run since.

    Raises InvalidRequestError where an answer has no request before it, is the second one, or approves a call of a
    server that is not in `labels`.
    """
    requests: dict[str, Item] = {}
    answered: set[str] = set()
    places = {id(item): at for at, item in enumerate(own)}
    approved: dict[str, Item] = {}
    for item in context:
        match item["type"]:
            case "mcp_approval_request":
                requests[item["id"]] = item
            case "mcp_call":
                approved.pop(item["approval_request_id"], None)
            case "mcp_approval_response" if (at := places.get(id(item))) is not None:
                asked = item["approval_request_id"]
                _check(item, at, requests, answered, labels)
                if item["approve"]:
                    approved[asked] = requests[asked]
                answered.add(asked)
            case "mcp_approval_response":
                answered.add(item["approval_request_id"])
    return list(approved.values())


def _check(
    answer: Item, at: int, requests: dict[str, Item], answered: Collection[str], labels: Collection[str]
) -> None:
    field, asked = Field("input", at, "approval_request_id"), answer["approval_request_id"]
    if asked not in requests:
        waiting = [name for name in requests if name not in answered]
        known = f"those that wait are {', '.join(waiting)}" if waiting else "nothing waits for approval there"
        raise InvalidRequestError([field, f" is {shown(asked)}, which no mcp_approval_request before it has; {known}"])
    if asked in answered:
        raise InvalidRequestError([field, f" is {shown(asked)}, which has been answered already"])
    label = requests[asked]["server_label"]
    if answer["approve"] and label not in labels:
        raise InvalidRequestError([field, f" is of a call of server {shown(label)}, which is not in tools"])
