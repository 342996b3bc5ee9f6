"""What is saved with a run: its config, and hyper-parameters that make the module again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import hasten as L
from hasten.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback, instantiate_module
from tests.cli import program
from tests.cli.program import QUIET, DeepEncoder, Encoder, Kind, LineData, LineNet, WideLineNet, cli
from tests.models import same_weights
from tests.refusals import refused


class Typed(LineNet):
    """A classifier that is given a dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype_given = dtype


INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
SAVING: dict[str, Any] = {"save_config_callback": SaveConfigCallback, "run": True}


def saving(tmp_path: Path, *words: str, **options: Any) -> LightningCLI:
    """Run a program that saves its config in ``tmp_path``."""
    return cli(words[0], f"--trainer.default_root_dir={tmp_path}", *words[1:], **{**SAVING, **options})


def test_the_config_is_saved_with_the_run_and_repeats_it(tmp_path: Path) -> None:
    made = saving(tmp_path / "a", "fit", "--model.width=6", "--model.encoder=DeepEncoder", "--trainer.logger=true")
    path = Path(made.trainer.log_dir) / "config.yaml"
    assert path == tmp_path / "a" / "lightning_logs" / "version_0" / "config.yaml"
    text = path.read_text()
    assert text.startswith("# hasten==")
    config = yaml.safe_load(text)
    assert (config["seed_everything"], config["trainer"]["max_epochs"]) == (1, 1)
    encoder = {"class_path": "tests.cli.program.DeepEncoder", "init_args": {"depth": 2, "dim": 4}}
    assert config["model"]["encoder"] == encoder
    assert "subcommand" not in config
    again = saving(tmp_path / "b", "fit", f"--config={path}", f"--trainer.default_root_dir={tmp_path / 'b'}")
    assert same_weights(again.model, made.model)


def test_devices_and_dtypes_are_texts_in_the_saved_config(tmp_path: Path) -> None:
    words = [
        "--trainer.callbacks=StochasticWeightAveraging",
        "--trainer.callbacks.swa_lrs=0.1",
        "--model.dtype=float64",
    ]
    made = saving(tmp_path / "a", "fit", *words, model_class=Typed)
    config = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert config["trainer"]["callbacks"][0]["init_args"]["device"] == "cpu"
    assert (config["model"]["dtype"], made.model.dtype_given) == ("torch.float64", torch.float64)
    again = cli("fit", f"--config={tmp_path / 'a' / 'config.yaml'}", model_class=Typed, run=True)
    assert again.model.dtype_given is torch.float64
    with pytest.raises(SystemExit):
        cli("--model.dtype=nonsense", model_class=Typed)


def width_in(path: Path) -> int:
    """Return the width of the model in a saved config."""
    return yaml.safe_load(path.read_text())["model"]["width"]


def test_the_config_of_another_run_is_kept(tmp_path: Path) -> None:
    made = saving(tmp_path, "fit", "--model.width=6")
    made.trainer.test(made.model, made.datamodule)  # One config for several calls.
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]
    message = r"SaveConfigCallback expected .*config.yaml to NOT exist. Aborting .*overwrite"
    with pytest.raises(RuntimeError, match=message):
        saving(tmp_path, "fit", "--model.width=7")
    assert width_in(tmp_path / "config.yaml") == 6
    saving(tmp_path, "fit", "--model.width=8", save_config_kwargs={"overwrite": True})
    assert width_in(tmp_path / "config.yaml") == 8
    saving(tmp_path, "fit", save_config_kwargs={"config_filename": "other.yaml"})
    assert (tmp_path / "other.yaml").exists()
    saving(tmp_path / "none", "fit", save_config_callback=None)
    saving(tmp_path / "none", "fit", "--trainer.fast_dev_run=1")
    assert not (tmp_path / "none" / "config.yaml").exists()


