"""Compiled backends of the kernel, behind the same call and the same plan.

choice.py           which backend serves a plan
numba_backend.py    a plan's memory and work items, and its threads
numba_decode.py     one pass over K and V, compiled by numba: states, merge, result
numba_tiles.py      what that pass does with 32 tokens: load, multiply, exponentials
"""
