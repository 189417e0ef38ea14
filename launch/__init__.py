"""The command line and the launchers for one machine or many."""

# Output options of every command.
OUTPUT_OPTIONS = {
    "json": "print the answer as one JSON document",
    "quiet": "print the answer and errors, nothing else",
    "verbose": "print what the libraries below log",
    "debug": "show the traceback of an error",
}
MAX_WIDTH = 120  # of help: longer lines are hard to read, however wide the terminal
