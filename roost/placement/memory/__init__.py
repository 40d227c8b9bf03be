"""Memory estimates of models, by phase and device."""
