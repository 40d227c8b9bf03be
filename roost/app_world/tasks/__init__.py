"""The tasks of the app world: kinds of tasks at three difficulties, each with many scenarios of three variants."""
