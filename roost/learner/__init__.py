"""The model being trained: samples, losses, advantages, sharding, checkpoints and export."""
