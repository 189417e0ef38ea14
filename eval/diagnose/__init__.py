"""Why a head drafts badly: its data, its target, and how its files are read."""
