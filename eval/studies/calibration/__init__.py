"""Are acceptance probabilities right?"""
