"""Folders that trials really share: what they hold can be made again, and each trial would have to."""

from __future__ import annotations

import getpass
import os
import re
import tempfile
from contextlib import suppress

_NAMED = re.compile(r"CACHE(_DIR|_HOME|_PATH|_ROOT|PREFIX)?$|^TORCH_(HOME|EXTENSIONS_DIR)$|^CUDA_MPS_PIPE_DIRECTORY$")
"""Variables that name one: HF_HUB_CACHE, TRITON_CACHE_DIR, PYTHONPYCACHEPREFIX, …"""
_OF_HUGGING_FACE = ("assets", "datasets", "hub", "modules", "xet")
"""In HF_HOME, where a user may keep other things too."""
_OF_GPUS = ("~/.triton", "~/.nv")
_OF_MPS = "/tmp/nvidia-mps"
"""Not a cache, as what its variable names is none, but nobody reaches such pipes through an overlay."""


def caches() -> list[str]:
    """The real paths of those in this environment; they exist. None holds the working folder or the user's home."""
    home = os.environ.get("HF_HOME")
    named = [place for name, place in os.environ.items() if _NAMED.search(name)]
    wanted = [place for place in named if os.path.isabs(place) or os.path.isdir(place)]  # others are switches
    wanted += [os.path.join(home, name) for name in _OF_HUGGING_FACE] if home else []
    wanted += [os.environ.get("XDG_CACHE_HOME") or "~/.cache", compiled_by_inductor()]
    wanted += _OF_GPUS if os.path.exists("/dev/nvidiactl") else ()
    wanted += [_OF_MPS] if os.path.isdir(_OF_MPS) else []
    found = {os.path.realpath(os.path.expanduser(each)) for each in wanted}
    user = os.path.expanduser("~")
    for place in found if os.path.isdir(user) else ():
        with suppress(OSError):  # none is made where this user may make none
            os.makedirs(place, mode=0o700, exist_ok=True)
    own = [os.path.realpath(each) for each in (os.getcwd(), user)]
    return sorted(each for each in found if os.path.isdir(each) and not any(is_in(place, each) for place in own))


def is_in(place: str, folder: str) -> bool:
    """Whether it is that folder or in it; both are absolute."""
    return place == folder or place.startswith(folder.rstrip("/") + "/")


def compiled_by_inductor() -> str:
    """Where torch keeps what it compiles, as torch finds that place."""
    with suppress(KeyError, OSError):  # a user without a name
        user = re.sub(r'[\\/:*?"<>|]', "_", getpass.getuser())
        return os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")
    return os.path.join(tempfile.gettempdir(), "torchinductor")
