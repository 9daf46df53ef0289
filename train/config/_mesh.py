"""The setting `mesh`: its text, and the names of the axes. What lies along them is said in train/mesh.py."""

from train.config._settings import SettingError

AXES = ("data", "fsdp", "tensor")


def parse_mesh(text: str) -> dict[str, int]:
    """Devices along each axis from ``data=2,fsdp=4``; axes not named have 1, and no text at all means an empty dict.

    Raises:
      SettingError: an axis that is not there or named twice, or a size that is not a whole number from 1.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.strip().partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise SettingError(f"mesh={text!r}: {part!r} is not one of {', '.join(f'{axis}=COUNT' for axis in AXES)}")
        sizes[name] = int(size)
    return {axis: sizes.get(axis, 1) for axis in AXES} if sizes else {}
