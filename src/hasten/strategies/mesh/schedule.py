"""How the micro-batches of a batch go through the stages: in the order of one of torch's schedules.

Source: `PyTorch, torch.distributed.pipelining <https://docs.pytorch.org/docs/stable/distributed.pipelining.html>`_.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from hasten._lib import torch_private
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean

NAMES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# Their stages go through the processes and back, so the first process has the first stage and the last.
_THERE_AND_BACK = (pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV)
# They compute the gradients of activations first, and those of parameters where a process would wait.
_IN_TWO_PARTS = (pipelining.ScheduleInterleavedZeroBubble, *_THERE_AND_BACK)

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMENSIONS = 8


class Schedule:
    """One of torch's schedules, for a number of processes and stages.

    ``name`` is torch's, such as "1F1B"; see ``NAMES``. Without ``stages`` there is one in each process, or two with
    schedules of several; without ``micro_batches`` there are two for each stage. Messages name ``owner``.

    Example::

        >>> Schedule("zbvzerobubble", 2, None, None, "MeshStrategy").stages_of(0)
        [0, 3]

    """

    def __init__(self, name: str, processes: int, stages: int | None, micro_batches: int | None, owner: str) -> None:
        if str(name).lower() not in map(str.lower, NAMES):
            what = f"{owner}(schedule={name!r}): torch's schedules are {', '.join(map(repr, NAMES))}."
            fix = did_you_mean(str(name), NAMES) or "Write one of them."
            raise make_error(ValueError, what, fix=fix, argument="schedule")
        self._kind = get_schedule_class(name)
        self.in_two_parts = issubclass(self._kind, _IN_TWO_PARTS)
        back, one = issubclass(self._kind, _THERE_AND_BACK), issubclass(self._kind, PipelineScheduleSingle)
        self.stages = (processes if one else 2 * processes) if stages is None else stages
        # Stages in a process.
        allowed_each = [1] if one else [2] if back else range(1, self.stages + 1)
        if self.stages not in [each * processes for each in allowed_each]:
            allowed = f"a multiple of {processes}" if len(allowed_each) > 1 else f"{allowed_each[0] * processes}"
            raise make_error(
                ValueError,
                f"{owner}(pipeline={processes}, schedule={name!r}): its number of stages is {allowed}, and split makes "
                f"{self.stages}.",
                fix="Name as many blocks less one, or leave split out.",
                argument="split",
            )
        self.micro_batches = 2 * self.stages if micro_batches is None else micro_batches
        if not self._takes(self.micro_batches, processes):
            raise make_error(
                ValueError,
                f"{owner}(pipeline={processes}, schedule={name!r}, micro_batches={micro_batches}): they do not divide "
                f"into rounds of at least {processes}.",
                fix=f"Use a multiple of {processes}.",
                argument="micro_batches",
            )
        # The process of each stage.
        self.process_of = [stage % processes for stage in range(self.stages)]
        if back:
            self.process_of[processes:] = reversed(range(processes))

    def _takes(self, parts: int, processes: int) -> bool:
        """Return whether an interleaved schedule, which goes in rounds, can have this many micro-batches."""
        return "Interleaved" not in self._kind.__name__ or parts % max(1, parts // processes) == 0

    def stages_of(self, process: int) -> list[int]:
        """Return the stages of a process, in order."""
        return [stage for stage, one in enumerate(self.process_of) if one == process]

    def part_size(self, samples: int) -> int:
        """Return how many samples of a batch are in a micro-batch; the last may have fewer."""
        return math.ceil(samples / self.micro_batches)

    def idle_share(self, parts: int) -> float | None:
        """Return the part of a step in which a process waits for others, if all stages take the same time.

        ``parts`` is the number of micro-batches. None for schedules that fill the time with gradients of parameters,
        which wait less.

        Example::

            >>> Schedule("1F1B", 4, None, None, "MeshStrategy").idle_share(12)
            0.2

        """
        processes = len(set(self.process_of))
        return None if self.in_two_parts else (processes - 1) / (self.stages // processes * parts + processes - 1)

    def make(self, stages: list[Stage], parts: int) -> Any:
        """Return torch's schedule for a number of micro-batches.

        A batch with fewer samples than micro-batches, such as the last of an epoch, may be too few for it: then all
        forwards come first, which any number can.
        """
        # Where a step fails, torch would print all actions of all processes before the error.
        logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
        kind: Any = self._kind
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        if issubclass(kind, PipelineScheduleSingle):
            if parts < self.stages:
                kind = pipelining.ScheduleGPipe
            return kind(stages[0], parts, **options)
        if not self._takes(parts, self.stages // len(stages)):
            kind = pipelining.ScheduleLoopedBFS
        if kind is pipelining.ScheduleDualPipeV and parts < self.stages:
            kind = pipelining.ScheduleZBVZeroBubble
        return kind(stages, parts, **options)


class Stage(pipelining.PipelineStage):
    """A stage as torch's schedules use it: it computes micro-batches, and exchanges activations and their gradients.

    Activations of a batch whose shapes are new are sent with a header, so that no stage has to compute only to learn
    them.

    Tensors are exchanged on ``device``. ``forward`` gets the index of a micro-batch and the activations of the stage
    before, and returns those for the next stage, or the loss.
    """

    def __init__(
        self,
        index: int,
        schedule: Schedule,
        group: dist.ProcessGroup,
        device: torch.device,
        forward: Callable[[int, int, Tensor | None], Tensor],
        parameters: list[nn.Parameter],
    ) -> None:
        super().__init__(nn.Module(), index, schedule.stages, device, group=group)
        self.stage_index_to_group_rank = dict(enumerate(schedule.process_of))
        self._forward, self._parameters, self._in_two_parts = forward, parameters, schedule.in_two_parts
        # By what a micro-batch looks like: shape and type of what the stage gets, and whether it needs a gradient.
        self._known: dict[Hashable, tuple[torch.Size, torch.dtype, bool]] = {}
        self._kinds: list[Hashable] = []
        self._sends_headers = False

    def begin(self, kinds: list[Hashable], *, sends_headers: bool) -> None:
        """Prepare for a batch, of which each micro-batch is of a kind; headers are sent if some look as none before."""
        self._kinds, self._sends_headers = kinds, sends_headers
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}
        self._output_gradients: dict[int, Tensor] = {}
        self._input_gradients: dict[int, Tensor | None] = {}
        self._rest: dict[int, Any] = {}

    def clear_runtime_states(self) -> None:
        """Do nothing: ``begin`` does."""

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: gradients are reduced after the schedule."""

    # -- forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        self._inputs[fwd_chunk_id] = buffer = self.receive_header(self._kinds[fwd_chunk_id])
        return [self._operation(dist.irecv, buffer, self.stage_index - 1)]

    def expect(self, kind: Hashable, like: Tensor) -> None:
        """Take the activations of a micro-batch to look like a tensor, without a header."""
        self._known[kind] = like.shape, like.dtype, True

    def receive_header(self, kind: Hashable) -> Tensor:
        """Return an empty tensor for the activations of a micro-batch."""
        if self._sends_headers:
            header = torch.zeros(_MOST_DIMENSIONS + 3, dtype=torch.int64, device=self.device)
            dist.recv(header, group=self.group, group_src=self.stage_index_to_group_rank[self.stage_index - 1])
            trains, place, dimensions, *sizes = header.tolist()
            self._known[kind] = torch.Size(sizes[:dimensions]), _DTYPES[place], bool(trains)
        shape, dtype, _ = self._known[kind]
        return torch.empty(shape, dtype=dtype, device=self.device)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self.is_last else self.send_ops(self._outputs[fwd_chunk_id])

    def send_ops(self, output: Tensor) -> list[dist.P2POp]:
        """Return what sends activations to the next stage."""
        sent = [self._operation(dist.isend, output.detach().contiguous(), self.stage_index + 1)]
        if self._sends_headers:
            missing = [0] * (_MOST_DIMENSIONS - output.dim())
            facts = [output.requires_grad, _DTYPES.index(output.dtype), output.dim(), *output.shape, *missing]
            header = torch.tensor([int(fact) for fact in facts], device=self.device)
            sent.insert(0, self._operation(dist.isend, header, self.stage_index + 1))
        return sent

    def set_local_fwd_input(self, prev_stage_outputs: Tensor, mb_index: int) -> None:
        output = prev_stage_outputs
        self._known[self._kinds[mb_index]] = output.shape, output.dtype, output.requires_grad
        self._inputs[mb_index] = output.detach()

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        received = self._inputs.get(fwd_chunk_id)
        if received is not None:
            received.requires_grad_(self._known[self._kinds[fwd_chunk_id]][2])
        output = self._forward(self.stage_index, fwd_chunk_id, received)
        if self._in_two_parts and torch_private.is_view(output):
            # Torch detaches it in place.
            output = output.clone()
        self._outputs[fwd_chunk_id] = output
        return output

    # -- backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        output = self._outputs[bwd_chunk_id] if not self.is_last else None
        if output is None or not output.requires_grad:
            return []
        buffer = torch.empty(output.shape, dtype=output.dtype, device=self.device)
        self._output_gradients[bwd_chunk_id] = buffer
        return [self._operation(dist.irecv, buffer, self.stage_index + 1)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        gradient = self.get_local_bwd_output(bwd_chunk_id)[0]
        return [] if gradient is None else [self._operation(dist.isend, gradient, self.stage_index - 1)]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None]:
        return (self._input_gradients.pop(mb_index, None),)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if next_stage_bwd_outputs[0] is not None:
            self._output_gradients[mb_index] = next_stage_bwd_outputs[0]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        output, received = self._outputs.pop(bwd_chunk_id), self._inputs.pop(bwd_chunk_id, None)
        gradient = self._output_gradients.pop(bwd_chunk_id, None)
        if received is not None and not received.requires_grad:
            received = None
        if full_backward or received is None or not output.requires_grad:
            self._rest[bwd_chunk_id] = output, gradient
            if full_backward or received is not None:
                self.backward_weight_one_chunk(bwd_chunk_id)
        else:
            with self._plain():
                groups = torch_private.gradients_of_inputs(output, gradient, received, self._parameters)
            self._rest[bwd_chunk_id] = groups
        if received is not None:
            # The stage before waits for it, also where the activations have no part in the loss.
            found, received.grad = received.grad, None
            self._input_gradients[bwd_chunk_id] = torch.zeros_like(received) if found is None else found.contiguous()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        rest = self._rest.pop(bwd_chunk_id, None)
        with self._plain():
            if isinstance(rest, list):
                torch_private.gradients_of_parameters(self._parameters, rest)
            elif rest is not None and rest[0].requires_grad:
                torch.autograd.backward(rest[0], rest[1])

    def _plain(self) -> torch.autocast:
        """Return a context for backward, which computes in the types of the forward."""
        return torch.autocast(self.device.type, enabled=False)

    def _operation(self, kind: Callable[..., Any], tensor: Tensor, stage: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, group=self.group, group_peer=self.stage_index_to_group_rank[stage])


def check_stage_tensor(output: Tensor, owner: str) -> None:
    """Raise MisconfigurationException unless a tensor can be sent to the next stage."""
    if not isinstance(output, Tensor) or output.dtype not in _DTYPES or output.dim() > _MOST_DIMENSIONS:
        what = f"{owner}(pipeline=...): blocks pass on {type(output).__name__}."
        fix = f"Use a floating-point tensor of at most {_MOST_DIMENSIONS} dimensions."
        raise MisconfigurationException(what, fix=fix, argument="pipeline")
