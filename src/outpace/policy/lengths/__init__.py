"""Length policies by name: published rules for how much is drafted."""
