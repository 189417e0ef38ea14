"""The command line and the launchers for one machine or many."""

MAX_WIDTH = 120  # of help: longer lines are hard to read, however wide the terminal
