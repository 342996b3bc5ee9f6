"""What cannot be ejected is refused, with the line and the reason, and no line is written without a word on it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hasten.commands import main
from hasten_tools.eject import EjectError
from tests.eject.running import check_form, eject
from tests.eject.test_features import STEPS, Case, scheduled

SECOND = """trainer.fit(Net(), loader(26, shuffle=True), loader(10, shuffle=False))
    L.Trainer(accelerator="cpu", {}).fit(Net(), loader(26, shuffle=True), loader(10, shuffle=False))"""
REFUSED = {
    "Net().fast_dev_run": (Case("fast_dev_run=True"), "Trainer(fast_dev_run=True) has no short equivalent"),
    "strategy": (Case('max_epochs=1, strategy="fsdp"'), "Trainer(strategy='fsdp') has no short equivalent"),
    "precision": (Case('max_epochs=1, precision="16-true"'), "precision='16-true' has no short equivalent"),
    "logger": (
        Case(steps=STEPS + "\n    def on_train_end(self):\n        self.logger.save()\n"),
        "line 28: self.logger.save: the ejected CSVLogger has log_dir, log_hyperparams,",
    ),
    "attribute": (
        Case(steps=STEPS + "\n    def on_train_end(self):\n        print(self.trainer.global_stepp)\n"),
        "self.trainer.global_stepp: the ejected Trainer has no global_stepp. Did you mean 'global_step'?",
    ),
    "two Trainers": (Case(fit=SECOND.format("max_epochs=1, gradient_clip_val=1.0")), "gradient_clip_val=1.0: one loop"),
    "one without": (Case(fit=SECOND.format("max_steps=3")), "max_steps=3: one loop serves both"),
    "a fit without validation": (
        Case(fit="trainer.fit(Net(), loader(26, True), loader(10, False))\n    trainer.fit(Net(), loader(26, True))"),
        "one fit has validation data, and another has none. Give it to both",
    ),
    "another name of self": (Case(methods="    def left(this):\n        this.log('a', 1)\n"), "'this'. Call it self"),
    "names": (Case(extra="def batch_size_of(batch):\n    return 1\n\n\n"), "defines batch_size_of, as the ejected"),
    "reduction": (
        Case(steps=STEPS.replace("prog_bar=True", 'reduce_fx="max"')), "self.log(reduce_fx=...): the ejected loop"
    ),
    "other rules for what is not finite": (
        Case('max_epochs=1, callbacks=[EarlyStopping("val_loss", check_finite=False)]'),
        "EarlyStopping(check_finite=...) has no short equivalent",
    ),
    "several loaders": (
        Case(fit="trainer.fit(Net(), loader(8, True), [loader(8, False), loader(8, False)])"),
        "there are several validation loaders",
    ),
    "an export": (
        Case(fit="model = Net()\n    trainer.fit(model, loader(26, True))\n    model.to_torchscript('model.pt')"),
        "to_torchscript is hasten's. Use torch.export or torch.onnx",
    ),
    "nothing to train": (Case(fit="print(trainer)"), "it does not call Trainer.fit"),
    "an epoch cut short": (
        Case(steps=STEPS + "\n    def on_train_batch_start(self, batch, batch_idx):\n        return -1\n"),
        "on_train_batch_start ends epochs by returning -1",
    ),
    "an epoch cut short sometimes": (
        Case(
            steps=STEPS + "\n    def on_train_batch_start(self, batch, batch_idx):\n        return self.left()\n",
            methods="    def left(self):\n        return -1 if self.current_epoch else None\n",
        ),
        "on_train_batch_start ends epochs by returning -1",
    ),
    "batches left out of a closure": (
        Case(
            steps=STEPS.replace("return self.loss(batch)", "return self.loss(batch) if batch_idx else None", 1),
            optimizer="torch.optim.LBFGS(self.parameters())",
        ),
        "leaves batches out by returning None, with a step that takes a closure. Return 0 * loss instead",
    ),
    "arguments without a name": (
        Case(imports="LearningRateMonitor", arguments='max_epochs=1, callbacks=[LearningRateMonitor("step")]'),
        "LearningRateMonitor: name its arguments",
    ),
    "a schedule of groups": (
        Case(
            "max_epochs=1, callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1)]",
            imports="BackboneFinetuning",
            configure=scheduled("CosineAnnealingLR(optimizer, 3)"),
        ),
        "BackboneFinetuning with CosineAnnealingLR: this scheduler does not know the group that is added",
    ),
    "no batches": (Case("max_epochs=1, limit_train_batches=0"), "limit_train_batches=0 trains on no batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    case, why = REFUSED[name]
    with pytest.raises(EjectError, match=re.escape(why)):
        eject(case.text(), tmp_path / "program.py")


def test_what_is_left_out_is_named_with_its_cost(tmp_path: Path) -> None:
    case = Case('max_epochs=1, packed=False, resident=True, num_workers=0, matmul_precision="high"')
    plain = eject(case.text(), tmp_path / "program.py")
    check_form(plain)
    assert "# resident left out: samples are read and collated one by one in each epoch." in plain
    assert "# matmul_precision left out: call torch.set_float32_matmul_precision instead." in plain
    assert "packed" not in plain


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(Case(extra='print("26 samples")\n\n').text())
    assert main(["eject", "train.py", "-o", "plain.py"]) == 0
    assert re.search(r"^plain.py: \d+ lines. Run it with: python plain.py$", capsys.readouterr().out, re.MULTILINE)
    assert main(["eject", "train.py"]) == 0
    printed = capsys.readouterr()
    assert printed.out == Path("plain.py").read_text()
    assert printed.err.startswith("26 samples\n")
    Path("other.py").write_text("print('nothing')\n")
    assert main(["eject", "other.py"]) == 1
    assert (
        capsys.readouterr().err == "hasten eject: other.py: it does not call Trainer.fit: there is no loop to write.\n"
    )
    for words, part in (
        (["-o", "train.py", "train.py"], "is the program itself"),
        (["-o", "no/plain.py", "train.py"], "the folder no does not exist"),
        (["trai.py"], "Did you mean"),
        ([], "name"),
    ):
        with pytest.raises(SystemExit):
            main(["eject", *words])
        assert part in capsys.readouterr().err
