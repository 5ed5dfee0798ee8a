"""Failovers as stories: each folder is one, with a golden log."""
