"""What the processes of a job did when: spans, how busy each device was, and one trace file of it all."""
