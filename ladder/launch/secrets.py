"""Secrets in the environment: trials need none, so none is passed on to them."""

from __future__ import annotations

import re
from collections.abc import Iterable

# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, …; not TOKENIZERS_PARALLELISM.
_SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY)(?:_|$)",
    re.IGNORECASE,
)


def blanked_secrets(names: Iterable[str]) -> dict[str, str]:
    """Every variable among `names` that holds a secret by its name, with an empty value to put over it."""
    return {name: "" for name in names if _SECRET.search(name)}
