"""Child processes and files of this machine: started, watched, ended and cleaned up."""
