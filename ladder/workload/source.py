"""Finds a model's configuration: in a folder, a config.json, a bundled shape, or on the Hub.

No weights are downloaded, and `config_guard` checks every configuration before transformers gets it.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shlex
import threading
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ladder.errors import ModelNotAccessibleError
from ladder.units import MIB
from ladder.workload.config_guard import checked_config, shorten
from ladder.workload.counted import Count
from ladder.workload.shapes import shape_from_config
from ladder.workload.workload import ModelShape, Source, Task

HUB_REQUEST_SECONDS = 4.0
"""Chosen: the Hub usually answers in a fraction of it."""
HUB_TOTAL_SECONDS = 9.0
"""Chosen: enough for two requests; the user has to wait for it before anything else happens."""
_CONFIG_BYTES = MIB
"""Chosen: hundreds of times the size of a config.json."""

_NO_MODEL = {
    r"model_index\.json": "is a pipeline of diffusers, which ladder does not tune; give a language model",
    r".+\.gguf": "has weights in GGUF, for llama.cpp; give the folder or Hub id of the model that they were made from",
    r".+\.(safetensors|bin|pt|pth|ckpt)": "has weights but no config.json; give the model's folder, which has both",
    r"tokenizer(_config)?\.json|tokenizer\.model": "is a tokenizer; give the folder or Hub id of its model",
}
"""What a file is, or a folder with it and without a config.json, by a pattern of its name, and what to do."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


class _Found(NamedTuple):
    """The configuration of MODEL, checked, and a note on where it came from."""

    config: dict[str, Any]
    source: Source
    note: str = ""


def resolve_model(text: str, *, task: Task | None = None, count: Count | None = None) -> ModelShape:
    """The shape of MODEL: an existing folder or config.json, or else a bundled shape, or else a Hub id.

    If a Hub model is gated or cannot be reached but has a bundled shape, that is returned with a `note`.
    ModelNotAccessibleError if there is no usable configuration, UsageError if `task` does not suit the model. The
    network is used for Hub ids only, for at most about ten seconds. `count` is as in `shape_from_config`.
    """
    path_like = text.strip() and "\0" not in text
    found = _from_path(text) if path_like else None
    if found is None and not (path_like and text.isprintable()):
        raise ModelNotAccessibleError(
            f"{shorten(text)} is not a model; give a Hub id, a folder with a config.json, or a bundled name."
        )
    found = found or _from_bundled(text) or _from_hub(text)
    return shape_from_config(found.config, name=text, source=found.source, note=found.note, task=task, count=count)


@cache
def bundled_models() -> dict[str, Path]:
    """The files of the bundled shapes by their lower-case names, sorted."""
    package = Path(__file__).resolve().parent.parent
    # In a wheel configs/ is inside the package; in a checkout it is beside the package.
    folders = (package / "configs" / "models", package.parent / "configs" / "models")
    folder = next((folder for folder in folders if folder.is_dir()), folders[0])
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def hub_ids(name: str) -> list[str]:
    """The Hub ids of the models that have this bundled shape."""
    return list(_bundle(name)["hub_ids"])


def weights_of(model: ModelShape) -> str:
    """What names weights of `model` that can be loaded: as the user said, but the first Hub id of a bundled shape's
    name; empty for a shape without weights."""
    if model.source != "bundled" or "/" in model.name:
        return "" if model.source == "file" else model.name
    return next(iter(hub_ids(model.name.lower())), "")


def smoke_defaults(model: ModelShape) -> dict[str, Any] | None:
    """A bundled shape's defaults for a quick try on a CPU (seq_len, global_batch_size, gpu_memory), or None."""
    name = _bundled_name(model.name) if model.source == "bundled" else None
    return None if name is None else _bundle(name).get("smoke")


def _bundle(name: str) -> dict[str, Any]:
    bundle: dict[str, Any] = json.loads(bundled_models()[name].read_text(encoding="utf-8"))
    return bundle


def _bundled_name(text: str) -> str | None:
    """The name of the bundled shape with this name or Hub id, ignoring case."""
    wanted = text.lower()
    if wanted in bundled_models():
        return wanted
    if "/" not in wanted:
        return None
    return next((name for name in bundled_models() if wanted in map(str.lower, hub_ids(name))), None)


def _from_bundled(text: str) -> _Found | None:
    name = text.lower()
    return _bundled(name) if name in bundled_models() else None


