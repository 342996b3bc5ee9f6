"""Objects around devices and processes under Lightning's names."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

import hasten_lightning
from tests.refusals import refused, warned


@pytest.fixture(autouse=True)
def _alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def test_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.collectives import Collective, SingleDeviceCollective, TorchCollective

    monkeypatch.delenv("MASTER_ADDR", raising=False)
    alone, one = SingleDeviceCollective().setup().create_group(), torch.ones(2)
    assert (alone.rank, alone.world_size, alone.all_gather([], one)) == (0, 1, [one])
    assert alone.teardown() is alone
    with refused(RuntimeError, says="`SingleDeviceCollective` does not own a group to destroy"):
        alone.teardown()
    with refused(RuntimeError, says="`SingleDeviceCollective` does not own a group", fix="create_group()"):
        _ = alone.group
    without = patch("lightning.fabric.plugins.collectives.torch_collective.dist.is_available", return_value=False)
    with without, refused(RuntimeError, says="Torch distributed is not available"):
        TorchCollective()
    assert issubclass(TorchCollective, Collective)
    if torch.distributed.is_initialized():
        pytest.skip("this process has a group")
    collective = TorchCollective()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    assert collective.setup("127.0.0.1", "1", backend="gloo", store=store, rank=0, world_size=1) is collective
    assert "MASTER_ADDR" not in os.environ
    assert TorchCollective.manages_default_group
    inner = None
    try:
        assert (collective.rank, collective.world_size) == (0, 1)
        assert torch.equal(collective.all_reduce(one.clone(), "max"), one)
        assert torch.equal(collective.broadcast(one.clone(), 0), one)
        gathered: list[Any] = [None]
        assert collective.all_gather_object(gathered, "here") == ["here"]
        collective.barrier()
        for op, says in (
            ("summ", "'SUMM' is not a member of .* Did you mean 'sum'"),
            (3, "Unsupported op 3 of type int"),
        ):
            with pytest.raises(ValueError, match=says):
                collective.all_reduce(one, op)
        inner = TorchCollective().create_group(ranks=[0])
        with refused(RuntimeError, says="already owns a group", fix="teardown()"):
            inner.create_group()
    finally:
        # With the last group of its own, the group that setup() made is given back, too.
        (inner if inner is not None else collective).teardown()
    assert not torch.distributed.is_initialized()
    assert not TorchCollective.manages_default_group


def test_strategies_of_fabric_can_be_driven_by_themselves(tmp_path: Path) -> None:
    from lightning.fabric.accelerators import CPUAccelerator
    from lightning.fabric.plugins import FSDPPrecision, HalfPrecision, MixedPrecision, TorchCheckpointIO
    from lightning.fabric.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

    precision, io = MixedPrecision("bf16-mixed", "cpu"), TorchCheckpointIO()
    strategy = SingleDeviceStrategy("cpu", CPUAccelerator(), io, precision)
    assert (strategy.precision, strategy.checkpoint_io) == (precision, io)
    strategy.setup_environment()
    with strategy.module_init_context(empty_init=False):
        model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped, (same,), scheduler = strategy.setup_module_and_optimizers(model, [optimizer])
    assert (same, scheduler) == (optimizer, None)
    strategy.backward(wrapped(strategy.batch_to_device(torch.ones(3, 2))).sum(), wrapped)
    assert strategy.clip_gradients_norm(wrapped, optimizer, 1.0) > 1
    strategy.clip_gradients_value(wrapped, optimizer, 0.1)
    assert model.weight.grad is not None
    assert model.weight.grad.abs().max() <= 0.1
    strategy.optimizer_step(optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 3}
    strategy.save_checkpoint(tmp_path / "file", state, filter={"model": lambda name, _: name == "weight"})
    loaded: dict[str, Any] = {"optimizer": optimizer, "step": 0}
    assert set(strategy.load_checkpoint(tmp_path / "file", loaded)["model"]) == {"weight"}
    assert loaded["step"] == 3
    with refused(KeyError, says="contains a key 'other' that does not exist in the loaded checkpoint"):
        strategy.load_checkpoint(tmp_path / "file", {"other": 1})
    assert "other" not in strategy.load_checkpoint(tmp_path / "file", {"other": 1}, strict=False)
    strategy.load_module_state_dict(module := Mock(), {"weight": 1}, strict=False)
    module.load_state_dict.assert_called_once_with({"weight": 1}, strict=False)
    strategy.save_checkpoint(tmp_path / "file", {"step": 3}, filter={"step": lambda *_: False})
    assert strategy.load_checkpoint(tmp_path / "file") == {"step": 3}
    strategy.accelerator, strategy.checkpoint_io, strategy._precision = Mock(), Mock(), Mock()
    strategy.teardown()
    for part in (strategy.accelerator, strategy.checkpoint_io, strategy.precision):
        part.teardown.assert_called_once_with()

    sharded = FSDPStrategy(sharding_strategy="NO_SHARD", cpu_offload=True, precision=FSDPPrecision("16-true"))
    assert (sharded.sharding_strategy.name, sharded.cpu_offload.offload_params) == ("NO_SHARD", True)
    with warned(UserWarning, says="FSDPPrecision('16-true')"):
        assert sharded.mixed_precision_config.reduce_dtype == torch.float16
    for wrong in (lambda: FSDPStrategy(precision=HalfPrecision()), lambda: setattr(sharded, "precision", precision)):
        with refused(TypeError, "precision", says="FSDPPrecision"):
            wrong()
    with pytest.raises(TypeError):
        sharded.clip_gradients_norm(model, optimizer, 1.0)
    for own in (sharded, ModelParallelStrategy(lambda module, _: module)):
        for error, call in (
            (TypeError, partial(own.save_checkpoint, tmp_path, {}, storage_options=1)),
            (ValueError, partial(own.save_checkpoint, tmp_path, {"model": model})),
            (ValueError, partial(own.load_checkpoint, tmp_path, {})),
            (ValueError, partial(own.load_checkpoint, tmp_path, {"model": model})),
            (ValueError, partial(own.load_checkpoint, tmp_path, model)),
            (NotImplementedError, partial(own.load_checkpoint, tmp_path, optimizer)),
        ):
            with pytest.raises(error):
                call()
    assert DDPStrategy(parallel_devices=[torch.device("cpu")]).launcher is not None


def test_strategies_and_precisions_of_the_trainer() -> None:
    import lightning as L
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.plugins import MixedPrecision, Precision
    from lightning.pytorch.strategies import (
        DDPStrategy,
        FSDPStrategy,
        ModelParallelStrategy,
        ParallelStrategy,
        SingleDeviceStrategy,
    )

    calls = []

    class Scaled(MixedPrecision):
        def pre_backward(self, tensor: Any, module: Any) -> Any:
            calls.append("pre_backward")
            return super().pre_backward(tensor, module)

        def backward(self, tensor: Any, model: Any, third: Any, *args: Any, **kwargs: Any) -> None:
            assert isinstance(third, torch.optim.Optimizer)
            calls.append("backward")
            super().backward(tensor, model, third, *args, **kwargs)

    class Own(SingleDeviceStrategy):
        def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("strategy")
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    class Model(BoringModel):
        def backward(self, loss: Any) -> None:
            calls.append("module")
            loss.backward()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # Scaled once, and unscaled before this hook.
            assert self.layer.weight.grad is not None
            gradients.append(self.layer.weight.grad.clone())

    gradients: list[torch.Tensor] = []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for strategy, plugins in ((Own("cpu"), [Scaled("16-mixed", "cpu", scaler)]), ("auto", None)):
        L.seed_everything(1)
        options = {"accelerator": "cpu", "max_steps": 1, "barebones": True}
        L.Trainer(strategy=strategy, plugins=plugins, **options).fit(Model())
    assert calls == ["strategy", "pre_backward", "backward", "module", "module"]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.02, atol=0.02)

    trainer = L.Trainer(accelerator="cpu", barebones=True)
    assert type(trainer.precision_plugin) is Precision
    trainer.strategy.connect(model := BoringModel())
    assert trainer.strategy.lightning_module is model
    assert trainer.strategy.model is model
    trainer.strategy.setup_optimizers(trainer)
    assert isinstance(trainer.strategy.optimizers[0], torch.optim.SGD)
    assert len(trainer.strategy.lr_scheduler_configs) == 1
    with trainer.precision_plugin.train_step_context(), trainer.strategy.tensor_init_context():
        assert trainer.precision_plugin.connect(model, [], []) == (model, [], [])
    alone = SingleDeviceStrategy("cpu", precision_plugin=MixedPrecision("16-mixed", "cpu", scaler))
    alone.connect(model)
    loss = model.layer(torch.ones(1, 32)).sum()
    alone.backward(loss, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.layer.bias.grad is not None
    assert model.layer.bias.grad.tolist() == [scaler.get_scale()] * 2
    alone.precision_plugin = Mock()
    alone.optimizer_step(optimizer, closure := Mock())
    alone.precision_plugin.optimizer_step.assert_called_once_with(optimizer, model=model, closure=closure)
    ddp = DDPStrategy(parallel_devices=[torch.device("cpu")])
    ddp.engine = Mock(no_sync=Mock(return_value=nullcontext("held back")))
    with ddp.block_backward_sync() as nothing_is_wrapped:
        assert nothing_is_wrapped is None
    ddp.model = model
    with ddp.block_backward_sync() as held_back:
        assert held_back == "held back"
    ddp.engine.no_sync.assert_called_once_with(model)

    class Reduces(ParallelStrategy):
        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            return tensor + 1

    assert Reduces().reduce_boolean_decision(True)
    assert Reduces().all_reduce(1) == 2
    for shared in (FSDPStrategy(), ModelParallelStrategy()):
        with refused(TypeError, "storage_options"):
            shared.save_checkpoint({}, "file", storage_options={})


def test_registries_have_the_names_of_lightning() -> None:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

    unused = [f"_find_unused_parameters_{word}" for word in ("true", "false")]
    ddp = {f"ddp{start}{end}" for start in ("", "_spawn", "_fork", "_notebook") for end in ("", *unused)}
    both = {"fsdp", "fsdp_cpu_offload", "single_tpu", "single_xla", "xla"}
    both |= {f"deepspeed{end}" for end in ("", *(f"_stage_{stage}" for stage in ("1", "2", "2_offload", "3")))}
    both |= {"deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme"}
    assert set(StrategyRegistry.available_strategies()) == both | ddp | {"single_device", "xla_debug"}
    of_fabric = {name for name in ddp if "unused" not in name} | {f"ddp{unused[0]}"}
    of_fabric |= {"deepspeed_stage_1_offload", "dp", "xla_fsdp"}
    assert set(STRATEGY_REGISTRY.available_strategies()) == both | of_fabric
    with refused(ValueError, says="'ddp' is already present in the registry"):
        StrategyRegistry.register("ddp", DDPStrategy)
    with refused(KeyError, says="'horse' not found in registry. Available names: "):
        StrategyRegistry.get("horse")


def _without(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_NODELIST", "STANDALONE_PORT")
    for name in names:
        monkeypatch.setenv(name, "")  # Restored afterwards, whatever a property sets.
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_environments_set_the_address_that_programs_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.environments import LSFEnvironment, SLURMEnvironment, TorchElasticEnvironment

    _without(monkeypatch, SLURM_JOB_ID="123456", SLURM_NODELIST="a[1-3]")
    slurm = SLURMEnvironment(auto_requeue=0, requeue_signal=signal.SIGKILL)
    assert (slurm.auto_requeue, slurm.requeue_signal) == (0, signal.SIGKILL)
    assert (slurm.main_address, slurm.main_port) == ("a1", 18456)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("a1", "18456")
    _without(monkeypatch, SLURM_JOB_ID="abc")
    with pytest.raises(ValueError):
        _ = slurm.main_port
    assert slurm.resolve_root_node_address("host[]") == "host"

    _without(monkeypatch)
    torchrun = TorchElasticEnvironment()
    with warned(UserWarning, says="MASTER_ADDR environment variable is not defined. Set as localhost"):
        assert torchrun.main_address == os.environ["MASTER_ADDR"] == "127.0.0.1"
    with warned(UserWarning, says="MASTER_PORT"):
        assert torchrun.main_port == int(os.environ["MASTER_PORT"]) == 12910
    with pytest.raises(KeyError):
        torchrun.validate_settings(1, 4)
    monkeypatch.setattr("torch.distributed.is_torchelastic_launched", lambda: True)
    assert torchrun.detect()

    ranks = tmp_path / "ranks"
    ranks.write_text(f"launcher\nfirst\n{socket.gethostname()}\n")
    _without(monkeypatch, LSB_DJOB_RANKFILE=str(ranks), LSB_JOBID="1234")
    lsf = LSFEnvironment()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], lsf.node_rank()) == ("first", "10234", 1)
    lsf.validate_settings(3, 5)
    for ask in (lsf.world_size, lsf.global_rank, lsf.local_rank):
        with refused(ValueError, says="JSM_NAMESPACE"):
            ask()
    ranks.write_text("launcher\nfirst\n")
    with pytest.raises(KeyError):
        LSFEnvironment()


def test_the_environments_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.environments import KubeflowEnvironment, LightningEnvironment

    from hasten.machine.cluster import find_cluster

    _without(monkeypatch, STANDALONE_PORT="900")
    assert LightningEnvironment().main_port == 900
    with patch("lightning.fabric.plugins.environments.lightning.find_free_network_port", return_value=901):
        assert LightningEnvironment().main_port == 901
    # A job of one pod: Lightning starts the processes for its devices.
    _without(monkeypatch, KUBERNETES_PORT="tcp://1", MASTER_ADDR="x", MASTER_PORT="1", WORLD_SIZE="1", RANK="0")
    KubeflowEnvironment().validate_settings(4, 1)
    assert type(find_cluster()).__name__ == "LightningEnvironment"
