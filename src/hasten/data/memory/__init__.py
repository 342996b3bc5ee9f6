"""Datasets held in memory: as whole tensors, on the device, or shared by the processes of a machine."""
