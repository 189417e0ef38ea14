"""The small trained models and prompts that ship with the package."""
