"""Predictors of acceptance: the trained head, the online logistic, and stop policies that use them."""
