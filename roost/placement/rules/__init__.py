"""Rules that a plan is checked against."""
