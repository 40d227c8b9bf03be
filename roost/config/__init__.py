"""What the user wrote: three notations read into one `Job`, every mistake with its place in the file."""
