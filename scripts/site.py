"""What ``mkdocs.yml`` adds to the pages of ``docs/``: pages for the files of the repository that they link to.

It also makes the reference, tables that fit on a phone, and pages at the addresses that pages had before.

A link such as ``../src/hasten/loops/fit.py`` works where the repository is read. On the site it leads to a page with
the text of that file, which is made here. Of the Markdown files outside ``docs/``, those in ``PAGES`` are pages of the
site.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from docstrings import in_markdown  # noqa: E402

from hasten._lib.errors import is_absent  # noqa: E402
from hasten._lib.names import Elsewhere  # noqa: E402

LOG = logging.getLogger("mkdocs.hooks.site")

# Markdown files outside docs/ and their pages.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "readme.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
# How much a page counts in the search, by the beginning of its path: guides before what is looked up.
BOOST = {
    "guides/": 4.0,
    "start/": 2.0,
    "speed.md": 4.0,
    "speed/out_of_memory.md": 4.0,
    "scaling.md": 4.0,
    "resuming.md": 4.0,
    "bad_loss.md": 2.0,
    "checkpoints.md": 2.0,
    "install.md": 2.0,
    "errors.md": 4.0,
    "cookbook/": 2.0,
    "comparison.md": 0.5,
    "differences": 0.5,
    "census.md": 0.5,
    "hooks.md": 0.2,
    "reference/": 0.3,
    "architecture.md": 0.3,
    "where_things_are.md": 0.3,
    "readme.md": 0.3,
    "examples.md": 0.3,
    "contributing.md": 0.3,
    "changelog.md": 0.1,
}
# What readers search for, where a page or a heading has other words. The search counts them like a title.
KEYWORDS = {
    "cli.html": "config file yaml configuration arguments argparse hydra",
    "cookbook/data.html#a-datamodule-and-predictions-in-a-file": "predict write save predictions results",
    "cookbook/models.html#export-a-trained-model": "deploy deployment serve torchscript onnx",
    "cookbook/models.html#train-the-head-first-then-everything": "freeze unfreeze layers backbone transfer finetuning",
    "cookbook/models.html#two-optimizers-a-gan": "manual optimization multiple several optimizers",
    "cookbook/training.html#a-large-batch-in-little-memory-with-clipped-gradients": (
        "gradient clipping clip gradients gradient_clip_val accumulation accumulate_grad_batches"
    ),
    "cookbook/training.html#cross-validation": "cross validation kfold folds",
    "cookbook/training.html#evaluate-an-average-of-the-weights": "exponential moving average ema swa",
    "cookbook/training.html#log-to-tensorboard-and-to-a-file": "wandb weights biases mlflow comet logger",
    "cookbook/training.html#metrics-over-the-whole-epoch": "metrics accuracy f1 confusion matrix torchmetrics",
    "cookbook/training.html#repeat-a-run-seeds": "seed_everything reproducibility reproducible deterministic random",
    "cookbook/training.html#see-where-the-time-goes": "profiler profiling profile slow bottleneck",
    "cookbook/training.html#stop-early-when-the-loss-no-longer-improves": "early stopping EarlyStopping patience",
    "cookbook/training.html#try-several-learning-rates": "hyperparameter search tuning sweep grid optuna",
    "eject.html": "uninstall remove",
    "guides/callbacks.html#what-a-trainer-has-by-default": "disable progress bar model summary checkpoints",
    "guides/checkpoints.html": "save best model",
    "guides/checkpoints.html#load-a-model": "load_from_checkpoint weights pretrained hyperparameters",
    "guides/checkpoints.html#resume-a-run": "ctrl c KeyboardInterrupt interrupt",
    "guides/data.html#several-training-loaders": "multiple dataloaders",
    "guides/learning_rates.html": "learning rate scheduler schedule warmup",
    "guides/learning_rates.html#two-groups-two-rates": "weight decay parameter groups",
    "guides/many_devices.html": "ddp distributed multiple multi gpu",
    "guides/validation.html#fewer-batches": "debug debugging fast_dev_run overfit_batches limit_train_batches",
    "guides/validation.html#several-loaders": "multiple several validation dataloaders",
    "guides/validation.html#validate-test-and-predict-without-training": "inference prediction predictions evaluate",
    "guides/validation.html#when-validation-runs": (
        "validate every steps batches epochs val_check_interval check_val_every_n_epoch"
    ),
    "launch.html#slurm": "run sbatch srun job cluster",
    "processes.html#when-a-process-is-late-or-stuck": "hang hangs timeout deadlock",
    "progress.html": "progress bar tqdm",
    "speed/compile.html": "torch.compile inductor",
    "speed/out_of_memory.html": "oom OutOfMemoryError",
}
# Where pages and parts of pages have moved: the address before, and that of today.
MOVED = {
    "scale.html": "strategy_names.html",
    "extend/lever.html": "extend/speed_up.html",
    "speed.html#measure-your-program-the-advisor": "speed/advise.html",
    "speed.html#let-the-trainer-choose-trainerspeedauto": "speed/auto.html",
    "speed.html#no-padding-in-transformer-blocks-trainerpackedtrue": "speed/packed.html",
    "speed.html#the-last-block-for-one-token-trainerpackedfirst_token": (
        "speed/packed.html#the-last-block-for-one-token-trainerpackedfirst_token"
    ),
    "speed.html#batching-by-length": "speed/batching.html",
    "speed.html#dropout-masks-from-random-bytes-trainerdropoutfast": "speed/dropout.html",
    "speed.html#keeping-memory-trainerallocatorkeep": "speed/allocator.html",
    "speed.html#attention-dropout": "speed/dropout.html#attention-dropout",
    "speed.html#data-loading": "speed/data_loading.html",
    "speed.html#precision-and-optimizers": "speed/precision.html",
    "speed.html#batches-that-do-not-fit-into-memory": "speed/out_of_memory.html",
    "speed.html#compiling-trainercompiletrue": "speed/compile.html",
    "check.html#mistakes-that-it-finds": "check_steps.html",
    "checkpoints.html#sharded-checkpoints": "sharded_checkpoints.html",
    "checkpoints.html#one-file-of-a-folder": "sharded_checkpoints.html#one-file-of-a-folder",
    "checkpoints.html#folders-of-hugging-face": "sharded_checkpoints.html#folders-of-hugging-face",
    "compat.html#what-packages-use": "census.html",
    "differences.html#a-loss-that-is-not-finite": "bad_loss.html",
    "differences.html#several-processes": "differences_by_part.html#several-processes",
    "differences.html#checkpoints-and-resuming": "differences_by_part.html#checkpoints-and-resuming",
    "differences.html#logging": "differences_by_part.html#logging",
    "differences.html#callbacks": "differences_by_part.html#callbacks",
    "differences.html#precision": "differences_by_part.html#precision",
    "guides/logging.html#where-the-values-go": "guides/logging.html#where-the-logs-are",
    "guides/precision.html#your-own-loop": "guides/precision.html#with-fabric",
    "guides/validation.html#without-training": "guides/validation.html#validate-test-and-predict-without-training",
    "guides/checkpoints.html#use-the-weights": "guides/checkpoints.html#load-a-model",
    "guides/many_devices.html#before-you-rent-the-machine": "guides/many_devices.html#before-you-use-many-gpus",
    "reliability.html#the-loop-costs-almost-nothing": "reliability.html#the-loop-adds-little-overhead",
    "cookbook/training.html#stop-when-the-loss-no-longer-improves": (
        "cookbook/training.html#stop-early-when-the-loss-no-longer-improves"
    ),
    "architecture.html#how-to-add": "where_things_are.html#how-to-add",
    "architecture.html#where-an-argument-is-implemented": "where_things_are.html#where-an-argument-is-implemented",
    "architecture.html#glossary": "where_things_are.html#glossary",
}
# Pages of the reference: title, what it is about, and the names on it, or the modules whose public names it has.
REFERENCE: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "trainer": ("Trainer", "Runs a module: training, validation, test and prediction.", ("hasten.Trainer",)),
    "module": ("LightningModule", "The model, its steps and its optimizers.", ("hasten.LightningModule",)),
    "datamodule": ("LightningDataModule", "The data of a run.", ("hasten.LightningDataModule",)),
    "fabric": ("Fabric", "Devices, precision and strategies for your own loop.", ("hasten.Fabric", "hasten.fabric")),
    "callback": ("Callback", "The hooks that a callback can have.", ("hasten.Callback",)),
    "callbacks": ("Callbacks", "The callbacks that come with hasten.", ("hasten.callbacks",)),
    "loggers": ("Loggers", "Where logged values go.", ("hasten.loggers",)),
    "strategies": ("Strategies", "How one model lives on several devices.", ("hasten.strategies",)),
    "plugins": (
        "Plugins and precisions",
        "What `plugins=` takes: precisions, environments, ways to write checkpoints.",
        ("hasten.plugins", "hasten.precision"),
    ),
    "accelerators": ("Accelerators", "Kinds of devices.", ("hasten.accelerators",)),
    "data": ("Data", "Loaders, samplers and packing.", ("hasten.data",)),
    "optim": ("Optimizers", "hasten's optimizers, and what `configure_optimizers` may return.", ("hasten.optim",)),
    "speed": ("Speed", "Functions that make a model faster, and speed-ups.", ("hasten_tools.speed.levers",)),
    "profilers": ("Profilers", "Where the time of a run goes.", ("hasten.profilers",)),
    "tuner": ("Tuner", "The search for a batch size and a learning rate.", ("hasten.tuner",)),
    "report": ("Reports", "Model summaries and plots.", ("hasten.report",)),
    "cli": ("LightningCLI", "Command line programs.", ("hasten.cli",)),
    "compat": ("Lightning's names", "Programs written for Lightning, unchanged.", ("hasten_lightning",)),
    "transformers": ("Hugging Face's Trainer", "Its programs, with `TrainingArguments`.", ("hasten.transformers",)),
    "demos": ("Demos", "Small models and data for tests and examples.", ("hasten.demos",)),
    "functions": ("Functions", "The functions at the top of the package.", ("hasten",)),
    "utilities": (
        "Utilities",
        "Helpers under Lightning's names.",
        (
            "hasten.utilities",
            *(f"hasten.utilities.{name}" for name in (
                "data", "enums", "exceptions", "hooks", "imports", "memory", "parsing", "rank_zero", "types", "warnings"
            )),
        ),
    ),
}  # fmt: skip
# Of modules without __all__, the names of the interface.
NAMES = {"hasten_tools.speed.levers": ["Lever", "register", "unregister", "known_levers"]}
# What the index of the reference shows first: pages by what their reader does with the names.
GROUPS = {
    "What you call": (
        *(
            "trainer",
            "fabric",
            "functions",
            "callbacks",
            "loggers",
            "strategies",
            "plugins",
            "accelerators",
            "data",
            "optim",
        ),
        *("speed", "profilers", "tuner", "cli", "transformers"),
    ),
    "What you read": ("report", "compat", "demos", "utilities"),
    "What you override": ("module", "datamodule", "callback"),
}
# Methods of the Trainer that are functions of another module.
TOOLS = ("advise", "check", "eject")
# Tables show these after what every program calls.
SELDOM = ("with_arguments", "change_arguments", *TOOLS)
# Classes that users mostly call, and what authors override of them.
CALLED: dict[str, tuple[str, ...]] = {"Trainer": (), "Fabric": ("run",)}
# Methods that authors of other classes override; they call the rest.
OVERRIDDEN = re.compile(
    r"on_\w+|configure_(?!gradient_clipping$)\w+|\w+_step|\w+_dataloader|setup|teardown|prepare_data|transfer_batch_to_device"
    r"|forward|configure_gradient_clipping|optimizer_zero_grad|backward|run|(?:load_)?state_dict"
)
# What may wrap: commands, examples, and output without columns (two spaces between words).
_MESSAGE = re.compile(
    r'(<div class="language-(?:sh|pycon|(?:text|console)(?! highlight">(?:(?!</pre>).)*[^\s>] {2,}\S)) highlight")>',
    re.DOTALL,
)
# Programs among them, by their indentation, keep their lines on a phone.
_PROGRAM = re.compile(r'(<div class="language-text highlight" data-wrap)(?=>(?:(?!</pre>).)*> {8})', re.DOTALL)
# Long code in a cell breaks after these, not within a word.
_CELL = re.compile(r"<td(?![^>]*data-whole)[^>]*>.*?</td>", re.DOTALL)
_CELL_CODE = re.compile(r"<code>([^<]{25,})</code>")
_BREAK = re.compile(r"(::|[_=(.,]|(?<!<)/)(?=[\w&\[{])")
LANGUAGES = {".py": "python", ".ipynb": "json", ".json": "json", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml"}
# Longer files would be most of the index of the search.
MOST_CHARACTERS = 100_000

LINK = re.compile(r"(\]\()(?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=[)\s])")
CODE = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,}|~{3,}).*?^(?P=indent)(?P=fence) *$|`[^`\n]+`", re.MULTILINE | re.DOTALL
)


def links_of(text: str) -> list[re.Match[str]]:
    """Return the relative links of a Markdown text, without those in code."""
    blank = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    return list(LINK.finditer(blank))


def place(source: str, target: str) -> str | None:
    """Return the path in the repository that a link from one of its files leads to; None if it leads out of it.

    Args:
        source: the file with the link, as a path in the repository.
        target: the link.

    """
    parts: list[str] = []
    for part in (PurePosixPath(source).parent / target).parts:
        if part == "..":
            if not parts:
                return None
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def page_of(path: str) -> str:
    """Return the page, as a path in ``docs/``, that shows a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    # MkDocs leaves files and folders out whose names begin with a dot.
    return PAGES.get(path) or f"files/{path.removeprefix('.') or 'index'}.md"


