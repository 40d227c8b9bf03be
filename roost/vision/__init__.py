"""Images of prompts: their bytes, what a processor makes of them, and their place among the tokens."""
