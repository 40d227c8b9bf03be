"""Sandbox for model-generated code: a separate process with access to its own folder and inputs only."""
