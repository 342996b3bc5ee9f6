"""Objects around devices and processes under Lightning's names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten.compat


@pytest.fixture(autouse=True)
def _alias() -> Iterator[None]:
    hasten.compat.install()
    yield
    hasten.compat.uninstall()


def test_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.fabric.plugins.collectives import Collective, SingleDeviceCollective, TorchCollective

    monkeypatch.delenv("MASTER_ADDR", raising=False)
    alone, one = SingleDeviceCollective().setup().create_group(), torch.ones(2)
    assert (alone.rank, alone.world_size, alone.all_gather([], one)) == (0, 1, [one])
    assert alone.teardown() is alone
    with pytest.raises(RuntimeError, match="no group"):
        alone.teardown()
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
        for op, says in (("summ", "Did you mean 'sum'"), (3, "use a name")):
            with pytest.raises(ValueError, match=says):
                collective.all_reduce(one, op)
        inner = TorchCollective().create_group(ranks=[0])
        with pytest.raises(RuntimeError, match="has a group"):
            inner.create_group()
    finally:
        # With the last group of its own, the group that setup() made is given back, too.
        (inner if inner is not None else collective).teardown()
    assert not torch.distributed.is_initialized()
    assert not TorchCollective.manages_default_group
