"""Rollouts: scenarios, episodes, agents, environments and rewards."""