def test_a_resumed_run_saves_its_config_beside_the_first(tmp_path: Path) -> None:
    first = saving(tmp_path, "fit", "--model.width=6")
    first.trainer.save_checkpoint(tmp_path / "x.ckpt")
    for number in (1, 2):
        more = saving(tmp_path, "fit", f"--ckpt_path={tmp_path / 'x.ckpt'}", f"--trainer.max_epochs={number + 1}")
        assert more.trainer.global_step == 2 * (number + 1)
        config = yaml.safe_load((tmp_path / f"config-{number}.yaml").read_text())
        assert (config["model"]["width"], config["trainer"]["max_epochs"]) == (6, number + 1)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["max_epochs"] == 1


def test_parts_of_the_config_stay_files(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("batch_size: 6\n")
    saving(tmp_path / "run", "fit", f"--data={tmp_path / 'small.yaml'}", save_config_kwargs={"multifile": True})
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["data"] == "small.yaml"
    assert yaml.safe_load((tmp_path / "run" / "small.yaml").read_text())["batch_size"] == 6
    saving(tmp_path / "one", "fit", f"--data={tmp_path / 'small.yaml'}")
    assert yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())["data"]["batch_size"] == 6


class Kept(SaveConfigCallback):
    """Keeps the config in a list."""

    kept: list[tuple[str, str]]

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        Kept.kept.append((stage, self.parser.dump(self.config)))


def test_the_config_is_saved_elsewhere(tmp_path: Path) -> None:
    Kept.kept = []
    saving(tmp_path, "fit", save_config_callback=Kept, save_config_kwargs={"save_to_log_dir": False})
    assert [stage for stage, _ in Kept.kept] == ["fit"]
    assert "width: 4" in Kept.kept[0][1]
    assert not (tmp_path / "config.yaml").exists()
    saving(tmp_path, "validate", save_config_callback=Kept)
    assert len(Kept.kept) == 2
    assert (tmp_path / "config.yaml").exists()
    parser = LightningArgumentParser()
    with refused(ValueError, "save_to_log_dir", says=("SaveConfigCallback", "`save_to_log_dir=False`")):
        SaveConfigCallback(parser, parser.parse_args([]), save_to_log_dir=False)


def test_hyper_parameters_are_the_config() -> None:
    made = cli("--model.encoder=DeepEncoder", "--model.encoder.depth=5", "--model.kind=two")
    encoder = {"class_path": "tests.cli.program.DeepEncoder", "init_args": {"depth": 5, "dim": 4}}
    rest = {"width": 4, "mode": "min", "name": None, "lr": 0.1, "_instantiator": INSTANTIATOR}
    assert dict(made.model.hparams) == {"encoder": encoder, "kind": "two", **rest}
    assert dict(made.datamodule.hparams) == {"batch_size": 4, "samples": 16, "_instantiator": INSTANTIATOR}
    chosen = cli("--model=WideLineNet", "--model.extra=2", model_class=None).model.hparams
    wide = {"_class_path": "tests.cli.program.WideLineNet", "extra": 2.0, "width": 4}
    assert wide.items() <= chosen.items()
    plain = cli("--model.kind=two", load_from_checkpoint_support=False).model.hparams
    assert plain["kind"] is Kind.two
    assert "_instantiator" not in plain


def trained(tmp_path: Path, *words: str, **options: Any) -> tuple[LightningCLI, Path]:
    """Return a program after it trained, and its checkpoint."""
    made = cli("fit", *words, run=True, **options)
    made.trainer.save_checkpoint(tmp_path / "x.ckpt")
    return made, tmp_path / "x.ckpt"


def test_a_module_is_made_again_with_its_parts(tmp_path: Path) -> None:
    made, path = trained(tmp_path, "--model.encoder=DeepEncoder", "--model.encoder.depth=5", "--model.kind=two")
    again = LineNet.load_from_checkpoint(path)
    assert isinstance(again.encoder, DeepEncoder)
    assert (again.encoder.depth, again.kind) == (5, Kind.two)
    assert same_weights(again, made.model)
    assert dict(again.hparams) == dict(made.model.hparams)
    other = LineNet.load_from_checkpoint(path, lr=0.5, mode="max")
    assert (other.lr, other.mode, other.encoder.depth) == (0.5, "max", 5)


