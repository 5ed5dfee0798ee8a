"""Figures we hold ourselves to, as ratios taken in one run (`make bench`); not tests, since machines are noisy."""
