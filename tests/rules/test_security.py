"""Each promise of SECURITY.md has a test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OBJECTS, SUPPLY = "tests/checkpoint/test_objects.py", "tests/rules/test_supply_chain.py"
# How a promise begins, and its tests.
PROMISES: dict[str, tuple[str, ...]] = {
    "Loading a checkpoint never runs code from the file": (
        f"{OBJECTS}::test_nothing_in_a_file_runs",
        "tests/checkpoint/test_files.py::test_code_in_a_file_is_not_run",
        "tests/checkpoint/test_sharded.py::test_no_code_in_a_folder_runs",
        "tests/checkpoint/test_sharded.py::test_no_code_in_the_index_of_a_foreign_folder_runs",
    ),
    "`Trainer.fit(ckpt_path=...)`, `validate`, `test`": (
        f"{OBJECTS}::test_no_way_to_read_a_checkpoint_runs_code_unless_the_file_is_trusted",
    ),
    "A file that contains anything else is refused": (
        f"{OBJECTS}::test_no_way_to_read_a_checkpoint_runs_code_unless_the_file_is_trusted",
    ),
    "Saving leaves out hyperparameters": (
        "tests/module/test_hparams_stored.py::test_objects_are_left_out_with_one_warning",
    ),
    "A checksum in each checkpoint detects damage": (
        "tests/checkpoint/test_files.py::test_a_flipped_bit_is_found_wherever_it_is",
        "tests/checkpoint/test_sharded.py::test_damaged_folders_are_named_and_passed_over",
    ),
    "`weights_only=False` turns this protection off": (
        f"{OBJECTS}::test_no_way_to_read_a_checkpoint_runs_code_unless_the_file_is_trusted",
    ),
    "Torch's variable `TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1`": (
        "tests/module/test_loading.py::test_objects_in_a_file_are_read_only_when_asked",
    ),
    "`Trainer(compile=True)` keeps compiled code": (
        "tests/compile/test_with_others.py::test_a_second_run_of_the_program_reuses_what_the_first_compiled",
    ),
    "A folder there that other users own or can write": (
        "tests/compile/test_with_others.py::test_a_folder_of_compiled_code_that_others_can_write_to_is_not_used",
    ),
    "The development environment has exact versions": (
        f"{SUPPLY}::test_each_version_is_locked_with_hashes",
        f"{SUPPLY}::test_the_environment_is_installed_by_hash",
    ),
    "`make audit` looks for known vulnerabilities": (f"{SUPPLY}::test_packages_have_licences_that_are_allowed",),
    "It fails if the advisories cannot be read": (f"{SUPPLY}::test_advisories_that_cannot_be_read_are_no_success",),
    "The wheel and the source package of a commit": (f"{SUPPLY}::test_two_builds_have_the_same_bytes",),
    "`make dist` repeats this": (f"{SUPPLY}::test_two_builds_have_the_same_bytes",),
    "A release is a signed tag": (f"{SUPPLY}::test_a_release_needs_a_signed_tag_and_no_token",),
    "PyPI trusts the release workflow alone": (f"{SUPPLY}::test_a_release_needs_a_signed_tag_and_no_token",),
    "The steps of the workflow are pinned": (f"{SUPPLY}::test_actions_are_pinned_to_commits",),
    "A release has a list of the packages": (
        f"{SUPPLY}::test_the_list_of_packages_is_complete_and_the_same_each_time",
    ),
}
# What warns or asks, and promises nothing.
WARNINGS = (
    "It does not protect against someone who wants to change the file",
    "Pass it only for files you trust",
    "`hasten run`, `launch`, `check`, `advise`, `plan` and `eject` run the program that you name",
    "A config may name any class that can be imported",
    "Do not run programs and configs",
    "Processes of one run exchange pickled objects",
    "Run them in a network you trust",
)


def sentences() -> list[str]:
    """Return the sentences of SECURITY.md from the first section that promises something on."""
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    paragraphs = re.split(r"\n(?=- )|\n\n", text[text.index("## Checkpoints do not execute code") :])
    plain = [" ".join(each.removeprefix("- ").split()) for each in paragraphs if not each.strip().startswith("#")]
    return [sentence for each in plain for sentence in re.split(r"(?<=[.:]) (?=[A-Z`])", each) if sentence]


def test_each_sentence_is_a_promise_with_a_test_or_a_warning() -> None:
    found = sentences()
    assert len(found) > 20
    for sentence in found:
        begins = [start for start in (*PROMISES, *WARNINGS) if sentence.startswith(start)]
        assert len(begins) == 1, f"Give a test for this promise, in PROMISES of this file: {sentence}"
    assert [start for start in (*PROMISES, *WARNINGS) if not any(one.startswith(start) for one in found)] == []


def test_the_tests_of_the_promises_exist() -> None:
    for named in {name for tests in PROMISES.values() for name in tests}:
        path, _, name = named.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), named
