"""The app world served over HTTP: a server, its clients, tasks, and agents that need no policy."""
