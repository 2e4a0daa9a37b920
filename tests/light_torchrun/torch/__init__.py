"""Hides torch from pods that do not need it: importing it takes torchrun 2 seconds."""
