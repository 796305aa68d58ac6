"""Virtual registers: 32-bit integers of an engine's sequencer, known only at run time."""

from .machine import current


class VirtualRegister:
    """Usable as `scalar_offset` and as operand of the register_* instructions, and for nothing else.

    The device loop passes its counter as a frozen register. While a kernel is specialised the value does not exist,
    so Python arithmetic, comparisons and conversions are errors here too.
    """

    def __init__(self, value=None, frozen=False):
        self._value = value
        self._frozen = frozen

    def peek(self):
        if self._value is None:
            current().fail("register: read before any value was moved or loaded into it")
        return self._value

    def put(self, value):
        if self._frozen:
            current().fail("register: a device loop's counter cannot be written")
        self._value = int(value)

    def _refuse(self, *_):
        current().fail("register: its value is not known at specialisation; it can only be used as a scalar_offset")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __index__ = __float__ = _refuse
    __hash__ = None
