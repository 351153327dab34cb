"""/v1/responses: from items to a chat, from a chat to events and items, and runs that outlive their request."""
