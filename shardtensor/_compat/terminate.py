"""What C++ does with an exception that nothing catches: by ``std::set_terminate`` a program may have a last word."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

_Handler = ctypes.CFUNCTYPE(None)
_kept: list[object] = []  # the handlers, which C++ may call as long as the process lives


def before_termination(namespace: str, then: Callable[[], None]) -> None:
    """Call ``then`` before the process ends by an exception of a C++ namespace, in the thread that has thrown it.

    Nothing is unwound, so the thread keeps what it has locked. The process ends when ``then`` returns, as it would have
    ended without. Does nothing where the C++ library is not GNU's.
    """
    with suppress(OSError, AttributeError):  # no such library, and other names in another one
        library = ctypes.CDLL("libstdc++.so.6")
        kind = library.__cxa_current_exception_type
        kind.restype = ctypes.c_void_p
        set_terminate = library._ZSt13set_terminatePFvvE
        set_terminate.restype, set_terminate.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

        def handle() -> None:
            thrown = kind()  # a std::type_info: the pointer to its methods, and that to its name
            name = ctypes.cast(thrown, ctypes.POINTER(ctypes.c_char_p))[1] if thrown else b""
            if name and f"{len(namespace)}{namespace}".encode() in name:
                then()
            previous()

        handler = _Handler(handle)
        previous = _Handler(set_terminate(ctypes.cast(handler, ctypes.c_void_p)))
        _kept.append((handler, previous))


def stop_thread() -> None:
    """Let this thread, which Python has not started, sleep outside of Python until the process ends.

    A thread that asks for the interpreter while it shuts down is ended, which is not possible inside of a handler.
    """
    while True:
        ctypes.CDLL(None).sleep(3600)
