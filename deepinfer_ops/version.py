"""The package's version, kept here only: pyproject, CMake and the compiled library read it from this line."""

__version__ = "0.1.0"
