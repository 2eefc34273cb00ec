"""Replays of traces: the real scheduler and cache managers, on a modelled device.

`trace` reads what arrives, `device` says how long a step takes, `driver` stands in for the memory,
and `replay` lets the clock run.
"""
