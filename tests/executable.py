"""Write programs that stand in for others."""

from pathlib import Path


def executable(file: Path, text: str) -> Path:
    """Write a program to ``file`` and return it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)
    return file
