"""Context and Step: the library's ctx and step with the lifetime of Python objects.

A Context connects the ranks and knows the model's layer kinds; a Step is one batch's documents,
padding, images and shards, planned once for all layers, forward, backward and recomputation. Both
are collective: every rank of the group creates them, in the same order. Must not know autograd.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import weakref
from collections.abc import Sequence
from ctypes import byref, c_void_p, sizeof
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ringattn import _c
from ringattn.backend import Backend, current_device_stays, open_backend
from ringattn.comm import Comm, open_group, open_single
from ringattn.errors import ArgumentError
from ringattn.layer import Layer
from ringattn.metadata import (
    NO_IDS,
    agree_counts,
    check_integers,
    check_mask,
    check_shape,
    host_documents,
    host_mask,
    host_token_types,
    wide_ids,
)
from ringattn.shards import Layout, Runs, run_array, shard_runs, unshard

if TYPE_CHECKING:
    from ringattn.call import Call

logger = logging.getLogger("ringattn")
TIMEOUT_MS = 30_000


def _free(backend: Backend, comm: Comm, ctx: c_void_p, steps: set[int]) -> None:
    with current_device_stays(backend.device):
        while steps:
            _c.lib.ra_step_free(steps.pop())
        _c.lib.ra_ctx_free(ctx)
        comm.close()
        backend.close()


class Core:
    """The C objects of a context, freed together: when asked, with the last user, or at exit."""

    def __init__(self, backend: Backend, comm: Comm) -> None:
        self.backend = backend
        self.comm = comm
        self.ctx = c_void_p()
        self.steps: set[int] = set()
        self.closed = False
        self._finalize = weakref.finalize(self, _free, backend, comm, self.ctx, self.steps)

    def free_step(self, handle: int) -> None:
        if handle in self.steps:
            self.steps.remove(handle)
            with current_device_stays(self.backend.device):
                _c.lib.ra_step_free(handle)

    def close(self) -> None:
        self.closed = True
        self._finalize()


def _inspect(plan: int) -> _c.PlanInfo:
    info = _c.PlanInfo(size=sizeof(_c.PlanInfo))
    _c.check(_c.lib.ra_plan_inspect(plan, byref(info)))
    return info


class StepCore:
    """An ra_step and its plans. Keeps its context's C objects alive.

    kept_seq: rows that each layer's forward keeps; None in a context without keep_kv.
    """

    def __init__(self, core: Core, handle: int, layer_count: int, keep_kv: bool) -> None:
        self.core = core
        self.handle = handle
        core.steps.add(handle)
        self.plans = [_c.lib.ra_step_plan(handle, i) for i in range(layer_count)]
        self.kept_seq = [int(_inspect(p).kept_seq) for p in self.plans] if keep_kv else None

    def __del__(self) -> None:
        self.core.free_step(self.handle)


class _HandleMemory(ctypes.c_int64 * 1):  # type: ignore[misc]
    """The memory of a step's handle tensor: it keeps the step alive as long as any tensor of a
    compiled graph still refers to it."""

    core: StepCore


_live: weakref.WeakValueDictionary[int, StepCore] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def step_of(handle: torch.Tensor) -> StepCore:
    """The step of a handle tensor."""
    number = int(handle)
    core = _live.get(number)
    if core is None:
        raise ArgumentError(_c.RA_E_ARG, "RA_E_ARG", f"step {number}: it does not exist any more")
    return core


class Step:
    """One batch on this rank. Made by Context.step; give it to ringattn.attention.

    handle: an int64 tensor that stands for the step in compiled graphs. calls: of each layer, the
    last tensors' call.
    """

    def __init__(
        self, context: Context, core: StepCore, rows: int, seq_local: int, runs: Runs
    ) -> None:
        self.context = context
        self.core = core
        self.rows, self.seq_local = rows, seq_local
        self.runs = list(runs)
        self.layers = context.layers
        self.calls: list[Call | None] = [None] * len(self.layers)
        self.device_type = context.device.type
        self.keep_kv = context.keep_kv
        self.padded = False
        number = next(_numbers)
        _live[number] = core
        memory = _HandleMemory(number)
        memory.core = core
        self.handle = torch.frombuffer(memory, dtype=torch.int64)

    def plan_info(self, layer: int = 0) -> dict[str, Any]:
        """ra_plan_inspect of a layer: the path and why, hops, bytes, pairs, scratch."""
        info = _inspect(self.core.plans[layer])
        values = {name: getattr(info, name) for name, *_ in _c.PlanInfo._fields_}
        del values["size"]
        return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}

    def global_positions(self) -> torch.Tensor:
        """The positions of this rank's tokens in the whole row, [seq_local]."""
        parts = [torch.arange(start, start + n, device="cpu") for start, n in self.runs]
        return torch.cat(parts) if parts else torch.arange(0, device="cpu")


