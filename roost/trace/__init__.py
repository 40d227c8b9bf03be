"""Tracing of a job: spans, device utilization, and Chrome trace files."""
