"""Measuring the engine from outside it. Nothing here is loaded unless it is asked for."""
