"""Statistical certificate that decoding methods keep the target's output distribution."""
