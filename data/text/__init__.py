"""The way from chat rows to token ids: their shapes, the template, turns, and which tokens are answers."""