def test_a_module_is_made_again_of_the_class_it_was(tmp_path: Path) -> None:
    made, path = trained(tmp_path, "--model=WideLineNet", "--model.extra=2.5", "--model.width=6", model_class=None)
    for kind in (L.LightningModule, LineNet, WideLineNet):
        again: Any = kind.load_from_checkpoint(path)
        assert type(again) is WideLineNet
        assert (again.extra, again.width) == (2.5, 6)
        assert same_weights(again, made.model)


class Several(LineNet):
    """A model of kinds."""

    def __init__(self, kinds: list[Kind] | None = None, by_name: dict[str, Kind] | None = None) -> None:
        L.LightningModule.__init__(self)
        self.save_hyperparameters()
        self.encoder, self.head, self.lr = Encoder(), torch.nn.Linear(4, 2), 0.1


def test_enum_members_in_collections_are_named_for_the_command_line(tmp_path: Path) -> None:
    trainer = L.Trainer(**QUIET)
    trainer.fit(Several([Kind.two], {"first": Kind.one}), LineData())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    made = cli("validate", f"--ckpt_path={tmp_path / 'x.ckpt'}", model_class=Several, run=True)
    assert made.model.hparams.kinds == ["two"]
    assert made.model.hparams.by_name == {"first": "one"}


def test_linked_values_are_saved_as_they_were(tmp_path: Path) -> None:
    class Own(LightningCLI):
        def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
            parser.link_arguments("data.batch_size", "model.width")

    made, path = trained(tmp_path, "--data.batch_size=8", kind=Own)
    assert made.model.width == 8
    assert LineNet.load_from_checkpoint(path).width == 8
    assert cli("validate", f"--ckpt_path={path}", "--data.batch_size=8", kind=Own, run=True).model.width == 8


def test_makers_of_optimizers_are_made_again(tmp_path: Path) -> None:
    _, path = trained(tmp_path, "--model.optimizer=SGD", "--model.optimizer.lr=0.5", model_class=program.Injected)
    optimizer = program.Injected.load_from_checkpoint(path).configure_optimizers()["optimizer"]
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["initial_lr"] == 0.5


def test_only_names_are_kept() -> None:
    class Some(LineNet):
        def __init__(self, width: int = 4, encoder: Encoder | None = None, secret: int = 3) -> None:
            L.LightningModule.__init__(self)
            self.save_hyperparameters("encoder", "width")

    hparams = cli("--model.encoder=Encoder", model_class=Some).model.hparams
    assert set(hparams) == {"encoder", "width", "_instantiator"}
    assert hparams["encoder"]["class_path"] == "tests.cli.program.Encoder"


