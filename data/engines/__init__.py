"""The target's answers: many prompts at a time on this machine, or from a server."""
