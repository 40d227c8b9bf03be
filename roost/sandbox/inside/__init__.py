"""What runs in the sandboxed process. Standard library only: it starts for every sandbox, and has to start fast."""
