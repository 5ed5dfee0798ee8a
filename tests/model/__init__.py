"""The pool as a seeded random walk, and bugs planted to show that the walk finds bugs."""
