"""Prompts from data files: sources, prompts, and the single-turn scenario over them."""
