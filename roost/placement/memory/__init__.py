"""What fits: memory of models, phases and devices."""
