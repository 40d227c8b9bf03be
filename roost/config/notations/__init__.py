"""The three notations: RLinf, ROLL and ml-loop."""
