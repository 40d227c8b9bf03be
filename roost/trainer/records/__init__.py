"""Files of a run: its folder, metrics, samples and checkpoints; saving and resuming."""
