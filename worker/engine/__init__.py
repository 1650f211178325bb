"""The engine: rows of tokens in, rows of tokens out. Torch only; it knows neither Redis nor RQ."""
