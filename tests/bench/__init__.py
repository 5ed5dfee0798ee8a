"""Figures we hold ourselves to, as ratios taken in one run (`make bench`). Not collected by pytest: machines are noisy."""
