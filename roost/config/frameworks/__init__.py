"""Jobs of other frameworks, as their users have them: shell scripts, read into the same `Job`."""
