"""Compiled backends of the kernel, behind the same call and the same plan, and a kernel in CUDA.

choice.py           which backend serves a plan
numba_backend.py    a plan's memory and work items, and its threads
numba_decode.py     one pass over K and V, compiled by numba: the states
numba_merge.py      states of several partitions into one, and the result
numba_tiles.py      what that pass does with 32 tokens: load, multiply, exponentials

paged_decode.cu     the kernel in CUDA's language, which is no backend yet
build.py, nvrtc.py, library.py, driver.py, cuda_source.py    compile it, load it, call it
"""
