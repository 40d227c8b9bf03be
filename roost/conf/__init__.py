"""Config groups that come with Roost, found by every config after its own folder."""
