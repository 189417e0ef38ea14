"""Other projects' trainers beside ours."""
