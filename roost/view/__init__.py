"""A plan as people look at it."""
