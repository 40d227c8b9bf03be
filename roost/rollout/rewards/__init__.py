"""What answers are worth, where the scenario does not know it itself."""
