"""Training: the loop, its learners and checkpoints, and how a run is reported."""
