"""Adapters: how they are read, kept in host memory, and share the few places on the devices."""
