"""What a node is and what of it stands in the way of training: facts, checks, Findings."""
