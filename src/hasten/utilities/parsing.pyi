from hasten_lightning.utilities.parsing import *
