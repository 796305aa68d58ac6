"""What the NKI compiler's Python subset refuses, checked on the source of a kernel and of the functions it calls.

AWS's simulator runs a kernel as plain Python and accepts all of this; the compiler does not. `is` comparisons,
keyword-only parameters and nested jit kernels are documented as refused; lambdas, comprehensions, try, with (other
than nl.no_reorder) and star arguments are in no list of accepted forms, so they are refused too.
"""

import ast
import functools
import inspect
import pathlib
import sysconfig
import textwrap
import types

from .errors import NkiValidationError

_FORBIDDEN = {
    ast.Lambda: "lambda",
    ast.ListComp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.GeneratorExp: "a generator expression",
    ast.Try: "try",
    ast.Yield: "yield",
    ast.YieldFrom: "yield from",
    ast.Await: "await",
    ast.AsyncFunctionDef: "async",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Starred: "a star argument",
    ast.Raise: "raise (use assert)",
    ast.Delete: "del",
    ast.Match: "match",
    ast.NamedExpr: "an assignment expression",
}

# Functions from here are not part of a kernel: the simulator, the standard library, installed packages.
_NOT_KERNELS = [
    pathlib.Path(__file__).parent,
    *(pathlib.Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
]


@functools.cache
def check(function):
    """Raise for the first refused form in `function` or in any plain function it reaches by name."""
    _walk(function, function.__name__, set())


def _walk(function, kernel, seen):
    if function in seen:
        return
    seen.add(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise NkiValidationError(f"{kernel}: the source of {function.__name__} cannot be read ({error})") from error
    body = tree.body[0]
    body.decorator_list = []  # decorators run in Python, not in the kernel
    for node in ast.walk(body):
        _refuse(node, kernel, function)
    for node in ast.walk(body):
        if isinstance(node, ast.Name | ast.Attribute):
            called = _resolve(node, function)
            if called is not None:
                _walk(called, kernel, seen)


def _refuse(node, kernel, function):
    found = _FORBIDDEN.get(type(node))
    if isinstance(node, ast.Compare) and any(isinstance(o, ast.Is | ast.IsNot) for o in node.ops):
        found = "`is` (write == or !=)"
    elif isinstance(node, ast.arguments) and node.kwonlyargs:
        found = "keyword-only parameters (`*`)"
    elif isinstance(node, ast.arguments) and (node.vararg or node.kwarg):
        found = "star parameters"
    elif isinstance(node, ast.With) and not all("no_reorder" in ast.unparse(i.context_expr) for i in node.items):
        found = "`with` other than nl.no_reorder()"
    if found is not None:
        line = getattr(node, "lineno", 1) + function.__code__.co_firstlineno - 1
        raise NkiValidationError(f"{kernel}: line {line} of {function.__name__}: NKI does not accept {found}")


def _resolve(node, function):
    """The plain Python function of the project that a name or module attribute refers to, or None."""
    if isinstance(node, ast.Name):
        value = function.__globals__.get(node.id)
    elif isinstance(node.value, ast.Name):
        module = function.__globals__.get(node.value.id)
        value = getattr(module, node.attr, None) if isinstance(module, types.ModuleType) else None
    else:
        return None
    if not isinstance(value, types.FunctionType):
        return None
    path, home = (pathlib.Path(f.__code__.co_filename) for f in (value, function))
    foreign = any(path.is_relative_to(folder) for folder in _NOT_KERNELS)
    return value if path.parent == home.parent or not foreign else None
