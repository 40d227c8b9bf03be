"""`roost up`: Ray on every node of an allocation, a command on the first of them, and the end of both."""
