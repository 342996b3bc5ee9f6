"""Programs for the Trainer of Hugging Face train with ``TransformersTrainer``, and no argument is ignored.

``docs/start/transformers.md``, whose programs are run, compares the weights with those of ``transformers.Trainer``.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import itertools
import os
import pkgutil
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten.callbacks import EarlyStopping, ModelCheckpoint
from hasten.transformers import TransformersTrainer
from tests.docs.blocks import ROOT
from tests.refusals import refused, warned

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="TrainingArguments need it")

OLD = not hasattr(transformers.TrainingArguments, "train_sampling_strategy")
BY_LENGTH = {"group_by_length": True} if OLD else {"train_sampling_strategy": "group_by_length"}
SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def language_model() -> nn.Module:
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=20, **SIZES))


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 20, (22, 8), generator=generator)
    labels = rows.clone()
    if OLD:
        # It counts the first label of a text, which nothing predicts.
        labels[:, 0] = -100
    for row, length in enumerate(torch.randint(2, 8, (22,), generator=generator)):
        labels[row, length:] = -100
    return [{"input_ids": ids, "labels": targets} for ids, targets in zip(rows, labels, strict=True)]


def arguments(folder: Path, **given: Any) -> Any:
    plain = {"use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "report_to": "none"}
    return transformers.TrainingArguments(str(folder), **{**plain, **given})


def results(values: dict[str, Any]) -> dict[str, float]:
    """Return the values without times."""
    return {name: values[name] for name in values if not name.endswith(("_runtime", "_per_second", "_time"))}


def accuracy(prediction: Any) -> dict[str, float]:
    guessed, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"accuracy": float((guessed == labels)[labels != -100].mean())}


@pytest.mark.skipif(OLD, reason="an older transformers always shuffles")
def test_accumulated_batches_count_by_their_targets_as_one_large_batch_does(tmp_path: Path) -> None:
    data, model = texts(), language_model()
    args = arguments(
        tmp_path, num_train_epochs=1, gradient_accumulation_steps=2, train_sampling_strategy="sequential",
        weight_decay=0.1, warmup_steps=1, learning_rate=1e-2, max_grad_norm=0.5, save_strategy="no",
        logging_strategy="epoch",
    )  # fmt: skip
    trainer = TransformersTrainer(model, args, train_dataset=data, enable_model_summary=False)
    assert trainer.train().global_step == 3
    assert len(trainer.trainer.history["loss"]) == 1
    assert "learning_rate" in next(tmp_path.rglob("metrics.csv")).read_text(encoding="utf-8")

    plain = language_model()
    decayed = [each for name, each in plain.named_parameters() if "norm" not in name]
    others = [each for name, each in plain.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    schedule = transformers.get_linear_schedule_with_warmup(adamw, 1, 3)
    for rows in (data[:8], data[8:16], data[16:]):
        plain(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        adamw.step()
        schedule.step()
        adamw.zero_grad()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6), name


def test_evaluations_checkpoints_and_a_resumed_run(tmp_path: Path) -> None:
    data = texts()
    options: dict[str, Any] = {
        "eval_strategy": "steps", "eval_steps": 4, "save_steps": 4, "save_total_limit": 1, "logging_steps": 2,
        "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "learning_rate": 1e-2,
    }  # fmt: skip
    given: dict[str, Any] = {"train_dataset": data, "eval_dataset": data[:9], "compute_metrics": accuracy}
    model = language_model()
    ranked = ModelCheckpoint(tmp_path / "ranked", "{step}", monitor="eval_loss", save_top_k=-1)
    trainer = TransformersTrainer(
        model, arguments(tmp_path, num_train_epochs=2, **options), **given,
        callbacks=[EarlyStopping("eval_loss", patience=9), ranked], enable_model_summary=False,
    )  # fmt: skip
    done = trainer.train()
    assert done.global_step == 12
    assert trainer.trainer.history["eval_accuracy"].steps == [3, 7, 11]
    assert len(trainer.trainer.history["loss"]) == 6
    assert [Path(path).stem for path in ranked.best_k_models] == ["step=4", "step=8", "step=12"]
    best_step = trainer.state.best_global_step
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{best_step}"}
    loaded = transformers.LlamaForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    best = max(trainer.trainer.history["eval_accuracy"])
    values = trainer.evaluate()
    assert values["eval_accuracy"] == pytest.approx(best)

    theirs = transformers.Trainer(
        model, arguments(tmp_path / "theirs"), eval_dataset=data[:9], compute_metrics=accuracy
    )
    expected = theirs.evaluate()
    assert values.keys() == expected.keys() - {"eval_model_preparation_time"} | {"epoch"}
    assert results(values) == pytest.approx(results(expected) | {"epoch": 2.0})
    for rows in (data[:9], [{"input_ids": row["input_ids"]} for row in data[:9]]):
        mine, other = trainer.predict(rows), theirs.predict(rows)
        assert mine.predictions == pytest.approx(other.predictions, abs=1e-6)
        assert (mine.label_ids is None) is (other.label_ids is None) is ("labels" not in rows[0])
        assert results(mine.metrics) == pytest.approx(results(other.metrics))
    assert not results(mine.metrics)

    trainer.save_model(str(tmp_path / "saved"))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))

    longer = TransformersTrainer(
        language_model(), arguments(tmp_path, num_train_epochs=3, **options), **given, enable_model_summary=False
    )
    assert longer.train(resume_from_checkpoint=True).global_step == 18
    evaluated = [row["step"] for row in longer.state.log_history if "eval_accuracy" in row]
    assert evaluated == [4, 8, 12, 16, 18][: 4 if OLD else 5]


class Interrupts(transformers.TrainerCallback):  # type: ignore[misc]
    """Presses Ctrl-C in the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_is_stopped_says_how_to_continue_and_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, Any] = {"train_dataset": texts(), "enable_model_summary": False}
    args = arguments(tmp_path, num_train_epochs=1, logging_steps=2)
    trainer = TransformersTrainer(language_model(), args, callbacks=[Interrupts()], **given)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.train()
    assert "To resume it, call train(resume_from_checkpoint=True)." in caplog.text
    again = TransformersTrainer(language_model(), args, **given)
    assert again.train(resume_from_checkpoint=True).global_step == 6
    assert [row["step"] for row in again.state.log_history if "loss" in row] == [2, 4, 6]


