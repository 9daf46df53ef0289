"""Files that are whole at any time."""

import os
from pathlib import Path


def write_whole(path: Path, *parts: bytes) -> None:
    """Writes under another name, which becomes the file's own once all of it is on disk.

    Raises:
      OSError: names the file, which the system's own error of a write, as on a full disk, does not.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
