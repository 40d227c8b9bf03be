"""A plan on Ray: reservation, workers, groups, channels, transfer, locks, tracing, failure."""
