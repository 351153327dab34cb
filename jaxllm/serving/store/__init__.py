"""The database of what outlives a request. Each API keeps its own tables in it, defined in the API's own folder."""
