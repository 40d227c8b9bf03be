"""Is a machine, or a cluster, ready for a job: probes of nodes, their judgement, and measured bandwidth."""
