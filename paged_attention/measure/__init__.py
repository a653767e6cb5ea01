"""What a call costs, measured: its time, its operations, its memory; and this machine.

m = measure(lambda: paged_attention(query, key_cache, ...))
m.seconds, m.spread, m.cold_seconds, m.ops, m.peak_bytes

interleaved({"a": f, "b": g})     both in one run, taking turns: use it to compare
floor(num_bytes).seconds          the least time that reading so many bytes takes here
profiler_peak_bytes(f)            a second opinion on peak_bytes, from inside the kernels
"""

from paged_attention.measure.calibration import calibrate
from paged_attention.measure.comparison import compare
from paged_attention.measure.counting import count
from paged_attention.measure.machine import device_name
from paged_attention.measure.profiling import (
    allocator_peak_bytes,
    breakdown,
    profiler_peak_bytes,
)
from paged_attention.measure.timing import interleaved, measure
from paged_attention.measure.yardstick import FloorReader, floor, kv_bytes

__all__ = [
    "FloorReader",
    "allocator_peak_bytes",
    "breakdown",
    "calibrate",
    "compare",
    "count",
    "device_name",
    "floor",
    "interleaved",
    "kv_bytes",
    "measure",
    "profiler_peak_bytes",
]
