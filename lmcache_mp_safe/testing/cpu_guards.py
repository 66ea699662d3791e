"""Start vLLM's CPU build with LMCache imported and speculation on: three gaps of that build, closed from outside.

Used by tests and the demo only; nothing here touches a GPU build. Each guard asks for the feature it mends and does
nothing where that is absent. Call `prepare_cpu_engine` before the engine is made. It also leaves a word in the
environment, so that the package's vLLM plugin can call `apply_from_environment` in the engine-core and worker
processes that vLLM spawns.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any

GUARDS_VARIABLE = "LMCACHE_MP_SAFE_CPU_GUARDS"
_PLAIN, _SPECULATION = "plain", "speculation"


def prepare_cpu_engine(*, speculation: bool) -> None:
    """Mend this process, and ask the plugin to mend the ones that vLLM starts."""
    os.environ[GUARDS_VARIABLE] = guards_for(speculation=speculation)
    apply_from_environment()


def guards_for(*, speculation: bool) -> str:
    """Value of `GUARDS_VARIABLE` for a child process that starts such an engine."""
    return _SPECULATION if speculation else _PLAIN


def apply_from_environment() -> None:
    """Apply what `prepare_cpu_engine` asked for; nothing where it did not, or where vLLM is no CPU build.

    May be called any number of times.
    """
    wanted = os.environ.get(GUARDS_VARIABLE)
    if wanted is None or not _is_cpu_build():
        return
    _tolerate_odd_objects_in_kernel_scan()
    if wanted == _SPECULATION:
        _interpret_state_kernels()


def _is_cpu_build() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _tolerate_odd_objects_in_kernel_scan() -> None:
    """vLLM 0.32 looks at the `__dict__` of every object in every module, and takes for granted that it is a mapping.

    A cffi library, which LMCache brings in, answers `__dict__` with something else, and the engine dies at start. The
    scan calls `vars`; a name of its own in that module makes such objects look empty. The scan also touches
    deprecated names of torch, whose warnings are nobody's business here.
    """
    if importlib.util.find_spec("vllm.triton_utils.dispatcher") is None:
        return
    dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
    if not hasattr(dispatcher, "_rebind_kernels") or "vars" in vars(dispatcher):
        return
    scan = dispatcher._rebind_kernels

    def mapping_of(value: object) -> Mapping[str, Any]:
        found = builtins.vars(value)
        return found if isinstance(found, Mapping) else {}

    def quiet_scan(overrides: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            scan(overrides)

    dispatcher.vars = mapping_of
    dispatcher._rebind_kernels = quiet_scan


def _interpret_state_kernels() -> None:
    """Run the kernels of `vllm.v1.worker.mamba_utils` under Triton's interpreter.

    With speculation on, vLLM's align mode launches kernels that have no CPU form; without a GPU it hands the module a
    placeholder for Triton. The module is executed again with the real one in place, and only that module: other
    kernels have native CPU forms, which vLLM puts in when the worker starts.
    """
    if importlib.util.find_spec("triton") is None:
        return
    state_module: Any = importlib.import_module("vllm.v1.worker.mamba_utils")
    if any(_is_interpreted(value) for value in vars(state_module).values()):
        return
    os.environ["TRITON_INTERPRET"] = "1"  # read whenever a function is decorated with `triton.jit`
    triton_utils: Any = importlib.import_module("vllm.triton_utils")
    placeholders = triton_utils.triton, triton_utils.tl
    triton_utils.triton, triton_utils.tl = importlib.import_module("triton"), _interpreted_language()
    try:
        importlib.reload(state_module)
    finally:
        triton_utils.triton, triton_utils.tl = placeholders
    if hasattr(state_module, "_TEMPORAL_TILES"):
        # In how many programs one copy is split, to fill a GPU. They are interpreted one after the other: one is
        # enough, and the step is ten times as fast.
        state_module._TEMPORAL_TILES = 1


def _interpreted_language() -> ModuleType:
    """`triton.language` whose own library (`tl.cdiv`, ...) can be called by an interpreted kernel.

    Those are kernels too, decorated when Triton was first imported, which was before the interpreter was switched on
    unless the environment said so from the start.
    """
    language = importlib.import_module("triton.language")
    library = importlib.import_module("triton.language.standard")
    if not _is_interpreted(vars(library)["cdiv"]):
        importlib.reload(library)
        importlib.reload(language)
    return language


def _is_interpreted(value: object) -> bool:
    return type(value).__name__ == "InterpretedFunction"
