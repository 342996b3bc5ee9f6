"""The commands for programs with Lightning's names, which entry points of ``pyproject.toml`` name."""

from hasten.extend.entry_points import Command

migrate = Command("hasten_lightning.commands.migrate", "rewrite the imports of Lightning in a folder of programs")
run = Command("hasten_lightning.commands.run", "run a program written for Lightning, unchanged")
