"""Predictors of acceptance: the trained head, the online logistic, and the policies that end a draft by them."""
