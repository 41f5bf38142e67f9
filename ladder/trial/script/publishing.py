"""What a script tells the world of its training, which a look and a trial keep to themselves."""

from __future__ import annotations

from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, RepoUrl, constants

_PUBLISHING = ("create_commit", "upload_file", "upload_folder", "upload_large_folder", "create_branch", "create_tag")


def silent_trackers(scratch: str) -> dict[str, str]:
    """The environment in which trackers show no run: they are off, or write below `scratch`."""
    return {
        "WANDB_MODE": "disabled",
        "COMET_MODE": "DISABLED",
        "DISABLE_MLFLOW_INTEGRATION": "TRUE",
        "SWANLAB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": scratch,
        "TRACKIO_DIR": scratch,
    }


def publish_nothing() -> None:
    """From now on nothing is made or changed on the Hub; it can still be read."""

    def create_repo(*given: Any, **options: Any) -> RepoUrl:
        return RepoUrl(f"{constants.ENDPOINT}/{options.get('repo_id') or given[0]}")

    _replace("create_repo", create_repo)
    for name in _PUBLISHING:
        if hasattr(HfApi, name):
            _replace(name, lambda *_given, **_options: None)


def _replace(name: str, instead: Any) -> None:
    """The method of HfApi, and the function of the same name."""
    setattr(HfApi, name, lambda _api, *given, **options: instead(*given, **options))
    setattr(huggingface_hub, name, instead)
