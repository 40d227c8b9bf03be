"""Messages between the processes of a job: channels, send and recv, device locks."""
