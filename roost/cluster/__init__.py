"""What there is: nodes, node groups, the resources on them and how they are counted."""
