"""`roost up`: start Ray on every node of an allocation, run a command on the first, and stop everything after it."""
