"""The core: targets, heads, decoding and losses as pure functions of tensors."""
