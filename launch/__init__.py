"""The command line and the launchers for one machine or many."""
