"""The page at /, built from `web/`."""
