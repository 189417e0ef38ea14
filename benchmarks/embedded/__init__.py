"""Build the models, prompts and cards of data/embedded from the code of installed packages."""
