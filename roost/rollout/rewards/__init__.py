"""Rewards that score answers outside the scenario."""