def test_each_field_is_read_and_on_the_page_or_refused_by_its_name(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "start" / "transformers.md").read_text(encoding="utf-8")
    read = re.search(r"Read:\n\n((?:    .*\n|\n)+)", text)
    assert read is not None
    listed = set(re.findall(r"`(\w+)`", read[1]))
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    of_four = set(re.findall(r"`(\w+)`", text.partition("Only older versions have")[2].partition(", too")[0]))
    assert len(of_four) == 7
    assert listed - of_four - {"tokenizer"} <= fields or OLD
    for name in sorted(fields - listed):
        args = arguments(tmp_path)
        setattr(args, name, "another")
        with refused(ValueError, name, fix="Leave it out"):
            TransformersTrainer(nn.Linear(1, 1), args)


@pytest.mark.parametrize(
    ("given", "argument", "fix"),
    [
        ({"full_determinism": True}, "full_determinism", "deterministic=True"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size", "TransformersTrainer(..., batch_size='auto')"),
        pytest.param(
            {"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy", "another",
            marks=pytest.mark.skipif(OLD, reason="an older transformers has no such field"),
        ),
    ],
)  # fmt: skip
def test_what_is_refused_says_what_to_write(given: dict[str, Any], argument: str, fix: str, tmp_path: Path) -> None:
    with refused(ValueError, argument, fix=fix):
        TransformersTrainer(nn.Linear(1, 1), arguments(tmp_path, **given))


@dataclasses.dataclass(kw_only=True)
class ArgumentsOfProgram(transformers.TrainingArguments):  # type: ignore[misc]
    """Fields that a program adds, as LLaVA does."""

    data_path: str
    model_max_length: int = 512
    class_weights: torch.Tensor | None = None


def test_fields_that_a_program_has_added_to_the_arguments_are_its_own_business(tmp_path: Path) -> None:
    given: dict[str, Any] = {"use_cpu": True, "report_to": "none", "data_path": "data", "max_steps": 1}
    weights = torch.ones(2)
    args = ArgumentsOfProgram(output_dir=str(tmp_path), model_max_length=64, class_weights=weights, **given)
    trainer = TransformersTrainer(language_model(), args, train_dataset=DATA, enable_model_summary=False)
    args.class_weights = torch.zeros(2)
    assert trainer.train().global_step == 1
    args.full_determinism = True
    with refused(ValueError, "full_determinism", fix="deterministic=True"):
        TransformersTrainer(language_model(), args, train_dataset=DATA)


def test_labels_of_which_a_text_has_several_are_not_smoothed(tmp_path: Path) -> None:
    model = language_model()
    model.config.problem_type = "multi_label_classification"
    with refused(ValueError, "label_smoothing_factor", fix="several labels"):
        TransformersTrainer(model, arguments(tmp_path, label_smoothing_factor=0.1))


def test_what_only_the_trainer_of_transformers_has_is_refused_with_the_line_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stepping(TransformersTrainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            raise AssertionError

    class Looping(TransformersTrainer):
        def _inner_training_loop(self) -> Any:
            raise AssertionError

    def make(kind: type[TransformersTrainer] = TransformersTrainer, model: Any = None, **given: Any) -> Any:
        return kind(language_model() if model is None else model, arguments(tmp_path), **given)

    class Logging(TransformersTrainer):
        def _maybe_log_save_evaluate(self, *_: Any, **__: Any) -> None:
            raise AssertionError

    class Preparing(TransformersTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            raise AssertionError

    refusals: list[tuple[dict[str, Any], str, str]] = [
        ({"kind": Looping}, "", "a step of your own"),
        ({"kind": Preparing}, "", "strategy="),
        ({"kind": Logging}, "", "Override log()"),
        ({"model_init": language_model}, "model", "model_init="),
        ({"model": "bert-base-uncased"}, "model", "from_pretrained('bert-base-uncased')"),
        ({"tokenizer": object(), "processing_class": object()}, "tokenizer", "processing_class"),
        ({"train_data": []}, "train_data", "'train_dataset'"),
        ({"learning_rate": 1.0}, "learning_rate", "TrainingArguments(learning_rate=...)"),
        ({"callbacks": [EarlyStopping]}, "callbacks", "[EarlyStopping(...)]"),
        ({"callbacks": EarlyStopping("eval_loss")}, "callbacks", "a list of callbacks"),
    ]
    for given, argument, fix in refusals:
        with refused(TypeError, argument, fix=fix):
            make(**given)
    trainer = make(enable_model_summary=False, train_dataset=[{"input_ids": torch.ones(4, dtype=torch.int64)}])
    with refused(TypeError, fix="predict_with_generate=True"):
        trainer.evaluate([], max_length=3)
    with refused(ValueError, "gradient_accumulation_steps", fix="override compute_loss"):
        Stepping(language_model(), arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=DATA).train()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with refused(ValueError, says="FSDP", fix="strategy='fsdp'"):
        make()
    monkeypatch.undo()
    with refused(TypeError, "callbacks", fix="callbacks=[EarlyStopping(...)]"):
        trainer.add_callback(EarlyStopping("eval_loss"))
    with refused(TypeError, "args", fix="TrainingArguments(...)"):
        TransformersTrainer(language_model(), {"output_dir": tmp_path})
    with refused(ValueError, "eval_dataset", fix="eval_dataset="):
        trainer.evaluate()
    with refused(ValueError, "train_dataset", fix="Samples need labels"):
        trainer.train()
    (tmp_path / "checkpoint-3").mkdir(parents=True)
    for place, says in ((True, "no checkpoint of hasten"), (tmp_path / "checkpoint-33", "'checkpoint-3'")):
        with refused(ValueError, "resume_from_checkpoint", says=says, fix="Leave it out"):
            trainer.train(resume_from_checkpoint=place)
    trainer.trainer.save_checkpoint(tmp_path / "checkpoint-3" / "hasten.ckpt", weights_only=True)
    with refused(ValueError, "resume_from_checkpoint", says="weights alone", fix="save_only_model=False"):
        trainer.train(resume_from_checkpoint=True)
    with refused(ValueError, "train_dataset", fix="train_dataset="):
        make().train()
    with refused(ValueError, "eval_dataset", fix="eval_dataset="):
        TransformersTrainer(language_model(), arguments(tmp_path, eval_strategy="epoch"))


@dataclasses.dataclass
class ArgumentsOfFour(transformers.TrainingArguments):  # type: ignore[misc]
    """The fields, and defaults, that only transformers 4 has."""

    logging_dir: str | None = None
    no_cuda: bool = False
    group_by_length: bool = False

    def __post_init__(self) -> None:
        self.logging_dir = self.logging_dir or f"{self.output_dir}/runs/{time.time_ns()}"
        self.report_to = ["tensorboard"]  # All that is installed.
        super().__post_init__()


def test_arguments_of_transformers_4_work_and_none_of_its_defaults_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, tokenizer = ArgumentsOfFour(str(tmp_path), use_cpu=True, no_cuda=True), object()
    trainer = TransformersTrainer(nn.Linear(1, 1), args, tokenizer=tokenizer)
    assert trainer.processing_class is tokenizer
    assert [str(logger.save_dir) for logger in trainer.trainer.loggers] == [str(tmp_path), args.logging_dir]
    monkeypatch.delattr(transformers.TrainerState, "best_global_step")
    with refused(ImportError, fix="pip install 'transformers>=4.50'"):
        TransformersTrainer(nn.Linear(1, 1), args)


def test_arguments_of_the_trainer_come_before_those_of_transformers(tmp_path: Path) -> None:
    given: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, "enable_model_summary": False}
    trainer = TransformersTrainer(
        language_model(), arguments(tmp_path, num_train_epochs=2, logging_steps=2), train_dataset=texts(), **given
    )
    trainer.train()
    assert (trainer.state.global_step, trainer.state.max_steps) == (6, 6)
    # The schedule ends with the run.
    assert set(trainer.lr_scheduler.get_last_lr()) == {0.0}
    assert len(trainer.trainer.history["loss"]) == 6


def test_processes_have_to_be_there_before_the_arguments(tmp_path: Path) -> None:
    with refused(ValueError, "devices", fix="hasten launch --procs 2"):
        TransformersTrainer(nn.Linear(1, 1), arguments(tmp_path), devices=2)


class Recorder(transformers.TrainerCallback):
    """Note all events of a run, and what a callback sees in them; ask for what is not due."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def note(self, event: str, args: Any, state: Any, control: Any, **given: Any) -> None:
        if event == "on_step_end":
            step = state.global_step
            control.should_log |= step == 1
            control.should_evaluate |= step == 2 and args.eval_strategy != "no"
            control.should_save |= step == 2
            control.should_epoch_stop |= step == 4
            control.should_training_stop |= step == 9
        found = sorted(each for each in given if given[each] is not None)
        wanted = {each for each, value in vars(control).items() if value}
        rows = len(state.log_history)
        self.seen.append((event, state.global_step, state.max_steps, round(state.epoch or 0, 4), found, wanted, rows))


for _event in dir(transformers.TrainerCallback):
    if _event.startswith("on_"):
        setattr(Recorder, _event, functools.partialmethod(Recorder.note, _event))


def both(folder: Path, given: dict[str, Any], **options: Any) -> list[Any]:
    """Return a trained Trainer of transformers, and one of hasten."""
    trainers = []
    for kind, more in ((transformers.Trainer, {}), (TransformersTrainer, {"enable_model_summary": False})):
        args = arguments(folder / kind.__name__, **{"learning_rate": 1e-2, **options})
        made = {name: value() if isinstance(value, type) else value for name, value in given.items()}
        made = {"train_dataset": texts(), "model": language_model(), **made, **more}
        trainers.append(kind(args=args, **{name: value for name, value in made.items() if value is not None}))
        trainers[-1].result = trainers[-1].train()
    return trainers


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


class Callbacks(list[Any]):
    def __init__(self) -> None:
        super().__init__([Recorder(), transformers.EarlyStoppingCallback(3)])


DATA = texts()


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {"num_train_epochs": 2, "logging_steps": 2, **BY_LENGTH}),
        (
            {"eval_dataset": DATA[:9]},
            {
                "num_train_epochs": 1.5, "logging_steps": 0.3, "eval_strategy": "steps", "eval_steps": 0.4,
                "save_steps": 0.5, "neftune_noise_alpha": 5.0, "data_seed": 3, "max_grad_norm": 0.0,
                "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0},
            },
        ),
        ({}, {"num_train_epochs": 1, "gradient_accumulation_steps": 4, "label_smoothing_factor": 0.1}),
        ({"compute_loss_func": summed}, {"max_steps": 5, "logging_steps": 1, "gradient_accumulation_steps": 2}),
        ({"model": None, "model_init": lambda: language_model()}, {"num_train_epochs": 1, "logging_steps": 4}),
        (
            {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1.0}), "eval_dataset": {"a": DATA[:9], "b": DATA}},
            {
                "num_train_epochs": 3, "logging_strategy": "epoch", "eval_strategy": "epoch", "eval_delay": 2,
                "logging_first_step": True,
            },
        ),
        (
            {"callbacks": Callbacks, "eval_dataset": DATA[:9], "compute_metrics": accuracy},
            {
                "num_train_epochs": 4, "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "save_steps": 3,
                "gradient_accumulation_steps": 2, "load_best_model_at_end": True, "eval_accumulation_steps": 2,
                "metric_for_best_model": "accuracy", "save_total_limit": 2,
            },
        ),
    ],
)  # fmt: skip
def test_weights_state_and_events_are_those_of_transformers(
    given: dict[str, Any], options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, mine = both(tmp_path, given, **options)
    printed = [sorted(ast.literal_eval(line)) for line in capsys.readouterr().out.splitlines() if line[:2] == "{'"]
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :] or (OLD and options.get("max_grad_norm") == 0)
    assert len(printed) == 2 * len(mine.state.log_history)
    if OLD and "label_smoothing_factor" in options:
        return  # It adds the smoothed losses of accumulated batches up, and 4.50 skips the last ones.
    folders = [sorted(each.name for each in Path(one.args.output_dir).glob("check*")) for one in (theirs, mine)]
    assert folders[0] == folders[1]
    for old, new in zip(theirs.model.parameters(), mine.model.parameters(), strict=True):
        assert torch.allclose(old, new, atol=1e-6)
    assert results(mine.result.metrics) == pytest.approx(results(theirs.result.metrics), rel=1e-4)
    for row, other in zip(mine.state.log_history, theirs.state.log_history, strict=True):
        # Older versions round the losses and log no norm where nothing is clipped. 4.50 logs the rate of the next step.
        varied = {"grad_norm", "learning_rate"} if OLD else set()
        expected = {name: value for name, value in results(other).items() if name not in varied}
        found = {name: value for name, value in results(row).items() if name not in varied}
        assert found == pytest.approx(expected, rel=1e-4 if OLD else 1e-6)
    for name in (
        "epoch",
        "total_flos",
        "logging_steps",
        "eval_steps",
        "save_steps",
        "global_step",
        "max_steps",
        "num_train_epochs",
        "best_metric",
        "best_global_step",
    ):
        assert getattr(mine.state, name) == pytest.approx(getattr(theirs.state, name)), name
    old, new = (each.pop_callback(Recorder) for each in (theirs, mine))
    assert (new is None and "callbacks" not in given) or new.seen == old.seen


def test_a_subclass_that_computes_its_loss_and_makes_its_optimizer_and_what_follows_a_run(tmp_path: Path) -> None:
    class Own:
        def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = summed(outputs, labels, num_items_in_batch=labels.numel())
            return (loss, outputs) if return_outputs else loss

        def create_optimizer(self: Any, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return super().create_optimizer()  # type: ignore[misc]

        def get_train_dataloader(self: Any) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=6, collate_fn=self.data_collator)

    found = []
    for kind in (transformers.Trainer, TransformersTrainer):
        more = {} if kind is transformers.Trainer else {"enable_model_summary": False}
        args = arguments(tmp_path / kind.__name__, num_train_epochs=1, save_strategy="no")
        trainer = type("Mine", (Own, kind), {})(
            language_model(), args, train_dataset=texts(), eval_dataset=DATA, compute_metrics=accuracy,
            preprocess_logits_for_metrics=lambda logits, labels: logits * 2, **more,
        )  # fmt: skip
        metrics = trainer.train().metrics
        metrics["train_samples"] = 22
        trainer.save_metrics("train", metrics)
        trainer.save_state()
        trainer.save_model()
        evaluated = trainer.evaluate(DATA[:5], metric_key_prefix="other")
        again = trainer.train()
        kept = [path.name for path in (tmp_path / kind.__name__).iterdir() if path.is_file()]
        found.append((results(evaluated), again.global_step, again.training_loss, sorted(kept)))
        assert trainer.is_world_process_zero()
    assert found[1][0] == pytest.approx(found[0][0])
    assert found[1][1:3] == pytest.approx(found[0][1:3])
    assert found[1][3] == found[0][3]


def test_the_best_checkpoint_is_known_before_its_folder_is_there(tmp_path: Path) -> None:
    class Later(TransformersTrainer):
        """Makes no folder, as all processes but the first."""

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            folders.append(output_dir)

    folders: list[str | None] = []
    args = arguments(tmp_path, num_train_epochs=1, eval_strategy="epoch", save_strategy="epoch")
    args.metric_for_best_model = "loss"
    trainer = Later(language_model(), args, train_dataset=texts(), eval_dataset=DATA[:5], enable_model_summary=False)
    trainer.train()
    assert [trainer.state.best_model_checkpoint] == folders == [str(tmp_path / "checkpoint-6")]


def test_a_subclass_that_computes_its_gradients_and_predictions_has_the_results_of_transformers(tmp_path: Path) -> None:
    class Adversarial:
        """FGM: the gradients of a second batch, with changed embeddings, are added."""

        def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            table = model.get_input_embeddings().weight
            before = table.data.clone()
            table.data.add_(table.grad / table.grad.norm())
            self.accelerator.backward(self.compute_loss(model, self._prepare_inputs(inputs)))
            table.data.copy_(before)
            return loss

        def prediction_step(self: Any, model: Any, inputs: Any, prediction_loss_only: bool, **more: Any) -> Any:
            loss, logits, labels = super().prediction_step(model, inputs, False, **more)  # type: ignore[misc]
            return loss * 2, logits, labels

        def evaluate(
            self: Any, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
        ) -> Any:
            # As QuestionAnsweringTrainer of the examples of transformers.
            compute_metrics, self.compute_metrics = self.compute_metrics, None
            loader = self.get_eval_dataloader(eval_dataset)
            output = self.evaluation_loop(loader, "Evaluation", None, ignore_keys, metric_key_prefix)
            self.compute_metrics = compute_metrics
            found = {**output.metrics, "eval_accuracy": accuracy(output)["accuracy"], "eval_n": output.num_samples}
            self.log(found)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            return found

    found: list[Any] = []
    kinds: list[Any] = [transformers.Trainer, TransformersTrainer]
    for kind in kinds:
        more = {} if kind is transformers.Trainer else {"enable_model_summary": False}
        options: dict[str, Any] = {"eval_strategy": "epoch", "save_steps": 3, "max_grad_norm": 0.5, "logging_steps": 1}
        args = arguments(tmp_path / kind.__name__, num_train_epochs=2, learning_rate=1e-2, **options)
        given = {"train_dataset": DATA, "eval_dataset": DATA[:9], "compute_metrics": accuracy, **more}
        trainer = type("Mine", (Adversarial, kind), {})(language_model(), args, **given)
        trainer.train()
        # The last that happened was an evaluation.
        assert not trainer.model.training
        rows = [results(row) for row in trainer.state.log_history]
        found.append((rows, trainer.model, trainer.predict(DATA[:5]).metrics["test_loss"], trainer.model.training))
    names = {"eval_model_preparation_time", "learning_rate"} | ({"loss"} if OLD else set())
    for old, new in zip(found[0][0], found[1][0], strict=True):
        expected = {name: value for name, value in old.items() if name not in names}
        assert {name: value for name, value in new.items() if name not in names} == pytest.approx(expected, rel=1e-4)
    for one, other in zip(found[0][1].parameters(), found[1][1].parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert found[1][2:] == pytest.approx(found[0][2:])
    again = type(trainer)(language_model(), args, **given)
    again.train(resume_from_checkpoint=str(tmp_path / "TransformersTrainer" / "checkpoint-9"))
    for one, other in zip(found[1][1].parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_mistakes_are_named_where_they_are(tmp_path: Path) -> None:
    def returning(value: Any) -> type[TransformersTrainer]:
        class Mine(TransformersTrainer):
            def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
                return value(model(**inputs))

        return Mine

    def make(kind: type[TransformersTrainer] = TransformersTrainer, **given: Any) -> TransformersTrainer:
        options = {"model": None if "model_init" in given else language_model(), "train_dataset": DATA, **given}
        return kind(args=arguments(tmp_path, max_steps=1), enable_model_summary=False, **options)

    returned: list[tuple[Any, type[Exception], str, str]] = [
        (lambda outputs: None, TypeError, "returned None", "Return the loss"),
        (lambda outputs: (outputs.loss, outputs), TypeError, "returned a tuple", "if return_outputs is True"),
        (lambda outputs: float(outputs.loss), TypeError, "returned a float", "Return the loss"),
        (lambda outputs: outputs.logits.mean(dim=(1, 2)), ValueError, "shape (4,)", "loss.mean()"),
    ]
    for value, error, says, fix in returned:
        with refused(error, says=("Mine.compute_loss()", says), fix=fix):
            make(returning(value)).train()
    alone = make(returning(lambda outputs: outputs.loss), compute_metrics=accuracy)
    with pytest.raises(TypeError) as caught:
        alone.evaluate(DATA[:4])
    assert "Mine.compute_loss()" in "".join(caught.value.__notes__)
    with refused(TypeError, "compute_metrics", says="0.5", fix="{'accuracy': accuracy}"):
        make(compute_metrics=lambda prediction: 0.5).evaluate(DATA[:4])

    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    loader: Any = torch.utils.data.DataLoader(DATA, batch_size=4)  # type: ignore[arg-type]
    wrong: list[tuple[dict[str, Any], type[Exception], str, str]] = [
        ({"optimizers": sgd}, TypeError, "", "(optimizer, None)"),
        (
            {"optimizers": (sgd, None), "model_init": language_model},
            ValueError,
            "optimizers",
            "optimizer_cls_and_kwargs",
        ),
        (
            {"optimizers": (sgd, None), "optimizer_cls_and_kwargs": (torch.optim.SGD, {})},
            ValueError,
            "optimizers",
            "one",
        ),
        ({"train_dataset": {"train": DATA, "test": DATA}}, TypeError, "train_dataset", "train_dataset=data[...]"),
        ({"train_dataset": loader}, TypeError, "train_dataset", "train_dataset=loader.dataset"),
        ({"train_dataset": []}, ValueError, "train_dataset", "filters"),
        ({"model": nn.Linear}, TypeError, "model", "Linear(config)"),
        (
            {"data_collator": transformers.DataCollatorWithPadding},
            TypeError,
            "data_collator",
            "DataCollatorWithPadding(tokenizer)",
        ),
        ({"data_collator": lambda samples: samples}, TypeError, "data_collator", "{'input_ids': ..., "),
    ]
    for given, error, argument, fix in wrong:
        with refused(error, argument, fix=fix):
            make(**given).train()
    with refused(ValueError, "eval_dataset", says="a dict of a", fix="one of its names"):
        make(eval_dataset={"a": DATA}).evaluate("b")
    with refused(ValueError, "remove_unused_columns", fix="Rename them (input_ids, "):
        make(train_dataset=[{"text": 1}, {"text": 2}]).train()
    rows = [{"input_ids": [3] * (number + 1), "labels": [3] * (number + 1)} for number in range(4)]
    with pytest.raises(ValueError) as ragged:
        make(train_dataset=rows).train()
    assert "processing_class=tokenizer" in "".join(ragged.value.__notes__)
    with pytest.raises(TypeError) as pairs:
        make(train_dataset=[(torch.ones(2), 1)] * 4).train()
    assert "Samples must be dicts" in "".join(pairs.value.__notes__)
    with refused(TypeError, "resume_from_checkpoint", fix="a folder"):
        make().train(language_model())
    with refused(AttributeError, fix="trainer.train()"):
        make().fit()
    none = make()
    none.args.max_steps, none.args.num_train_epochs = -1, 0
    assert (none.train().global_step, none.trainer.global_step) == (0, 0)


def test_a_loss_without_labels_is_evaluated_where_label_names_is_empty(tmp_path: Path) -> None:
    class Pairwise(TransformersTrainer):
        """A reward model, as in the examples of TRL."""

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            better, worse = (model(input_ids=inputs[name]).logits.mean(dim=(1, 2)) for name in ("better", "worse"))
            loss = -nn.functional.logsigmoid(better - worse).mean()
            return (loss, {"better": better, "worse": worse}) if return_outputs else loss

    rows = [{"better": row["input_ids"], "worse": row["input_ids"].flip(0)} for row in DATA[:5]]

    def collate(rows: list[Any]) -> dict[str, Any]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]} | {"return_loss": True}

    args = arguments(tmp_path, label_names=[], remove_unused_columns=False)
    trainer = Pairwise(language_model(), args, data_collator=collate)
    prediction = trainer.predict(rows)  # type: ignore[arg-type]
    assert [len(part) for part in prediction.predictions] == [5, 5]
    assert prediction.metrics["test_loss"] > 0


def test_a_collator_may_make_tuples(tmp_path: Path) -> None:
    class Pairs:
        """The batches of a loss for unlearning."""

        def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            ids, labels = inputs
            outputs = model(input_ids=ids, labels=labels)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

        def prediction_step(self: Any, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            with torch.no_grad():
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            return loss, outputs.logits, inputs[1]

    def pair(rows: list[Any]) -> tuple[torch.Tensor, ...]:
        return torch.stack([row["input_ids"] for row in rows]), torch.stack([row["labels"] for row in rows])

    found = []
    for kind in (transformers.Trainer, TransformersTrainer):
        more = {} if kind is transformers.Trainer else {"enable_model_summary": False}
        args = arguments(tmp_path / kind.__name__, num_train_epochs=1, eval_strategy="epoch", logging_steps=2)
        given: dict[str, Any] = {"train_dataset": DATA, "eval_dataset": DATA[:9], "data_collator": pair, **more}
        trainer = type("Mine", (Pairs, kind), {})(language_model(), args, compute_metrics=accuracy, **given)
        trainer.train()
        rows = [results(row) for row in trainer.state.log_history]
        found.append([{name: row[name] for name in row if name not in {"learning_rate", "loss"}} for row in rows])
    for old, new in zip(*found, strict=True):
        assert new == pytest.approx(old, rel=1e-4)


class CopiedFromTransformers:
    """What programs copy from ``transformers.Trainer``, as LLaVA does, and change a little."""

    def get_train_dataloader(self: Any) -> Any:
        collate = self._get_collator_with_removed_columns(self.data_collator, description="training")
        options = {"batch_size": self._train_batch_size, "sampler": self._get_train_sampler(self.train_dataset)}
        return self.accelerator.prepare(
            torch.utils.data.DataLoader(self.train_dataset, collate_fn=collate, **options)  # type: ignore[arg-type]
        )

    def _get_train_sampler(self: Any, train_dataset: Any) -> Any:
        return torch.utils.data.RandomSampler(train_dataset)

    def _get_eval_sampler(self: Any, eval_dataset: Any) -> Any:
        return range(len(eval_dataset))[::-1]

    def create_optimizer(self: Any) -> Any:
        if self.optimizer is None and not (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            kind, options = TransformersTrainer.get_optimizer_cls_and_kwargs(self.args)
            self.optimizer = kind(self.model.parameters(), **options)
        return self.optimizer

    def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = summed(outputs, labels, num_items_in_batch=labels.numel())
        return (loss, outputs) if return_outputs else loss

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        # The labels are still there.
        return (loss + super().training_step(model, inputs, num_items_in_batch)) / 2  # type: ignore[misc]


@pytest.mark.skipif(OLD, reason="an older transformers gives _get_train_sampler no data")
def test_a_subclass_finds_the_methods_that_programs_copy_from_transformers(tmp_path: Path) -> None:
    found: list[Any] = []
    rows = [{**row, "text": "not read"} for row in DATA]
    for kind in (transformers.Trainer, TransformersTrainer):
        more = {} if kind is transformers.Trainer else {"enable_model_summary": False}
        folder = tmp_path / kind.__name__
        args = arguments(folder, num_train_epochs=2, logging_steps=1, save_strategy="no")
        trainer = type("Mine", (CopiedFromTransformers, kind), {})(language_model(), args, train_dataset=rows, **more)
        (folder / "notes.txt").write_text("The folder is there before the run.")
        teacher = language_model()
        trainer._move_model_to_device(teacher, trainer.model.device)
        assert trainer.model_wrapped is trainer.model
        trainer.train()
        found.append((trainer.model, trainer.predict(rows[:9]).label_ids, trainer._get_learning_rate()))
    for one, other in zip(found[0][0].parameters(), found[1][0].parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert (found[0][1] == found[1][1]).all()
    assert found[0][2] == found[1][2]
    with refused(AttributeError, fix="LightningModule"):
        trainer.store_flos()


def test_the_model_is_on_its_device_before_and_after_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[str] = []

    def move(module: nn.Module, device: torch.device) -> nn.Module:
        places.append(torch.device(device).type)
        return module

    def leave(_: object, module: nn.Module) -> bool:
        places.append("host")
        return False

    monkeypatch.setattr("hasten.strategies.base.Sharding.to_host", leave)
    monkeypatch.setattr("hasten_tools.transformers.module.TransformersModule.to", move)
    args = arguments(tmp_path, max_steps=1, save_strategy="no")
    given: dict[str, Any] = {"train_dataset": DATA, "eval_dataset": DATA, "enable_model_summary": False}
    trainer = TransformersTrainer(language_model(), args, **given)
    assert places == ["cpu"]
    for run in (trainer.train, trainer.evaluate):
        places.clear()
        run()
        assert places == ["cpu", "host", "cpu"]


def test_columns_and_the_number_of_samples_are_those_that_a_subclass_says(tmp_path: Path) -> None:
    class Own(TransformersTrainer):
        def _set_signature_columns_if_needed(self) -> None:
            self._signature_columns = ["input_ids", "labels", "weight"]

        def num_examples(self, dataloader: Any) -> int:
            return 10**6

        def compute_loss(self, model: Any, inputs: Any, **given: Any) -> Any:
            assert inputs.pop("weight").min() == 2
            return super().compute_loss(model, inputs, **given)

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows)

    class Counted(torch.utils.data.DataLoader[Any]):
        def __len__(self) -> int:
            return 6

    rows = [{**row, "weight": 2.0, "other": 1} for row in DATA]
    trainer = Own(
        language_model(), arguments(tmp_path, num_train_epochs=1), train_dataset=rows, enable_model_summary=False
    )
    metrics = trainer.train().metrics
    assert metrics["train_samples_per_second"] * metrics["train_runtime"] == pytest.approx(10**6, rel=0.01)
    assert set(next(iter(trainer.get_eval_dataloader(rows)))) == {"input_ids", "labels", "weight"}
    loader = Counted(Stream(), batch_size=4, collate_fn=trainer.get_eval_dataloader(rows).collate_fn)
    assert trainer.evaluation_loop(loader, "Evaluation").num_samples == 10**6
    with refused(ValueError, "backend", fix="backend='optuna'"):
        trainer.hyperparameter_search(backend="ray")


def test_a_sampler_of_a_subclass_is_used_with_several_processes_and_its_scale_of_the_loss_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Weighted(TransformersTrainer):
        loss_is_scaled_for_ga = False

        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.WeightedRandomSampler([1.0] * 22, 22)

    given: dict[str, Any] = {"train_dataset": DATA, "enable_model_summary": False}
    trainer = Weighted(language_model(), arguments(tmp_path, max_steps=1, gradient_accumulation_steps=2), **given)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert isinstance(trainer.get_train_dataloader().sampler, torch.utils.data.WeightedRandomSampler)
    monkeypatch.undo()
    output = trainer.module.training_step(next(iter(trainer.get_train_dataloader())), 0)
    assert isinstance(output, torch.Tensor)  # It has no weight: batches count alike.


def test_texts_are_generated_in_evaluations_as_seq2seq_trainer_does(tmp_path: Path) -> None:
    def lengths(prediction: Any) -> dict[str, float]:
        extra = float(prediction.inputs.sum() + prediction.losses.sum())
        return {"length": float((prediction.predictions != 0).sum()), "extra": extra}

    found: list[Any] = []
    kinds: list[Any] = [transformers.Seq2SeqTrainer, TransformersTrainer]
    for kind in kinds:
        torch.manual_seed(1)
        config = transformers.T5Config(
            vocab_size=20,
            d_model=8,
            d_kv=4,
            d_ff=8,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            use_cache=True,
        )
        args = transformers.Seq2SeqTrainingArguments(
            str(tmp_path / kind.__name__), use_cpu=True, disable_tqdm=True, report_to="none", num_train_epochs=1,
            predict_with_generate=True, generation_max_length=6, generation_num_beams=2, eval_strategy="epoch",
            include_for_metrics=["inputs", "loss"], generation_config=transformers.GenerationConfig(
                decoder_start_token_id=0, pad_token_id=0, eos_token_id=1
            ),
        )  # fmt: skip
        more = {} if kind is not TransformersTrainer else {"enable_model_summary": False}
        rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"][:4]} for row in DATA]
        model = transformers.T5ForConditionalGeneration(config)
        trainer = kind(model, args, train_dataset=rows, eval_dataset=rows[:11], compute_metrics=lengths, **more)
        trainer.train()
        values = trainer.evaluate(max_length=7, num_beams=1)
        prediction = trainer.predict(rows[:5], max_new_tokens=3)
        found.append(([results(row) for row in trainer.state.log_history], results(values), prediction))
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5)
    assert (found[1][2].predictions == found[0][2].predictions).all()
    assert (found[1][2].label_ids == found[0][2].label_ids).all()
    for old, new in zip(found[0][0], found[1][0], strict=True):
        assert new.get("eval_length") == old.get("eval_length")


class Tied(nn.Module):
    """Reads and writes with one table, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.read, self.write, self.norm = nn.Embedding(2000, 8), nn.Linear(8, 2000, bias=False), nn.BatchNorm1d(8)
        self.write.weight = self.read.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.write(self.norm(self.read(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Adapter(Tied):
    """As a model of PEFT: what it adapts does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.peft_config: dict[str, Any] = {}
        self.read.weight.requires_grad_(False)


@pytest.mark.parametrize("kind", [Tied, Adapter])
def test_a_checkpoint_has_the_weights_once_and_a_run_continues_from_it_as_if_it_had_not_stopped(
    kind: type[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(**options: Any) -> TransformersTrainer:
        args = arguments(tmp_path, num_train_epochs=1, save_steps=2, learning_rate=1e-2, **options)
        return TransformersTrainer(kind(), args, train_dataset=DATA, eval_dataset=DATA, enable_model_summary=False)

    whole = make()
    whole.train()
    folder = tmp_path / "checkpoint-2"
    trained = sum(each.numel() for each in whole.model.parameters() if each.requires_grad)
    assert (folder / "hasten.ckpt").stat().st_size < 8 * trained + 40_000  # AdamW has two numbers for each.
    for place in (folder, folder / "hasten.ckpt"):
        again = make()
        again.train(resume_from_checkpoint=str(place))
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[name]), name
    if kind is Adapter:
        other = make()
        with torch.no_grad():
            other.model.read.weight.mul_(2)  # type: ignore[operator, union-attr]
        with warned(UserWarning, says="model.read.weight", fix="Make the model of the weights"):
            other.train(resume_from_checkpoint=str(folder))
    again.trainer.save_checkpoint(tmp_path / "alone.ckpt")
    kept = torch.load(tmp_path / "alone.ckpt", weights_only=False)
    assert "elsewhere" not in kept
    assert kept["state_dict"].keys() == again.module.state_dict().keys()

    best = make(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    best.train()
    assert best.evaluate()["eval_loss"] == pytest.approx(best.state.best_metric)

    # A run that is killed while it writes a folder again leaves none with weights of two runs.
    def killed(*_: Any, **__: Any) -> None:
        raise MemoryError

    broken = make()
    monkeypatch.setattr(broken.trainer, "save_checkpoint", killed)
    with pytest.raises(MemoryError):
        broken.train()
    assert (folder / "model.safetensors").is_file()
    assert not (folder / "hasten.ckpt").exists()


def test_files_of_a_checkpoint_that_have_changed_are_named_and_an_older_whole_one_is_taken(tmp_path: Path) -> None:
    def make(**options: Any) -> TransformersTrainer:
        args = arguments(tmp_path, num_train_epochs=1, save_steps=2, learning_rate=1e-2, **options)
        return TransformersTrainer(Tied(), args, train_dataset=DATA, eval_dataset=DATA, enable_model_summary=False)

    best = make(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    best.train()
    assert best.state.best_global_step == 6
    folder = tmp_path / "checkpoint-6"
    whole = (folder / "model.safetensors").read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for changed, says in ((flipped, "by its checksum"), (whole[:middle], f"{middle} bytes instead of {len(whole)}")):
        (folder / "model.safetensors").write_bytes(changed)
        with refused(RuntimeError, says=f"{folder} is damaged: model.safetensors", fix="another checkpoint") as caught:
            make().train(resume_from_checkpoint=str(folder))
        assert says in str(caught.value)
    with warned(UserWarning, says="had 6 steps, and has 11 now", fix="max_steps=..."):
        make(per_device_train_batch_size=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    (folder / "model.safetensors").write_bytes(whole[:middle])
    again = make()
    with warned(UserWarning, says=f"{folder} is damaged"):
        again.train(resume_from_checkpoint=True)
    # It has written a whole one in its place, with the weights of a run that was not stopped.
    for one, other in zip(best.model.state_dict().values(), again.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)

    # The best weights are not those of a file that is damaged.
    broken = make(eval_strategy="steps", eval_steps=2, load_best_model_at_end=True)
    broken.add_callback(Damages)
    with refused(RuntimeError, says="model.safetensors is missing", fix="another checkpoint"):
        broken.train()
    # A copy may have times of its own.
    for step in (2, 4):
        os.utime(tmp_path / f"checkpoint-{step}" / "hasten.ckpt", (2e9 - step, 2e9 - step))
    with warned(UserWarning, says=("checkpoint-2", "checkpoint-4"), fix="resume_from_checkpoint=..."):
        make().train(resume_from_checkpoint=True)
    for path in tmp_path.glob("checkpoint-*/model.safetensors"):
        path.unlink()
    with (
        warned(UserWarning, says="model.safetensors is missing"),
        refused(RuntimeError, says="None of the 3 checkpoints", fix="begin anew"),
    ):
        make().train(resume_from_checkpoint=True)


class Damages(transformers.TrainerCallback):  # type: ignore[misc]
    """Removes the weights of the last checkpoint."""

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 6:
            Path(state.best_model_checkpoint, "model.safetensors").unlink()


def test_a_save_that_fails_at_any_moment_leaves_a_checkpoint_from_which_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: str) -> TransformersTrainer:
        args = arguments(tmp_path / folder, num_train_epochs=1, save_steps=2, save_total_limit=1)
        return TransformersTrainer(Tied(), args, train_dataset=DATA, enable_model_summary=False)

    whole = make("whole")
    whole.train()
    for name, call in (
        ("hasten_tools.transformers.trainer.TransformersTrainer.save_model", 2),
        ("hasten.checkpoint.files.add_checksum", 2),
        ("transformers.TrainerState.save_to_json", 2),
        ("shutil.rmtree", 1),
    ):
        broken, again = make(name), make(name)
        with monkeypatch.context() as patched:
            patched.setattr(name, fails_in_call(call, pkgutil.resolve_name(name)))
            with pytest.raises(MemoryError):
                broken.train()
        again.train(resume_from_checkpoint=True)
        for one, other in zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True):
            assert torch.equal(one, other), name
        assert {path.name for path in (tmp_path / name).iterdir()} == {"checkpoint-6", "logs"}
        # A checkpoint of hasten has all weights, also after a save that failed.
        broken.trainer.save_checkpoint(tmp_path / "alone.ckpt")
        assert "elsewhere" not in torch.load(tmp_path / "alone.ckpt", weights_only=True)


def fails_in_call(number: int, function: Any) -> Any:
    calls = itertools.count(1)

    def call(*args: Any, **given: Any) -> Any:
        if next(calls) == number:
            raise MemoryError
        return function(*args, **given)

    return call


@pytest.mark.skipif(OLD, reason="an older transformers calls other functions")
def test_models_are_pushed_and_hyperparameters_searched_by_the_code_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.trainer_utils import HPSearchBackend

    pytest.importorskip("wandb")

    class Hub:
        def create_repo(self, name: str, **_: Any) -> Any:
            return argparse.Namespace(repo_id=f"me/{name}")

        def upload_folder(self, repo_id: str, commit_message: str, folder_path: str, **_: Any) -> Any:
            pushed.append((repo_id, commit_message, (Path(folder_path) / "model.safetensors").is_file()))
            return argparse.Namespace(done=lambda: True, is_done=lambda: True)

    class Search:
        default_hp_space = None

        def ensure_available(self) -> None:
            pass

        def run(self, trainer: Any, n_trials: int, direction: str) -> list[float]:
            for trial in range(n_trials):
                trainer.train(trial={"learning_rate": 10.0 ** -(trial + 1)})
                found.append((trainer.objective, trainer.args.learning_rate, trainer.state.trial_name))
            return found

    pushed: list[Any] = []
    found: list[Any] = []
    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    given: dict[str, Any] = {"train_dataset": DATA, "eval_dataset": DATA[:9], "enable_model_summary": False}
    args = arguments(tmp_path, num_train_epochs=1, save_steps=4, push_to_hub=True, hub_model_id="name")
    trainer = TransformersTrainer(language_model(), args, **given)
    trainer.train()
    trainer.push_to_hub()
    messages = ["Training in progress, step 4", "Training in progress, step 6", "End of training"]
    assert pushed == [("me/name", message, True) for message in messages]
    assert (tmp_path / "README.md").is_file()

    monkeypatch.setattr("wandb.run", argparse.Namespace(id="1"))
    monkeypatch.setitem(transformers.trainer.ALL_HYPERPARAMETER_SEARCH_BACKENDS, HPSearchBackend.WANDB, Search)
    args = arguments(tmp_path / "search", num_train_epochs=1, eval_strategy="epoch", save_strategy="epoch")
    trainer = TransformersTrainer(args=args, model_init=language_model, **given)
    options: dict[str, Any] = {"backend": "wandb", "hp_name": lambda trial: f"rate{trial['learning_rate']}"}
    assert trainer.hyperparameter_search(n_trials=2, **options) is found
    assert [each[1:] for each in found] == [(0.1, "rate0.1"), (0.01, "rate0.01")]
    assert found[0][0] != found[1][0]
    assert (tmp_path / "search" / "rate0.1" / "checkpoint-6" / "hasten.ckpt").is_file()
