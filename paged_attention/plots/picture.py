"""A figure as a notebook shows it: sharp at twice the resolution, with its text in words."""

from __future__ import annotations

import base64
import io
import struct
from typing import Any

from paged_attention.plots.style import Figure

SHARPNESS = 2  # pixels of the file for each pixel of the page


class Picture:
    """A matplotlib figure with an alternative text, for those who can't see it.

    figure: the figure, whose `savefig` writes it to a file
    alt: what the picture says, in a sentence or two
    """

    def __init__(self, figure: Figure, alt: str) -> None:
        self.figure, self.alt = figure, alt

    def __repr__(self) -> str:
        return self.alt

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        file = io.BytesIO()
        dpi = SHARPNESS * self.figure.dpi
        self.figure.savefig(file, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.05)
        png = file.getvalue()
        width, height = struct.unpack(">II", png[16:24])
        size = {"width": width // SHARPNESS, "height": height // SHARPNESS}
        data = {"image/png": base64.b64encode(png).decode(), "text/plain": self.alt}
        return data, {"image/png": {**size, "alt": self.alt}}
