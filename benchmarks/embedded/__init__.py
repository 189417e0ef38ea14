"""The models, prompts and card that ship in data/embedded: what makes them, from installed packages' code on."""
