"""Configs of all notations, read into one `Job`; every mistake is reported with its position in the file."""
