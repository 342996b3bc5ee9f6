"""Data held in memory: in one process, on a device, or shared by all processes of a machine."""
