"""Ways in which a file comes to harm."""

from pathlib import Path

HARMS = ("truncate", "zero", "flip", "remove")


def spoil(path: Path, harm: str) -> None:
    """Cut a file in half, zero it, flip one bit in its middle, or remove it."""
    content = path.read_bytes()
    middle = len(content) // 2
    if harm == "truncate":
        path.write_bytes(content[:middle])
    elif harm == "zero":
        path.write_bytes(bytes(len(content)))
    elif harm == "flip":
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.unlink()