def relative(page: str, source: str) -> str:
    """Return the link from one page to another."""
    here, there = PurePosixPath(source).parent.parts, PurePosixPath(page).parts
    same = 0
    while same < min(len(here), len(there) - 1) and here[same] == there[same]:
        same += 1
    return "/".join([*[".."] * (len(here) - same), *there[same:]])


def with_links_of_the_site(text: str, source: str, page: str) -> str:
    """Return a text whose links to files of the repository lead to their pages.

    Args:
        text: Markdown.
        source: the file it is from, as a path in the repository.
        page: the page it is on, as a path in ``docs/``.

    """
    for link in reversed(links_of(text)):
        path = place(source, link[2])
        if path is None or not (ROOT / path).exists():
            LOG.warning("%s links to %s, which does not exist", source, link[2])
            continue
        text = text[: link.start(2)] + relative(page_of(path), page) + text[link.end(2) :]
    return text


def without_links_of_the_host(text: str) -> str:
    """Return a text from outside ``docs/``, without links to pages of the repository's host, and with its pictures."""
    titles = re.findall(r"^\[([^\]\n]+)\]: \.\./\.\./.*\n?", text, flags=re.MULTILINE)
    text = re.sub(r"^\[[^\]\n]+\]: \.\./\.\./.*\n?", "", text, flags=re.MULTILINE)
    for title in titles:
        text = text.replace(f"[{title}]", title)
    return re.sub(r'(src|srcset)="docs/', r'\1="', text)


