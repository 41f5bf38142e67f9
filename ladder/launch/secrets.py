"""Secrets in the environment: trials get none, but for a script's token for the Hub (`tuning.preparation`)."""

from __future__ import annotations

import re
from collections.abc import Iterable

# HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, PGPASSWORD, GITHUB_PAT, …; not TOKENIZERS_PARALLELISM or KEYMAP.
_SECRET = re.compile(
    r"(?:(?:^|_)(?:TOKENS?|SECRETS?|PASSPHRASE|CREDENTIALS?|KEY|PAT|APIKEY)|PASSWORD|PASSWD|(?:^|_|SSH)PASS)(?:_|$)",
    re.IGNORECASE,
)


def blanked_secrets(names: Iterable[str]) -> dict[str, str]:
    """The variables among `names` whose names say that they hold a secret, each with an empty value to override it."""
    return {name: "" for name in names if _SECRET.search(name)}
