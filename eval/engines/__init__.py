"""Other engines that serve our drafters, measured beside our own decoder."""
