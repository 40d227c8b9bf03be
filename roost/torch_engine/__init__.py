"""The built-in engine: any Hugging Face causal model, continuous batching, paged KV cache, vLLM's routes."""
