# Owns: the one place where an error becomes a line and an exit code.
# Promises: what a user can cause is one line on stderr; a bug keeps its traceback.
# Never: imports anything heavy.
"""Exit codes: 0 done, 1 failed while running, 2 bad input, 130 interrupted."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import typer


def _leave(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def _describe(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not UTF-8 text (byte {error.start}): convert it, for example with iconv"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def command(function: Callable[..., None]) -> Callable[..., None]:
    """The error boundary of a command: one line on stderr and an exit code. RATOON_TRACEBACK=1 shows the traceback."""

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> None:
        from ratoon.core.settings import wants_traceback

        try:
            function(*args, **kwargs)
            sys.stdout.flush()
        except typer.Exit:  # a RuntimeError by descent, and an exit code by meaning
            raise
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # `ratoon generate ... | head`: the reader has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            if wants_traceback():
                raise
            _leave(_describe(error), 2)
        except (OSError, RuntimeError, MemoryError, ImportError) as error:
            if wants_traceback():
                raise
            _leave(_describe(error), 1)

    return bounded
