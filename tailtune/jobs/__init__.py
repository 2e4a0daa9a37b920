"""The launcher: one job description, back ends behind it. Here: torchrun on this machine."""
