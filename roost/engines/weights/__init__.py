"""Weight sync from a learner to the engines: in buckets, by the plan's weight routes, and verified."""
