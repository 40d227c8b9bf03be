"""Where the numbers of a run go: a file always, and trackers and scrapers where they are asked for."""
