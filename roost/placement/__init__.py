"""Who runs where: strategies, component placements, and the plan they make."""
