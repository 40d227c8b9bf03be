"""Ranks that train one model together: the device mesh, and how tokens, matrices and the vocabulary are divided."""
