"""What agents act in: a small protocol, and adapters to environments that others made."""
