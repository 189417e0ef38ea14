"""Command line, and launchers for one machine or many."""

# Options of every command that control its output.
OUTPUT_OPTIONS = {
    "json": "print the result as one JSON document",
    "quiet": "print the result and errors only",
    "verbose": "print what libraries log",
    "debug": "print the traceback of an error",
}
MAX_WIDTH = 120  # of help; longer lines are hard to read, however wide the terminal
