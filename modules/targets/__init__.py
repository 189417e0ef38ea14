"""Target models behind one protocol: the lean Llama family and any transformers causal LM."""
