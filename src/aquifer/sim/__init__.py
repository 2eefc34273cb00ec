"""Trace replay: the real scheduler and cache managers on a modelled device.

`trace` reads requests, `device` models the time of a step, `driver` models the memory, and `replay`
runs the simulation.
"""
