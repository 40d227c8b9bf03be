"""The loop: what is drawn, scored, learnt and sent out when, and what a person sees of it."""
