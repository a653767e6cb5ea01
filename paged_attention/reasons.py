"""Why something failed, in one line that may be shown to others."""

from __future__ import annotations

import re


def reason_of(error: Exception, longest: int = 100) -> str:
    """The error's kind and first line; of a path its last part, as the JSON goes to others."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
    text = re.sub(r"(?<![\w.])/(?:[^\s/'\"]+/)*([^\s/'\"]*)", r"\1", text)
    return text if len(text) <= longest else text[: longest - 3].rstrip() + "..."
