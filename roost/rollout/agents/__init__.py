"""Agents: code between a task and the policy's tokens."""
