"""Pure maps between the project's state dicts and public checkpoint formats, one file per format."""
