"""Who acts: what stands between a task and the policy's tokens."""
