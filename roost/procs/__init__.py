"""Child processes, signals, logs and scratch files of this machine."""
