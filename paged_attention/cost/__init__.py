"""What a call costs, worked out before it runs: `predict(name, Shape([...]), profile)`."""

from paged_attention.cost.predict import NAMES, Cost, cost_of, predict
from paged_attention.cost.seconds import parts_of, seconds_of
from paged_attention.cost.shape import Shape
from paged_attention.cost.trace import Step
from paged_attention.cost.way import way_of
from paged_attention.measure.profiles import PROFILES, DeviceProfile, Figure

__all__ = [
    "Cost",
    "DeviceProfile",
    "Figure",
    "NAMES",
    "PROFILES",
    "Shape",
    "Step",
    "cost_of",
    "parts_of",
    "predict",
    "seconds_of",
    "way_of",
]