def text_of(path: str) -> str:
    """Return a page that shows a file, or lists a folder, of the repository."""
    at = ROOT / path
    if at.is_dir():
        names = sorted(
            f"{entry.name}/" if entry.is_dir() else entry.name
            for entry in at.iterdir()
            if not entry.name.startswith((".", "__pycache__"))
        )
        return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n```text\n" + "\n".join(names) + "\n```\n"
    text = at.read_text(encoding="utf-8")[:MOST_CHARACTERS]
    fence = "`" * max(3, *(len(found) + 1 for found in re.findall(r"`{3,}", text)), 3)
    language = LANGUAGES.get(at.suffix, "text")
    return f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def public_names() -> dict[str, dict[str, Any]]:
    """Return the public names on each page of the reference, "module.name", with their objects, in the order shown."""
    pages: dict[str, dict[str, Any]] = {}
    for page, (_, _, places) in REFERENCE.items():
        pages[page] = {}
        for place in places:
            module, _, name = place.rpartition(".")
            if name[0].isupper():
                pages[page][place] = getattr(importlib.import_module(module), name)
                continue
            found = importlib.import_module(place)
            pages[page] |= {f"{place}.{name}": getattr(found, name) for name in NAMES.get(place) or found.__all__}
    return pages


def object_path(thing: Any) -> str | None:
    """Return where a class or function of hasten is defined; None for anything else."""
    module, name = getattr(thing, "__module__", None) or "", getattr(thing, "__qualname__", "")
    if (inspect.isclass(thing) or inspect.isroutine(thing)) and module.startswith("hasten") and "<" not in name:
        return f"{module}.{name}"
    return None


