"""Run a plan on Ray: reservation, workers, groups, channels, transfers, locks, traces, failures."""
