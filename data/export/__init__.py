"""Export and import of heads, and the check that both systems compute the same with them."""