def _process_group(group: Any) -> Any:
    """A ProcessGroup of a ProcessGroup or of a DeviceMesh with one dimension."""
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
        if group.ndim != 1:
            raise ValueError(
                f"group: a DeviceMesh of {group.ndim} dimensions, expected 1: mesh['cp'] names one"
            )
        return group.get_group()
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not in it")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: {type(group).__name__}, expected None, a ProcessGroup or a DeviceMesh"
        )
    return group


def _warn_if_alone(group: Any) -> None:
    """dist.group.WORLD is None until torch.distributed is initialized: every launched rank would
    take its shard for the whole sequence."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if group is None and launched != "1" and not dist.is_initialized():
        logger.warning(
            "group: None, so this process is alone, but WORLD_SIZE is %s; call "
            "torch.distributed.init_process_group() before taking a group",
            launched,
        )


def _checked(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    if isinstance(layers, Layer) or not all(isinstance(layer, Layer) for layer in layers):
        raise TypeError(f"layers: {layers!r}, expected a sequence of ringattn.Layer")
    return tuple(layers)


class Context:
    """Ranks, device and layer kinds. Collective; long-lived.

    group: None = this process alone; else a ProcessGroup or a one-dimensional DeviceMesh, whose
        ranks each hold a shard of the sequence. The ring makes a group of its own from it: NCCL
        for a NCCL group and a CUDA device, with one process per GPU; gloo for every other.
    layers: the model's layer kinds, at most 16; the same on every rank.
    device: where q, k and v live; "cuda" is the current one. threads: of the CPU backend, None =
        as many as torch uses.
    timeout_ms: no call waits longer without progress.
    keep_kv: the forward keeps the rows that it received for the backward, which then exchanges
        gradients only: less traffic, more memory. The same on every rank.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        layers: Sequence[Layer],
        device: torch.device | str = "cpu",
        threads: int | None = None,
        timeout_ms: int = TIMEOUT_MS,
        scratch_bytes_max: int = 0,
        forward_only: bool = False,
        overlap: bool = True,
        keep_kv: bool = False,
    ) -> None:
        self.layers = _checked(layers)
        self.timeout_ms = timeout_ms
        self.keep_kv = keep_kv
        options = _c.CtxOptions(
            size=sizeof(_c.CtxOptions),
            scratch_bytes_max=_c.fit(scratch_bytes_max, "scratch_bytes_max", ctypes.c_uint64),
            timeout_ms=_c.fit(timeout_ms, "timeout_ms", ctypes.c_int),
            forward_only=forward_only,
            no_overlap=not overlap,
            keep_kv=keep_kv,
        )
        with current_device_stays(torch.device(device)):
            group = _process_group(group)
            _warn_if_alone(group)
            backend = open_backend(torch.device(device), threads)
            comm = open_single() if group is None else open_group(group, backend.device, timeout_ms)
            self._core = Core(backend, comm)
            array = (_c.Layer * max(len(self.layers), 1))(*(layer.to_c() for layer in self.layers))
            comm.check(
                _c.lib.ra_ctx_create(
                    backend.handle,
                    comm.handle,
                    array,
                    len(self.layers),
                    byref(options),
                    byref(self._core.ctx),
                )
            )
        self._said_causal = False

    @property
    def rank(self) -> int:
        return self._core.comm.rank

    @property
    def size(self) -> int:
        return self._core.comm.size

    @property
    def device(self) -> torch.device:
        return self._core.backend.device

    @property
    def backend(self) -> str:
        """Name and level of the backend: "cpu avx512"."""
        return f"{self._core.backend.name} {self._core.backend.level}"

    @property
    def transport(self) -> str:
        """What carries the messages: "single process", "gloo" or "nccl 2.27.3"."""
        return self._core.comm.transport

    def kernel(self, backward: bool = False) -> str:
        """The CUDA kernel of the last forward or backward: "simple" is the plain one; else ""."""
        return self._core.backend.kernel(backward)

    def bytes_sent(self) -> int:
        """Bytes that this rank's exchanges have sent so far."""
        return self._core.comm.bytes_sent()

    def abort(self, why: str) -> None:
        """Gives up on every rank: for a rank that cannot go on. Peers get a CommError."""
        self._core.comm.abort(why)

    def close(self) -> None:
        """Frees everything now. Steps of this context cannot be used any more."""
        self._core.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def gather_rows(
        self, part: torch.Tensor, layout: Layout | Sequence[Runs] = "contiguous"
    ) -> torch.Tensor:
        """The whole rows of a small host tensor [rows, seq_local] from all ranks' parts.
        Collective; no gradient."""
        comm, rows = self._core.comm, part.shape[0]
        length = torch.tensor([part.shape[1]], device="cpu")
        lengths = comm.gather(length, self.timeout_ms).flatten().tolist()
        mine = torch.zeros(rows, max(lengths), dtype=part.dtype, device="cpu")
        mine[:, : part.shape[1]] = part
        everyone = comm.gather(mine, self.timeout_ms)
        parts = [said[:, :length] for said, length in zip(everyone, lengths)]
        return unshard(parts, layout)

    def step(
        self,
        shape: tuple[int, int] | None = None,
        *,
        packed_seq_ids: torch.Tensor | None = None,
        padding_mask: torch.Tensor | None = None,
        mm_token_type_ids: torch.Tensor | None = None,
        layout: Layout | Sequence[Runs] = "contiguous",
    ) -> Step:
        """Describes one batch: this rank's [rows, seq_local] slices. Collective.

        shape: (rows, seq_local) where no metadata tensor says it.
        packed_seq_ids: document ids, <= 0 is padding; one id is one document wherever it stands.
        padding_mask: bool, true = padding, in addition. mm_token_type_ids: 1 image, 2 video.
        layout: "contiguous" in rank order (any lengths), "zigzag", or the runs of every rank.
        """
        comm, error = self._core.comm, None
        wide, rows, seq_local = NO_IDS, 0, 0
        ids = mask = types = None
        try:
            if self._core.closed:
                raise RuntimeError("context: closed")
            rows, seq_local = self._shape(shape, packed_seq_ids, padding_mask, mm_token_type_ids)
            shard_runs(self.rank, self.size, 0, layout)
            ids = None if packed_seq_ids is None else packed_seq_ids.cpu()
            mask, types = host_mask(padding_mask), host_token_types(mm_token_type_ids)
            wide = wide_ids(ids)
        except Exception as caught:
            error = caught
        said = agree_counts(comm, error, (wide.numel(), seq_local), self.timeout_ms)
        lengths = [length for _, length in said]
        doc_id = host_documents(ids, any(n for n, _ in said), comm, self.timeout_ms)
        if isinstance(layout, str) and layout == "contiguous":
            runs: Runs = [(sum(lengths[: self.rank]), seq_local)] if seq_local else []
        else:
            runs = shard_runs(self.rank, self.size, sum(lengths), layout)
        desc = _c.StepDesc(size=sizeof(_c.StepDesc), rows=rows, seq_local=seq_local)
        if layout != "contiguous":
            desc.runs, desc.run_count = run_array(runs), len(runs)
        metadata = (
            ("doc_id", doc_id),
            ("is_pad", mask),
            ("token_type", types),
        )
        for name, tensor in metadata:
            if tensor is not None:
                setattr(desc, name, tensor.data_ptr())
        handle = c_void_p()
        with current_device_stays(self.device):
            comm.check(_c.lib.ra_step_create(self._core.ctx, byref(desc), byref(handle)))
        core = StepCore(self._core, handle.value or 0, len(self.layers), self.keep_kv)
        return Step(self, core, rows, seq_local, runs)

    def _shape(
        self,
        shape: tuple[int, int] | None,
        ids: torch.Tensor | None,
        mask: torch.Tensor | None,
        types: torch.Tensor | None,
    ) -> tuple[int, int]:
        check_integers(ids, "packed_seq_ids")
        check_integers(types, "mm_token_type_ids")
        check_mask(mask, "padding_mask")
        named = {"packed_seq_ids": ids, "padding_mask": mask, "mm_token_type_ids": types}
        for name, tensor in named.items():
            if shape is None and tensor is not None:
                if tensor.dim() != 2:
                    raise ValueError(
                        f"{name}: shape {tuple(tensor.shape)}, expected (rows, seq_local)"
                    )
                shape = (tensor.shape[0], tensor.shape[1])
        if shape is None:
            raise ValueError("shape: None, expected (rows, seq_local), or a metadata tensor")
        if len(shape) != 2:
            raise ValueError(f"shape: {tuple(shape)}, expected (rows, seq_local)")
        for name, tensor in named.items():
            check_shape(tensor, name, shape)
        sees_images = any(layer.vision != "off" and layer.window > 0 for layer in self.layers)
        if types is None and sees_images and not self._said_causal:
            self._said_causal = True
            logger.warning(
                "no mm_token_type_ids: every token of the step is text, also to layers "
                "with a vision rule"
            )
        return _c.fit(shape[0], "rows"), _c.fit(shape[1], "seq_local")
