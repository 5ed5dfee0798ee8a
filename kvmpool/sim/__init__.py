"""A whole pool in memory, with a clock and faults, driven by the real loops.

world.py is the truth and its ports, faults.py what may go wrong, runner.py the loops over it, walk.py a seeded random
walk that checks the invariants after every step, scenario.py failovers as stories.
"""
