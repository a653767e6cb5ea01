"""Which backend serves a plan."""

from importlib.util import find_spec

import torch

from ..checks import refuse

BACKENDS = ("eager", "numba")
DEFAULT = "eager"  # what None means
EXTRAS = {"numba": "cpu"}  # the extra of this package that brings a backend's compiler


def chosen_backend(backend: object, device: torch.device) -> str:
    """The backend that was asked for, if it can serve.

    Args:    backend: None, which is DEFAULT, or one of BACKENDS
             device: of the caches
    Raises:  ValueError: another name, or a device that the backend doesn't serve
             ImportError: its compiler isn't installed. The message says what to install
    """
    if backend is None:
        return DEFAULT if device.type == "cpu" else "eager"
    if not isinstance(backend, str) or backend not in BACKENDS:
        rule = f"None or one of {', '.join(map(repr, BACKENDS))}"
        refuse("backend", rule, repr(backend))
    if backend == "numba" and device.type != "cpu":
        refuse("backend", f'None or "eager" on {device}', repr(backend))
    if backend in EXTRAS and find_spec(backend) is None:
        extra = f"paged-attention[{EXTRAS[backend]}]"
        raise ImportError(f"backend={backend!r} needs {backend}: pip install '{extra}'")
    return backend


def sharing_backend(backend: object, device: torch.device) -> str:
    """The backend of a step whose sequences share prefixes, which is eager.

    Raises:  as `chosen_backend`; ValueError: another backend was asked for by name
    """
    if chosen_backend(backend, device) != "eager" and backend is not None:
        refuse("backend", 'None or "eager" where prefixes are shared', repr(backend))
    return "eager"
