"""The certificate that methods leave a model's output as it is: what a run of `eval lossless` tests, and how surely."""
