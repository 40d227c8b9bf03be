"""Metrics of a run: always a file, optionally trackers and Prometheus."""
