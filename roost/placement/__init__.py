"""Placement: strategies, component placements, and the plan."""
