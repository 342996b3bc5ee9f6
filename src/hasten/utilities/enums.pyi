from hasten_lightning.utilities.enums import *
