"""Keys that RLinf, ROLL and ml-loop know: which of them Roost follows, and why it does not follow the others."""
