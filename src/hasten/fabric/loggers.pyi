from hasten_lightning._classes.fabric_loggers import *
