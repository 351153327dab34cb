"""From a config to a running engine."""
