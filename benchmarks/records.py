"""Where results come from (device, versions, commit, date), and how they are written."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "tokamax", "torch", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of this file's tree, "-dirty" added if it has changes outside results; "unknown" without git."""
    git = ["git", "-C", str(Path(__file__).parent.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--", ".", ":!benchmarks/results"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changes.stdout.strip() else "")


def today() -> str:
    """The date in UTC, as YYYY-MM-DD."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def device_slug(name: str) -> str:
    """A device's name as part of a file name: "NVIDIA H200" -> "h200"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower().replace("nvidia", "").replace("geforce", "")).strip("_")


def write_json(path: Path, content) -> None:
    """Write at once or not at all, so that a killed run leaves what it wrote before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)
