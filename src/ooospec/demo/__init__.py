"""The demonstration: real requests, three methods back to back, and pictures of what happened when."""
