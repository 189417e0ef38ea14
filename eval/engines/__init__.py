"""Other engines that serve our drafters, compared with our own decoder."""
