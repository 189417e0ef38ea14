"""What decoding takes on this machine, piece by piece."""
