"""One file per kind of robot: the fields that users write about one, with their defaults and checks."""
