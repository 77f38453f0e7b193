"""What was found, as tables, figures, pages and files."""
