"""Networks of trained drafters, and the files that they are kept in."""
