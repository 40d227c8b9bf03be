"""A static reader of bash scripts: it finds the commands that a script would start, and runs nothing."""
