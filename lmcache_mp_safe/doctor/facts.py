"""What `doctor` measured. Nothing here is a judgement, and nothing is a guess: what is not known is None or empty."""

from __future__ import annotations

import enum
from typing import Any

import msgspec


class Software(msgspec.Struct, frozen=True):
    """Versions of the installed distributions; empty if one is not installed."""

    package: str
    python: str
    vllm: str
    torch: str
    lmcache: str


class Machine(msgspec.Struct, frozen=True):
    """`shm_*`: bytes of /dev/shm; None where there is none."""

    shm_total: int | None
    shm_free: int | None
    uid: int


class Host(msgspec.Struct, frozen=True):
    """The installed vLLM.

    Attributes:
        cuda: version that torch was built for; empty for a torch without CUDA.
        device: type of the device that vLLM would use; empty if it finds none.
        asks_capability: its scheduler asks connectors whether they complete divergent hybrid hits.
        reports_failed_loads: it has a channel for a failed load on a model with several KV cache groups.
        lookup_path: one line on how prefix hits of hybrid models are looked up with this connector.
        gate: functions of vLLM that this connector replaces when it starts.
        gate_error: why the gate does not fit this vLLM.
    """

    vllm: str
    cuda: str
    device: str
    device_name: str
    asks_capability: bool
    reports_failed_loads: bool
    lookup_path: str
    gate: tuple[str, ...] = ()
    gate_error: str = ""


class Group(msgspec.Struct, frozen=True):
    """One KV cache group. `kind` is empty where this connector has no class for it. Pages of one tensor rank."""

    spec: str
    kind: str
    block_tokens: int
    span_tokens: int
    layers: int
    page_bytes: int


class Model(msgspec.Struct, frozen=True):
    """The model's KV cache groups, as vLLM makes them.

    Attributes:
        block_tokens, chunk_tokens: as the connector would use them; 0 if it refuses the model.
        object_bytes: size of one object on the server, all ranks together; 0 likewise.
        objects_per_chunk: objects that a chunk of tokens takes at most: its pages, and the state at every boundary.
        refusal: why the connector refuses the model or the engine's settings.
    """

    groups: tuple[Group, ...]
    block_tokens: int = 0
    chunk_tokens: int = 0
    object_bytes: int = 0
    objects_per_chunk: int = 0
    refusal: str = ""

    @property
    def is_recurrent(self) -> bool:
        return any(group.spec == "MambaSpec" or group.kind == "recurrent" for group in self.groups)

    @property
    def recurrent_block_tokens(self) -> int:
        return max((group.block_tokens for group in self.groups if group.spec == "MambaSpec"), default=0)


class ConnectorKind(enum.Enum):
    NONE = "none"
    OURS = "LMCacheMPSafeConnector"
    STOCK = "LMCacheMPConnector"
    OTHER = "other"


class Connector(msgspec.Struct, frozen=True):
    """The KV connector of the engine's arguments.

    Attributes:
        in_multi: it is a child of MultiConnector.
        load_failure_policy: the one that vLLM would read: the outermost.
        settings_error: what is wrong with its `kv_connector_extra_config`, as this connector would say at its start.
    """

    kind: ConnectorKind
    name: str = ""
    role: str = ""
    in_multi: bool = False
    load_failure_policy: str = ""
    extra: dict[str, Any] = {}
    settings_error: str = ""


class Engine(msgspec.Struct, frozen=True):
    """What vLLM makes of the arguments that were given."""

    model: str
    architecture: str
    dtype: str
    is_hybrid: bool
    prefix_caching: bool
    mamba_cache_mode: str
    max_model_len: int
    tensor_ranks: int
    pipeline_ranks: int
    data_ranks: int
    speculation: str
    draft_tokens: int
    connector: Connector
    drops_last_block: bool = False


class Copies(msgspec.Struct, frozen=True):
    """How pages would be copied here.

    Attributes:
        backend, why: the backend that would be chosen; both empty and `error` set if there is none.
        pinning: whether memory in /dev/shm can be page-locked; None without a GPU.
        stock_ops_error: why LMCache's compiled CUDA operations cannot be loaded; empty if they can.
    """

    backend: str
    why: str
    error: str = ""
    pinning: bool | None = None
    pinning_error: str = ""
    stock_ops_error: str = ""


class Probe(msgspec.Struct, frozen=True):
    """What the process that looked at vLLM found.

    Attributes:
        host, engine, model, copies: None where it did not get that far, or was not asked to.
        failed_at: the step that failed; empty if none did.
        failure: what was wrong there.
        usage_error: vLLM's argument parser refused the arguments.
    """

    host: Host | None = None
    engine: Engine | None = None
    model: Model | None = None
    copies: Copies | None = None
    failed_at: str = ""
    failure: str = ""
    usage_error: bool = False


class Pool(msgspec.Struct, frozen=True):
    """The server's shared-memory pool, mapped here and proven to be the server's."""

    name: str
    size: int


class ServerConfig(msgspec.Struct, frozen=True):
    """What the server's HTTP interface says about it."""

    version: str
    transfer_mode: str
    shm_name: str
    lazy: bool
    separate_object_groups: bool
    chunk_tokens: int
    gpu_workers: int
    pool_bytes: int
    used_bytes: int


class Server(msgspec.Struct, frozen=True):
    """The LMCache server.

    Attributes:
        chunk_tokens: its chunk size; None if it does not answer.
        refusal: why its memory cannot be used; empty if `pool` is there.
        config: None if the HTTP interface was not read, and `config_error` says why.
    """

    url: str
    http_url: str
    chunk_tokens: int | None
    pool: Pool | None
    refusal: str
    config: ServerConfig | None
    config_error: str


class Facts(msgspec.Struct, frozen=True):
    """Everything. `server` is None where its address is not known."""

    software: Software
    machine: Machine
    probe: Probe
    server: Server | None
    arguments: tuple[str, ...] = ()
