"""Reused intermediates of the kernel. This version allocates them anew in each call."""

from .options import NOT_YET


class Workspace:
    """Buffers a plan's runs share. Not implemented in this version: the constructor raises."""

    def __init__(self, device=None):
        raise NotImplementedError(f"Workspace {NOT_YET}")