def first_sentence(thing: Any) -> str:
    """Return the first paragraph of a docstring, for a row of a table."""
    text = inspect.cleandoc(thing.__doc__ or "").partition("\n\n")[0]
    return in_markdown(" ".join(text.split())).replace("|", r"\|")


def summary(owner: type, path: str) -> tuple[list[str], list[str]]:
    """Return tables of the members of a class, what users call, read and override, and members defined elsewhere.

    Args:
        owner: the class.
        path: where it is defined, which the anchors of its members begin with.

    """
    rows: dict[str, list[str]] = {group: [] for group in GROUPS}
    elsewhere: list[str] = []
    names = dict.fromkeys(name for each in owner.__mro__ for name in vars(each))
    for name in sorted(names, key=lambda name: name in SELDOM):
        home = next(each for each in owner.__mro__ if name in vars(each))
        thing = vars(home)[name]
        function = inspect.unwrap(getattr(thing, "fget", None) or getattr(thing, "__func__", thing))
        if name.startswith("_") or not (home.__module__.startswith("hasten") and hasattr(thing, "__get__")):
            continue
        if isinstance(thing, Elsewhere):
            continue  # A name of another library, which only says what to write.
        # Functions that tools use, and hooks that are made from others, have no text of their own.
        here = getattr(function, "__qualname__", "") == f"{home.__qualname__}.{name}" and bool(function.__doc__)
        if (
            not here
            and inspect.isroutine(thing)
            and function.__module__.startswith("hasten.trainer.")
            and name not in TOOLS
        ):
            continue
        group = "What you read" if not inspect.isroutine(thing) else "What you call"
        own = CALLED.get(owner.__name__)
        if group == "What you call" and (OVERRIDDEN.fullmatch(name) if own is None else name in own):
            group = "What you override"
        anchor = f"{path}.{name}"
        if not here and name in TOOLS:
            anchor = f"{function.__module__}.{name}"
            elsewhere.append(anchor)
        shown = f"[`{name}`](#{anchor})" if here or anchor in elsewhere else f"`{name}`"
        rows[group].append(f"| {shown} | {first_sentence(thing if thing.__doc__ else function)} |")
    text = []
    for group in GROUPS if owner.__name__ in CALLED else reversed(GROUPS):
        if rows[group]:
            text += [f"**{group}**", "", "| name | |", "|---|---|", *rows[group], ""]
    return text, elsewhere


