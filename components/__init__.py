"""WHERE: one KFP component per step, a thin typed wrapper around one function of `tailtune`.

KFP copies a component's source into a separate file, so every function imports what it uses.
Big things travel as paths on volumes, small ones as artifacts that the dashboard shows.
"""
