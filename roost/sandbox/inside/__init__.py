"""Code of the sandboxed process. Standard library only, because it must start fast for every sandbox."""
