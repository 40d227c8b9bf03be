"""The model being trained: what it learns from, its losses, its sharding, and what is kept of it."""
