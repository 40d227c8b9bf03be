"""Environments: a small protocol, and adapters to other libraries."""
