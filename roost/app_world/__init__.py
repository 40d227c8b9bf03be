"""A world of small apps for agents that write code: its state, its APIs, its tasks and how they are scored."""
