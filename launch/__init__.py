"""Command line, and launchers for one machine or many."""

# Options of every command that control its output; `draftsmith --help` explains them.
OUTPUT_OPTIONS = ("json", "quiet", "verbose", "debug")
# Values of a flag.
TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
MAX_WIDTH = 120  # of help; longer lines are hard to read, however wide the terminal
