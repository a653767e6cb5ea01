"""Reused intermediates of the kernel. This version allocates them anew in each call."""

NOT_YET = "is not implemented in this version of paged_attention"


class Workspace:
    """Buffers a plan's runs share. Not implemented in this version: the constructor raises."""

    def __init__(self, device=None):
        raise NotImplementedError(f"Workspace {NOT_YET}")
