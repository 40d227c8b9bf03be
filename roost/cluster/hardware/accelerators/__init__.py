"""One file per accelerator vendor: a constant with its names, and how its devices are found."""
