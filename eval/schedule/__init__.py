"""How many tokens a server should draft at each number of requests, from recorded rounds and what rounds take there."""
