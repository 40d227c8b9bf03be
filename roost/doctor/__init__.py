"""Whether a machine or a cluster is ready for a job: probes of nodes, checks of the results, measured bandwidth."""
