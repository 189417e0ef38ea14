"""What a training step costs, beside other ways to write it."""
