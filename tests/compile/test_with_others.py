"""``compile`` where it meets the rest: Fabric, two processes, checkpoints, profilers, other speed-ups, bad machines."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

import hasten as L
from hasten._lib import torch_private
from hasten.callbacks import ThroughputMonitor
from hasten.compile.cache import keep_torchs_cache
from hasten.compile.report import FROZEN
from tests.compile.test_compile import TRACED, Deep, Net, fitted, fitted_alike, graphs
from tests.models import loader, quiet, same_weights
from tests.programs import fork_python
from tests.refusals import refused

# -- Fabric


def trained_by_fabric(**arguments: Any) -> tuple[nn.Module, Any, list[str]]:
    torch.manual_seed(0)
    net = Deep()
    fabric = L.Fabric(**{"accelerator": "cpu", "devices": 1, **arguments})
    fabric.launch()
    model, optimizer = fabric.setup(net.net, torch.optim.SGD(net.net.parameters(), lr=0.1))
    for _ in range(2):
        for x, y in fabric.setup_dataloaders(loader(18)):
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for x, _ in loader(10):
                model(x)
        model.train()
    return net.net, fabric, list(model.state_dict())


@pytest.mark.parametrize("compile", [TRACED, {**TRACED, "regional": True}])
def test_fabric_compiles_one_graph_a_phase(compile: dict[str, Any]) -> None:
    plain, before, keys = trained_by_fabric()
    counters.clear()
    net, fabric, compiled_keys = trained_by_fabric(compile=compile)
    report = fabric.compile_report
    assert before.compile_report is None
    assert (graphs(), report.graphs, report.graph_breaks, report.recompiles) == (2, 2, {}, ())
    assert report.compiled == (("Block",) if "regional" in compile else ("Sequential",))
    assert keys == compiled_keys == list(net.state_dict())
    assert same_weights(net, plain)
    kept = weakref.ref(net)
    del net, fabric
    gc.collect()
    assert kept() is None


@pytest.mark.world_size(2)
def test_two_processes_train_to_the_weights_of_plain_ones() -> None:
    several = {"devices": 2, "strategy": "ddp"}
    bare, _, _ = trained_by_fabric(**several)
    net, fabric, keys = trained_by_fabric(compile=TRACED, **several)
    assert same_weights(net, bare)
    assert not any("_orig_mod" in key for key in keys)
    assert fabric.compile_report.graphs == 2
    counters.clear()
    module, trainer, _ = fitted_alike(Deep, compile={**TRACED, "regional": True}, max_epochs=1, **several)
    report = trainer.compile_report
    assert (report.graphs, report.graph_breaks, report.recompiles) == (2, {}, ())
    assert list(module.state_dict()) == list(Deep().state_dict())


# -- checkpoints, profilers, callbacks


def test_profilers_and_flop_counts_leave_the_graphs_alone(tmp_path: Path) -> None:
    monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
    options = {"profiler": "simple", "default_root_dir": str(tmp_path), "callbacks": [monitor]}
    report = fitted_alike(max_epochs=1, **options)[1].compile_report
    assert (report.graphs, report.left, report.recompiles) == (2, {}, ())


# -- other speed-ups


def texts(samples: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(samples):
        ids = torch.randint(5, 90, (8 + 5 * (index % 8),), generator=generator)
        mask = torch.ones_like(ids)
        ids, mask = (nn.functional.pad(tensor, (0, 48 - len(tensor))) for tensor in (ids, mask))
        made.append({"input_ids": ids, "attention_mask": mask, "labels": ids[0] % 2})
    return made


class Bert(L.LightningModule):
    """A classifier of transformers, with two blocks."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.BertConfig(
            vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            num_labels=2, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.model = transformers.BertForSequenceClassification(config)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fitted_bert(**arguments: Any) -> tuple[Bert, Any]:
    L.seed_everything(1, verbose=False)
    module = Bert()
    trainer = quiet(**{"max_epochs": 1, **arguments})
    trainer.fit(module, DataLoader(texts(38), 4, shuffle=True), DataLoader(texts(10), 4))  # type: ignore[arg-type]
    return module, trainer


@pytest.mark.parametrize(
    "lever", [{"batching": "length"}, {"micro_batch": 2, "precision": "bf16-mixed", "memory": "full"}]
)
def test_a_model_of_transformers_is_one_graph_a_phase(lever: dict[str, Any]) -> None:
    report = fitted_bert(compile=TRACED, **lever)[1].compile_report
    assert (report.graphs, report.graph_breaks, report.recompiles, report.left) == (2, {}, (), {})


@pytest.mark.parametrize(("packed", "graphs_made"), [(False, 2), (True, 6), ("first_token", 6)])
def test_blocks_of_transformers_are_compiled_once_and_never_again(packed: bool | str, graphs_made: int) -> None:
    lever: dict[str, Any] = {"packed": packed} if packed else {}
    plain, _ = fitted_bert(**lever)
    module, trainer = fitted_bert(compile={**TRACED, "regional": not packed}, **lever)
    report = trainer.compile_report
    inside = {"BertSelfOutput", "BertIntermediate", "BertOutput"}
    assert set(report.compiled) == (inside if packed else {"BertLayer"})
    assert (report.graphs, report.graph_breaks, report.recompiles) == (graphs_made, {}, ())
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("error:compile")
def test_blocks_of_which_some_are_frozen_have_a_graph_for_each_kind_without_a_warning() -> None:
    L.seed_everything(1, verbose=False)
    module = Bert()
    module.model.bert.embeddings.requires_grad_(False)
    module.model.bert.encoder.layer[0].requires_grad_(False)
    trainer = quiet(max_epochs=2, compile={**TRACED, "regional": True})
    trainer.fit(module, DataLoader(texts(38), 4, shuffle=True), DataLoader(texts(10), 4))  # type: ignore[arg-type]
    report = trainer.compile_report
    assert report.graphs == 2 + len(report.recompiles)
    assert report.recompiles
    assert {text.partition(": ")[2] for text in report.recompiles} == {FROZEN}


