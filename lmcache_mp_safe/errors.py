"""Errors that say whose fault it is, how far it reaches and what to do."""

from __future__ import annotations

import enum


class Scope(enum.Enum):
    """How far a failure reaches, and therefore who recovers."""

    CALL = "call"  # treat as a miss
    REQUEST = "request"  # recompute this prompt
    SERVER = "server"  # bypass until registered again
    PROCESS = "process"  # stop


class SafeError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, message: str, *, scope: Scope) -> None:
        super().__init__(message)
        self.scope = scope


class LocalError(SafeError):
    """This package broke one of its own rules: a bug here, not in vLLM, LMCache or the configuration."""

    def __init__(self, message: str, *, scope: Scope = Scope.REQUEST) -> None:
        super().__init__(message, scope=scope)


class ServerError(SafeError):
    """The LMCache server answered something wrong, late, or not at all."""

    def __init__(self, message: str, *, scope: Scope = Scope.CALL) -> None:
        super().__init__(message, scope=scope)


class UnnameableError(SafeError, TypeError):
    """Something in a request has no canonical form, so its objects have no name: it is computed without the cache."""

    def __init__(self, message: str) -> None:
        super().__init__(message, scope=Scope.REQUEST)


class ConfigError(SafeError, ValueError):
    """The configuration asks for something that cannot be served; the message names the key and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message, scope=Scope.PROCESS)
