"""`draftsmith watch`: a server's counters tested against its head's card."""
