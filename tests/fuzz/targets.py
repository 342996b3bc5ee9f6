"""All targets, by the word that ``make fuzz ARGS=...`` takes."""

from __future__ import annotations

from tests.fuzz import arguments, checkpoints, readers, sources, texts
from tests.fuzz.running import Target

TARGETS = {
    "arguments": Target("arguments of public classes", arguments.calls(), arguments.check_call, 40),
    "templates": Target("templates of file names", texts.templates, texts.check_template, 60),
    "durations": Target("durations and intervals", texts.durations, texts.check_duration, 80),
    "csv": Target("`metrics.csv`", readers.tables(), readers.check_table, 25),
    "yaml": Target("hyper-parameters in YAML and CSV", readers.documents, readers.check_document, 20),
    "hparams": Target("hyper-parameters that are logged", readers.hyper_parameters, readers.check_hyper_parameters, 20),
    "record": Target("records of runs (`run.jsonl`)", readers.records, readers.check_record, 40),
    "history": Target("histories in checkpoints", readers.histories, readers.check_history, 30),
    "entries": Target("entries of checkpoints", checkpoints.entries(), checkpoints.check_entries, 15),
    "bytes": Target("bytes of checkpoints: cut, flipped bits", checkpoints.damaged(), checkpoints.check_damaged, 40),
    "pickles": Target("archives and pickles that lie", checkpoints.hostile(), checkpoints.check_hostile, 60),
    "folders": Target("sharded checkpoints", checkpoints.folders(), checkpoints.check_folder, 15),
    "migrate": Target("`hasten migrate`", sources.programs(), sources.check_migrate, 5),
    "eject": Target("`hasten eject`", sources.ejectable(), sources.check_eject, 5),
}