def _bundled(name: str, note: str = "") -> _Found:
    return _Found(_bundle(name)["config"], "bundled", note)


def _from_path(text: str) -> _Found | None:
    """The configuration in an existing folder or file; None if there is neither."""
    path = Path(text)
    config = path / "config.json"
    try:
        is_folder = path.is_dir()
        for link in (path, config):
            if link.is_symlink() and not link.exists():
                raise ModelNotAccessibleError(f"{str(link)!r} is a link to a file that is missing; restore that file.")
        if is_folder and config.exists():
            return _read(config, name=text, source="folder")
        if not path.exists() or (is_folder and text.lower() in bundled_models()):  # a run folder of that model
            return None
        if instead := _what_else(path):
            raise ModelNotAccessibleError(f"{text!r} {instead}.")
        return _read(path, name=text, source="file")
    except OSError as error:  # a folder that may not be entered, or a name that is too long
        if _is_hub_id(text) and not os.path.isdir(path.parts[0]):
            return None
        raise ModelNotAccessibleError(f"{shorten(text)} cannot be read: {error.strerror}.") from None


def _what_else(path: Path) -> str:
    """What a folder without a config.json has in its place, or what a file is, and what to do; "" for another file."""
    is_folder = path.is_dir()
    names = os.listdir(path) if is_folder else [path.name]
    if "adapter_config.json" in names:
        settings = _read_json(path / "adapter_config.json" if is_folder else path, str(path))
        base = settings.get("base_model_name_or_path")
        of = f" of {shorten(base, 200)}" if base else ""
        return f"is an adapter{of}; give its base model, with --lora-file {shlex.quote(str(path))}"
    # The checkpoints of a Trainer, or a model in the cache of the Hub.
    inner = sorted([*path.glob("checkpoint-*/config.json"), *path.glob("snapshots/*/config.json")])
    if inner:
        return f"has no config.json; give the folder {str(inner[0].parent)!r}, which has one"
    for pattern, said in _NO_MODEL.items():
        if any(re.fullmatch(pattern, name, re.IGNORECASE) for name in names):
            return said
    if is_folder:
        return "has no config.json; give the folder that has one"
    return "is a script; give its command behind `--`" if path.suffix == ".py" else ""


def _read(path: Path, *, name: str, source: Source) -> _Found:
    config, note = checked_config(_read_json(path, name), name)
    return _Found(config, source, note)


def _read_json(path: Path, name: str) -> dict[str, Any]:
    """The JSON object in `path`, of at most 1 MiB. NaN and infinity become what transformers writes for them."""
    problem = f"The configuration of {shorten(name)} cannot be used: {path.name}"
    if not path.is_file():
        raise ModelNotAccessibleError(f"{problem} is not a regular file.")
    try:
        with path.open("rb") as file:
            data = file.read(_CONFIG_BYTES + 1)
    except OSError as error:
        raise ModelNotAccessibleError(f"{problem} cannot be read: {error.strerror}.") from None
    if len(data) > _CONFIG_BYTES:
        raise ModelNotAccessibleError(f"{problem} is larger than 1 MiB, which no model configuration is.")
    if not data.strip():
        raise ModelNotAccessibleError(f"{problem} is empty; download it again.")
    try:
        config = json.loads(data.decode("utf-8-sig"), parse_constant=lambda constant: {"__float__": constant})
    except (ValueError, RecursionError) as error:
        detail = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ModelNotAccessibleError(
            f"{problem} is not JSON in UTF-8 ({detail}); correct it, or download it again."
        ) from None
    if not isinstance(config, dict):
        raise ModelNotAccessibleError(f"{problem} is not a JSON object; give a model's config.json.")
    return config


def _is_hub_id(text: str) -> bool:
    return (
        len(text) <= 96
        and _HUB_ID.fullmatch(text) is not None
        and not any(part in text for part in ("--", ".."))
        and not any(part.endswith((".", "-", ".git")) for part in text.split("/"))
    )


