"""Code that a model wrote runs here: in a process of its own, which reaches its folder and what it is given."""
