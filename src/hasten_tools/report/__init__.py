"""Pictures and pages of runs that were recorded: ``hasten plot`` and ``hasten report``. It knows no running fit."""
