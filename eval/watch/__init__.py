"""What servers of heads in production count, and what that says of a head."""
