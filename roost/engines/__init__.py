"""Inference servers behind one protocol: started, watched, put to sleep, given new weights and stopped as planned."""
