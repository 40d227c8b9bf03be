"""The apps, one file each."""
