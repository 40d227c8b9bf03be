"""Images of prompts: their bytes, their patches, and their positions among the tokens."""
