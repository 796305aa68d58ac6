"""The exceptions of the simulator: one class for every broken rule, named as in the documentation."""


class NkiValidationError(Exception):
    """A rule of the hardware or of the compiler is broken. The message names the instruction and the limit."""


class NkiOutOfBounds(NkiValidationError, IndexError):
    """A run-time address lies outside of its tensor under `oob_mode.error` (an IndexError in AWS's simulator)."""
