from hasten_lightning.demos.boring_classes import *
