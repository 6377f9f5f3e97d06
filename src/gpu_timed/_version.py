"""The version of this package; hatchling reads it from here."""

from typing import Final

VERSION: Final = "0.1.0"