class _HubError(Exception):
    """The Hub gave no configuration. `what` says why, `remedy` what would help besides another MODEL."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


def _from_hub(text: str) -> _Found:
    if not _is_hub_id(text):
        raise ModelNotAccessibleError(f"{shorten(text)} is neither a file, a folder nor a Hub id; {_advice(text)}")
    try:
        path = _within(HUB_TOTAL_SECONDS, text)
    except _HubError as problem:
        name = _bundled_name(text)
        if name is not None:
            return _bundled(name, f"{problem.what}; the bundled shape {name} is used instead.")
        raise ModelNotAccessibleError(f"{problem.what}; {problem.remedy}{_advice(text)}") from None
    return _read(path, name=text, source="hub")


def _within(seconds: float, hub_id: str) -> Path:
    """`_fetch` with a time limit: name resolution and a server that answers slowly have none of their own."""
    ending: list[Path | Exception] = []

    def fetch() -> None:
        try:
            ending.append(_cached(hub_id) if _offline() else _fetch(hub_id))
        except Exception as error:  # handed to the caller's thread
            ending.append(error)

    thread = threading.Thread(target=fetch, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ending:
        raise _HubError(f"The Hub did not answer for {hub_id!r} within {seconds:.0f} s")
    if isinstance(ending[0], Exception):
        raise ending[0]
    return ending[0]


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def hub_token() -> str | None:
    """The user's token: from HF_TOKEN, or the one that `hf auth login` has stored.

    With HF_HUB_DISABLE_IMPLICIT_TOKEN the stored one is not used, as in huggingface_hub.
    """
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN") or None
    return get_token()


def _fetch(hub_id: str) -> Path:
    """The config.json of `hub_id` in the local cache, updated if the Hub can be reached."""
    import huggingface_hub as hub  # imported here because it takes longer than reading a bundled shape

    token = hub_token() or False
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)  # we report errors ourselves
    try:
        # This request comes first because it does not retry; hf_hub_download retries for more than a minute.
        url = hub.hf_hub_url(hub_id, "config.json")
        size = hub.get_hf_file_metadata(url, token=token, timeout=HUB_REQUEST_SECONDS).size
        if size is None or size <= _CONFIG_BYTES:
            return Path(hub.hf_hub_download(hub_id, "config.json", token=token, etag_timeout=HUB_REQUEST_SECONDS))
    except Exception as error:  # which exceptions there are depends on the version of huggingface_hub
        try:
            return _cached(hub_id)
        except _HubError:
            raise _explained(error, hub_id, bool(token)) from None
    finally:
        logger.setLevel(level)
    raise ModelNotAccessibleError(f"The configuration of {hub_id!r} cannot be used: config.json is larger than 1 MiB.")


def _explained(error: Exception, hub_id: str, with_token: bool) -> _HubError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        accept = f"accept its licence at https://huggingface.co/{hub_id}"
        login = "" if with_token else " and run `hf auth login` (or set HF_TOKEN)"
        return _HubError(f"{hub_id!r} is gated{_refused(with_token)}", f"{accept}{login}, or ")
    if isinstance(error, errors.RepositoryNotFoundError):
        if with_token:
            return _HubError(f"The Hub has no model {hub_id!r} that your token can access")
        return _HubError(f"The Hub has no public model {hub_id!r}", "run `hf auth login` if it is private, or ")
    if isinstance(error, errors.EntryNotFoundError):
        base = "give the base model if it holds an adapter or GGUF weights, or "
        return _HubError(f"The Hub's repository {hub_id!r} has no config.json", base)
    if isinstance(error, errors.HfHubHTTPError):
        return _HubError(f"The Hub answered {error.response.status_code} for {hub_id!r}")
    return _HubError(f"The Hub cannot be reached for {hub_id!r} ({type(error).__name__})")


def _refused(with_token: bool) -> str:
    return ", and your token has no access to it" if with_token else ""


def _cached(hub_id: str) -> Path:
    """The config.json from an earlier download."""
    import huggingface_hub as hub

    path = hub.try_to_load_from_cache(hub_id, "config.json")
    if not isinstance(path, str):
        raise _HubError(f"The Hub is offline (HF_HUB_OFFLINE) and the configuration of {hub_id!r} is not cached")
    return Path(path)


def _advice(text: str) -> str:
    """What to do instead, with the bundled names that look like `text`."""
    close = difflib.get_close_matches(text.lower().rsplit("/", 1)[-1], bundled_models(), n=3, cutoff=0.5)
    names = f" such as {' or '.join(close)}" if close else " (`ladder models` lists them)"
    return f"give a folder with its config.json, or a bundled name{names}."
