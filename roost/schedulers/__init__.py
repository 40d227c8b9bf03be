"""Job files for Slurm, KubeRay, SkyPilot, dstack and ssh, rendered from a plan."""
