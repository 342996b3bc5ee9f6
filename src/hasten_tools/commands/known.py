"""The commands of hasten, which entry points of ``pyproject.toml`` name."""

from hasten.extend.entry_points import Command

_HERE = "hasten_tools.commands."

advise = Command(_HERE + "advise", "measure which one-line speed-ups make a program faster")
check = Command(_HERE + "check", "find what would go wrong in a program's fit, in seconds, before it starts")
consolidate = Command(_HERE + "consolidate", "make one file of a sharded checkpoint, which is a folder")
demo = Command("hasten_tools.demo.command", "train a model on real data and time each one-line speed-up")
eject = Command(_HERE + "eject", "write the plain PyTorch program that does the same without hasten")
env = Command(_HERE + "env", "print what a bug report needs: versions, processor, memory, GPUs")
launch = Command(_HERE + "launch", "start a program in several processes, and restart them when one dies")
plan = Command(_HERE + "plan", "print what a program needs on many devices, without using any")
plot = Command(_HERE + "plot", "draw what runs have logged, one or several side by side")
report = Command(_HERE + "report", "write one page about a run: curves, where the time goes, what was set")