def test_fast_dropout_within_a_graph_draws_the_same_masks() -> None:
    report = fitted_alike(dropout="fast", max_epochs=1)[1].compile_report
    assert (report.graphs, report.graph_breaks, report.left) == (2, {}, {})


# -- machines and arguments that cannot do it


class Untouched(Net):
    def setup(self, stage: str) -> None:
        raise AssertionError("too late")


def test_without_a_cpp_compiler_it_is_refused_before_training() -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with refused(ValueError, "compile"):
            quiet(compile=True).fit(Untouched(), loader())
        with refused(ValueError, "compile"):
            L.Fabric(accelerator="cpu", compile=True).setup(nn.Linear(2, 2))


class Encoder(Net):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("kind", "arguments", "argument"),
    [
        (
            Untouched,
            {"compile": {"mode": "reduce-overhead"}},
            "compile",
        ),
        (Untouched, {"compile": {"mode": "max-autotune"}}, "compile"),
        (
            Untouched,
            {"compile": {"mode": "reduce-overhead"}, "packed": True},
            "compile",
        ),
        (
            Encoder,
            {"compile": TRACED, "packed": True},
            "compile",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_training(
    kind: Any, arguments: dict[str, Any], argument: str
) -> None:
    with refused(ValueError, argument):
        quiet(**arguments).fit(kind(), loader())


@pytest.mark.parametrize(
    ("value", "error", "argument"),
    [
        ("region", ValueError, "compile"),
        ("reduce-overhead", ValueError, "compile"),
        (3, TypeError, "compile"),
        ({"mod": "default"}, ValueError, "compile"),
        ({"mode": "fast"}, ValueError, "compile['mode']"),
        ({"mode": "default", "options": {"max_autotune": True}}, ValueError, "compile"),
        ({"options": {"max_autotone": True}}, ValueError, "compile['options'] option"),
        ({"backend": "inductr"}, ValueError, "compile['backend']"),
        ({"options": {"cpp.threads": "two"}}, TypeError, "compile"),
        ({"dynamic": "maybe"}, TypeError, "compile['dynamic']"),
        ({"fullgraph": True}, ValueError, "compile"),
        ({"regional": "yes"}, TypeError, "compile['regional']"),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(value: Any, error: type[Exception], argument: str) -> None:
    for make in (lambda: quiet(compile=value), lambda: L.Fabric(accelerator="cpu", compile=value)):
        with refused(error, argument):
            make()


# -- the cache

PROGRAM = """
import hasten as L
from tests.models import Classifier, loader, quiet
L.seed_everything(1, verbose=False)
trainer = quiet(compile=True)
(found,) = trainer.validate(Classifier(width=2), loader(10), verbose=False)
report = trainer.compile_report
print("RESULT", report.graphs, report.cache_hit, report.seconds_saved, found["val_loss"])
"""


def run_program(cache: Path) -> tuple[list[str], str]:
    folders = {"HASTEN_CACHE": str(cache), "TORCHINDUCTOR_CACHE_DIR": torch_private.default_compile_cache()}
    # Compiled headers make the compilation of one graph no faster.
    done = fork_python("-c", PROGRAM, **folders, TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS="0")
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return line.split()[1:], done.stdout + done.stderr


def test_a_second_run_of_the_program_reuses_what_the_first_compiled(tmp_path: Path) -> None:
    first, output = run_program(tmp_path)
    assert first[:3] == ["1", "False", "None"]
    assert "Compiled Classifier.validation_step" in output
    second, output = run_program(tmp_path)
    assert second[:2] == ["1", "True"]
    assert float(second[2]) > 0
    assert "From the cache of an earlier run:" in output
    assert second[3] == first[3]
    assert list((tmp_path / "compile" / "torch").rglob("*.so"))


def test_a_folder_of_compiled_code_that_others_can_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache" / "compile" / "torch"
    folder.mkdir(parents=True)
    used = []
    for mode in (0o775, 0o757, 0o700):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        folder.chmod(mode)
        keep_torchs_cache()
        used.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR") == str(folder))
    assert used == [False, False, True]


# -- a second backward


def test_gradients_of_gradients_name_the_argument_to_leave_out() -> None:
    class Penalty(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
            return slope.square().mean()

    with refused(RuntimeError, says="compile="):
        quiet(compile={"backend": "aot_eager"}, max_epochs=1).fit(Penalty(), loader(8))


# -- CUDA graphs


@pytest.mark.gpu
def test_recorded_steps_log_and_train_as_plain_ones_do() -> None:
    options = {"accelerator": "gpu", "devices": 1, "max_epochs": 2}
    _, before, plain_losses = fitted(Deep, **options)
    _, trainer, losses = fitted(Deep, compile={"mode": "reduce-overhead"}, **options)
    report = trainer.compile_report
    assert (report.graphs, report.graph_breaks, report.recompiles) == (2, {}, ())
    assert losses == pytest.approx(plain_losses, rel=1e-3, abs=1e-4)
    expected = {name: value.item() for name, value in before.callback_metrics.items()}
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    assert logged == pytest.approx(expected, rel=1e-3, abs=1e-4)