def reference(*, whole: bool) -> tuple[dict[str, str], str]:
    """Return the pages of the reference, by their paths in ``docs/``, and the tables of all names that lead to them.

    Args:
        whole: with the text of each docstring; otherwise the names only.

    """
    pages: dict[str, str] = {}
    shown: dict[str, tuple[str, str]] = {}
    tables: dict[str, list[str]] = {}
    for page, names in public_names().items():
        title, about, places = REFERENCE[page]
        text = [f"# {title}", "", about, ""]
        module = places[0].removesuffix(f".{title}")
        tables[page] = rows = [f"### {title}", "", f"{about} In `{module}`.", "", "| name | |", "|---|---|"]
        # Constants and type aliases come last.
        for name, thing in sorted(names.items(), key=lambda each: object_path(each[1]) is None):
            path, short = object_path(thing), name.rpartition(".")[2]
            if (path or short) in shown:
                other_page, other = shown[path or short]
                where = f"is [`{other}`]" if other != name else f"has [a page of its own, {REFERENCE[other_page][0]}]"
                text += [f'<span id="{name}"></span>`{name}` {where}({other_page}.md#{other}).', ""]
                continue
            shown[path or short] = (page, name)
            rows.append(f"| [`{short}`]({page}.md#{name}) | {first_sentence(thing) if path else ''} |")
            # Where the public name is the path, the heading of the docstring has this anchor.
            has_anchor = whole and name == path and not is_absent(thing)
            text += [] if has_anchor else [f'<span id="{name}"></span>', ""]
            if path is None:
                is_object = inspect.isclass(thing) or inspect.isroutine(thing)
                value = f"{thing.__module__}.{thing.__qualname__}" if is_object else repr(thing)
                text += [f"## `{short}`", "", "```text", re.sub(r" at 0x\w+", "", value), "```", ""]
            elif is_absent(thing):
                text += [f"## {short}", "", thing.__doc__, ""]
            elif whole:
                tables_of_it, elsewhere = summary(thing, path) if name in places else ([], [])
                text += [*tables_of_it, f"::: {path}", "    options:", f"      heading: {short}"]
                text += [f"      toc_label: {short}"]
                text += ["      inherited_members: true", ""] if name in places else [""]
                for other in elsewhere:
                    heading = f"{short}.{other.rpartition('.')[2]}"
                    text += [f"::: {other}", "    options:", f"      heading: {heading}", "      heading_level: 3", ""]
            else:
                text += [f"## {short}", ""]
        pages[f"reference/{page}.md"] = "\n".join(text) + "\n"
    index: list[str] = []
    for group, here in GROUPS.items():
        index += [f"## {group}", "", *(line for page in here for line in [*tables.pop(page), ""])]
    assert not tables, f"add {list(tables)} to GROUPS"
    return pages, "\n" + "\n".join(index) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside ``docs/`` that a page links to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {path: (ROOT / path).read_text(encoding="utf-8") for path in PAGES}
    wanted = set(PAGES)
    for source, text in texts.items():
        for link in links_of(text):
            path = place(source, link[2])
            if path is not None and not path.startswith("docs/") and (ROOT / path).exists():
                wanted.add(path)
    for path in sorted(wanted):
        page = page_of(path)
        if path in PAGES:
            content = without_links_of_the_host(with_links_of_the_site(texts[path], path, page))
        else:
            content = text_of(path)
        files.append(File.generated(config, page, content=content))
    pages, tables = reference(whole=config.extra["api"])
    config.extra["renamed"] = {
        f"reference/{page}.md": [
            (old, new)
            for name, thing in names.items()
            if (old := (object_path(thing) or name).rpartition(".")[2]) != (new := name.rpartition(".")[2])
        ]
        for page, names in public_names().items()
    }
    for page, content in pages.items():
        files.append(File.generated(config, page, content=content))
    config.extra["reference"] = tables
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Weigh a page for the search, lead its links to pages of the site, and complete the index of the reference."""
    boost = next((boost for start, boost in BOOST.items() if page.file.src_uri.startswith(start)), None)
    if boost is not None:
        page.meta.setdefault("search", {"boost": boost})
    if page.file.generated_by:
        return markdown
    markdown = with_links_of_the_site(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)
    if page.file.src_uri == "reference/index.md":
        markdown = markdown.rpartition("\n\n")[0] + "\n" + config.extra["reference"]
    return markdown


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """Tell the style sheet how to show tables, and which lines may wrap; name aliases as users write them."""
    html = re.sub(r"<table>(.*?)</table>", _table, html, flags=re.DOTALL)
    for old, new in config.extra["renamed"].get(page.file.src_uri, ()):
        html = html.replace(f'<span class="nf">{old}</span>', f'<span class="nf">{new}</span>')
    return _PROGRAM.sub(r'\1="wide"', _MESSAGE.sub(r"\1 data-wrap>", html))


def _table(found: re.Match[str]) -> str:
    head, _, body = found[1].partition("<tbody>")
    labels = [html_text(cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", head, re.DOTALL)]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in body.split("</tr>")]
    cells = [[html_text(cell) for cell in row] for row in rows if row]
    marks = ""
    if cells and max(len(row[0]) for row in cells) <= 28:
        marks += " data-short"
    if len(labels) > 4:
        marks += " data-wide"
    # Sentences become narrow in columns; numbers are compared with those above them.
    long = sum(max((len(row[number]) for row in cells), default=0) > 24 for number in range(len(labels)))
    if long >= max(2, len(labels) / 2):
        marks += f' data-rows="{len(labels)}"'
    elif long and len(labels) > 2:
        marks += " data-lines"
    if cells and all(re.fullmatch(r"[\d., x B]+", row[0]) for row in cells):
        marks += " data-number"
    # A date, a number with its unit and one short word stay on one line.
    body = re.sub(r"<td(?=[^>]*>((?:(?!</td>).)*))", _whole, body, flags=re.DOTALL)
    if "data-rows" in marks or "data-lines" in marks:
        numbers = iter(range(body.count("<td")))
        body = re.sub(r"<td", lambda _: f'<td data-label="{labels[next(numbers) % len(labels)]}"', body)
    # The heading of a group of rows is as wide as the table.
    body = re.sub(
        r"<td([^>]*>\s*<strong>(?:(?!</td>).)*</strong>\s*</td>)(?:\s*<td[^>]*></td>)+(?=\s*</tr>)",
        rf'<td colspan="{len(labels)}"\1',
        body,
    )
    return f"<table{marks}>{head}<tbody>{body}</table>" if body else found[0]


def _whole(cell: re.Match[str]) -> str:
    text = html_text(cell[1])
    if len(text) <= 14:
        return f'{cell[0]} data-whole="short"'
    return f"{cell[0]} data-whole" if len(text) <= 30 and " " not in text else cell[0]


def html_text(html: str) -> str:
    """Return the text of a piece of HTML."""
    return re.sub(r"<[^>]+>", "", html).replace('"', "&quot;").strip()


def on_post_template(output_content: str, template_name: str, **_: Any) -> str:
    """Say on the page for wrong addresses where to go on."""
    if template_name != "404.html":
        return output_content
    more = "<p>No page has this address. Search for it above, or begin at the <a href=/index.html>home page</a>.</p>"
    return output_content.replace("404 - Not found</h1>", f"Page not found</h1>{more}")


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Let long code in cells break, and lead from parts of a page that have moved to where they are."""
    output = _CELL.sub(lambda cell: _CELL_CODE.sub(lambda code: _BREAK.sub(r"\1<wbr>", code[0]), cell[0]), output)
    moved = {
        f"#{part}": relative(there, page.url)
        for before, there in MOVED.items()
        for here, _, part in [before.partition("#")]
        if here == page.url and part
    }
    if not moved:
        return output
    script = f"<script>var moved={json.dumps(moved)}[location.hash];if(moved)location.replace(moved)</script>"
    return output.replace("</head>", f"{script}</head>", 1)


def on_post_build(config: Any, **_: Any) -> None:
    """Add the keywords to the search, and write a page at each address before that leads to the one of today."""
    index = Path(config.site_dir) / "search" / "search_index.json"
    search = json.loads(index.read_text(encoding="utf-8"))
    parts = {part["location"]: part for part in search["docs"]}
    for address, words in KEYWORDS.items():
        if address in parts:
            parts[address]["keywords"] = words
        else:
            LOG.warning("KEYWORDS names %s, which is no page or heading of the site", address)
    index.write_text(json.dumps(search, separators=(",", ":")), encoding="utf-8")
    for before, there in MOVED.items():
        if "#" not in before:
            link = relative(there, before)
            (Path(config.site_dir) / before).write_text(
                f'<!doctype html><meta charset="utf-8"><title>Moved</title><meta name="robots" content="noindex">'
                f'<meta http-equiv="refresh" content="0; url={link}"><a href={link}>This page has moved.</a>\n',
                encoding="utf-8",
            )
