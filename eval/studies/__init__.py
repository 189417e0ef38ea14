"""The experiments of the papers, each a study: what it measures on given models and heads, and what it concludes."""
