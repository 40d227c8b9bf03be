"""The app world served over HTTP and played: a server, its clients, tasks, and agents that need no policy."""
