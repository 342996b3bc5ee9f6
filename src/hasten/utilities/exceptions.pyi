from hasten_lightning.utilities.exceptions import *
