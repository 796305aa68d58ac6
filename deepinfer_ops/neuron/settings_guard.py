"""Compiled graphs depend on the settings that picked their routes.

The operator is opaque to Dynamo, which therefore sees no setting being read, and its route is chosen later, while
AOTAutograd traces. So the guard is put on by hand when Dynamo runs the operator on fake tensors. It compares one
string: a graph is reused exactly while the settings equal those it was compiled under.
"""

from __future__ import annotations

import sys

from .. import config


def guard_settings() -> None:
    """Make the graph that Dynamo is tracing, if it is, depend on the settings in force."""
    config.current()  # the fingerprint below is that of settings already read
    symbolic_convert = sys.modules.get("torch._dynamo.symbolic_convert")
    tracer = None if symbolic_convert is None else getattr(symbolic_convert.tls, "current_tx", None)
    if tracer is None:
        return
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    source = AttrSource(tracer.import_source(config.__name__), "fingerprint")
    install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))
