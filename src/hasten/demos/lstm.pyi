from hasten_lightning.demos.lstm import *
