from hasten_lightning.utilities.imports import *
