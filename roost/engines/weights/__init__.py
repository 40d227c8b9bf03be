"""New weights on their way from a learner to the engines: in buckets, by the plan's routes, and verified."""