def test_a_part_that_is_a_module_has_hyper_parameters_of_its_own() -> None:
    class Outer(L.LightningModule):
        def __init__(self, part: L.LightningModule, inner_width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.part = part
            self.own = LineNet(width=inner_width)

    made = cli("--model.part=LineNet", "--model.part.width=7", "--model.inner_width=2", model_class=Outer).model
    assert made.part.hparams["width"] == 7
    assert made.own.hparams["width"] == 2
    assert made.hparams["part"]["init_args"]["width"] == 7
    assert "width" not in made.hparams


def test_the_checkpoint_says_the_class_too(tmp_path: Path) -> None:
    _, path = trained(tmp_path, "--model=WideLineNet", "--model.width=6", "--model.extra=2", model_class=None)
    made = cli("validate", f"--ckpt_path={path}", "--model=WideLineNet", model_class=None, run=True)
    assert (type(made.model), made.model.width, made.model.extra) == (WideLineNet, 6, 2.0)
    fixed = cli("validate", f"--ckpt_path={path}", model_class=WideLineNet, run=True)
    assert (fixed.model.width, fixed.model.extra) == (6, 2.0)


def test_the_checkpoint_goes_before_configs_and_after_the_command_line(tmp_path: Path) -> None:
    encoder = ["--model.encoder=DeepEncoder", "--model.encoder.dim=3"]
    _, path = trained(tmp_path, "--model.width=6", "--model.name=saved", "--model.lr=0.25", *encoder)
    (tmp_path / "c.yaml").write_text("model: {width: 9, lr: 0.5}\n")
    config = f"--config={tmp_path / 'c.yaml'}"
    made = cli("fit", config, "--model.name=said", f"--ckpt_path={path}", "--trainer.max_epochs=2", run=True)
    assert (made.model.width, made.model.lr, made.model.name, made.model.encoder.dim) == (6, 0.25, "said", 3)
    assert made.config["fit"]["model"]["width"] == 6
    as_data = cli({"subcommand": "validate", "validate": {"ckpt_path": str(path), "model": {"lr": 0.5}}}, run=True)
    assert (as_data.model.width, as_data.model.lr) == (6, 0.25)


def test_a_checkpoint_without_a_command_line(tmp_path: Path) -> None:
    trainer = L.Trainer(**QUIET)
    trainer.fit(LineNet(width=6, lr=0.5), cli().datamodule)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    made = cli("validate", f"--ckpt_path={tmp_path / 'x.ckpt'}", run=True)
    assert (made.model.width, made.model.lr) == (6, 0.5)


def test_a_checkpoint_of_another_module_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = trained(tmp_path, "--model.width=6", model_class=WideLineNet)
    with pytest.raises(SystemExit) as stopped:
        cli("validate", f"--ckpt_path={path}", run=True)
    assert stopped.value.code == 2
    shown = capsys.readouterr().err
    assert "does not accept option 'model.extra'" in shown
    assert f"Parsing of ckpt_path hyperparameters failed: those in {path} do not fit the model." in shown


def test_a_checkpoint_does_not_choose_what_is_run(tmp_path: Path) -> None:
    made, path = trained(tmp_path, "--model.width=6")
    checkpoint = torch.load(path, weights_only=True)
    harm = tmp_path / "harm"
    evil = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", str(harm)]}}
    for key, value in (("name", evil), ("encoder", evil), ("_class_path", "subprocess.Popen")):
        hparams = {**checkpoint["hyper_parameters"], key: value}
        torch.save({**checkpoint, "hyper_parameters": hparams}, path)
        with refused(ValueError, says=key):
            LineNet.load_from_checkpoint(path)
        if key != "_class_path":
            with pytest.raises(ValueError, match=r"names .* for the argument .*, which may hold"):
                cli("validate", f"--ckpt_path={path}", run=True)
    with refused(ValueError, says="'part'"):
        instantiate_module(
            program.Unannotated, {"part": {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1}}}
        )
    nested = {"class_path": "tests.cli.program.DeepEncoder", "init_args": {"dim": [evil]}}
    with refused(ValueError, says=("'encoder.dim[0]'")):
        instantiate_module(LineNet, {"encoder": nested})
    with refused(ValueError, says="'encoder'"):
        instantiate_module(LineNet, {"encoder": {"class_path": "torch.nn.Linear", "init_args": {}}})
    assert not harm.exists()
    assert made.model.width == 6


def test_hyper_parameters_that_do_not_fit_are_told() -> None:
    with refused(ValueError, says="LineNet"):
        instantiate_module(LineNet, {"nothing": 3})
    with refused(ValueError, says=("width", "int")):
        instantiate_module(LineNet, {"width": "x"})
    config = {"_class_path": "tests.cli.program.WideLineNet", "extra": 3, "width": 5}
    made = instantiate_module(L.LightningModule, config)
    assert (type(made), made.extra, made.width) == (WideLineNet, 3.0, 5)
