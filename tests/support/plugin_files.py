"""Packages with entry points, as a user would install them."""

from pathlib import Path


def install(folder: Path, name: str, entry_points: str) -> None:
    """Puts what an installer leaves of a package."""
    information = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entry_points)
