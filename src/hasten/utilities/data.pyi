from hasten_lightning.utilities.data import *
