"""What a guest may try to get more than its claim, and that it gets nothing: see README.md for the table."""
