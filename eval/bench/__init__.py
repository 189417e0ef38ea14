"""Methods measured against each other: the bench, its runs and what is written of them."""
