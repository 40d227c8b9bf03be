"""Nodes, node groups, and their resources."""
