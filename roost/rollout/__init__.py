"""What generates experience: scenarios, the episodes played in them, and how they are collected."""
