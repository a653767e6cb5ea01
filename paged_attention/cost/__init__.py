"""What a call costs, worked out before it runs: `predict(name, Shape([...]), profile)`."""

from paged_attention.cost.predict import NAMES, Cost, Shape, predict, seconds_of
from paged_attention.measure.profiles import PROFILES, DeviceProfile, Figure

__all__ = [
    "Cost",
    "DeviceProfile",
    "Figure",
    "NAMES",
    "PROFILES",
    "Shape",
    "predict",
    "seconds_of",
]
