"""The page at /docs, which shows the API in a browser."""
