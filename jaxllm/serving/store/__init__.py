"""The database of what outlives a request. Each API keeps its own tables in it, defined in the API's own folder.

`versions/` has the changes of the tables in Alembic's form. A version that was released stays: a change is a new file.
"""
